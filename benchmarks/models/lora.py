"""Throughput with LoRA adapters mixed in one batch.

    python -m benchmarks.models.lora MODEL_DIR [--adapters 8] [--rank 16] [--requests 64] [--prompt 32] [--output 128]
        [--rounds 3] [--kinds base mixed ...]

Each of --rounds rounds runs the same requests four times, in a changing order:

    base             none has an adapter
    mixed            they take turns over the adapters and none, all in one batch
    one by one       the same, but only requests of one adapter run at a time, one adapter after another
    base one by one  the groups of `one by one` without adapters: what smaller batches cost by themselves

The adapters have random weights on every linear layer. Steps may take as long as they need for all prompts at once, so
that all requests are in one batch and all kinds have steps of the same sizes. Otherwise streams that have begun would
keep steps short, and prompts would come in pieces, whose number depends on what was learned of steps. The first round
is not counted. Prints each round's tokens a second and steps. Then medians of tokens a second and of each round's
ratios, what loading an adapter takes while a batch runs, the longest step meanwhile, and the resident memory with the
second graph and without.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.machine import describe
from headrace.worker.engine.build import build_engine
from headrace.worker.engine.step_cost import StepCosts
from headrace.worker.host.numa import usable_cpus
from headrace.worker.model.adapter_memory import LowRank
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.model.step_limits import step_limits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.row_sums import reducer_for
from headrace.worker.sampling.sampler import BatchSampler

# Steps are not divided for the sake of streams.
STEP_MS = 60_000.0
KINDS = ("base", "mixed", "one by one", "base one by one")
RATIOS = (("mixed", "base"), ("mixed", "one by one"), ("base", "base one by one"))


def resident_mib() -> float:
    """Resident memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


class Run(NamedTuple):
    """Generated tokens a second, the number of steps, and the longest of them in milliseconds."""

    rate: float
    num_steps: int
    longest_ms: float


class Bench:
    """A compiled model with adapters in memory."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.num_adapters, self.rank, self.num_requests = arguments.adapters, arguments.rank, arguments.requests
        self.prompt, self.output = arguments.prompt, arguments.output
        # As a worker that has run for a while knows them, with adapters and without.
        self.costs = StepCosts()
        threads = len(usable_cpus())
        self.runner = OpenVINOModelRunner(
            arguments.model_dir,
            threads=threads,
            kv_precision="u8",
            execution_mode="performance",
            max_adapters=self.num_adapters + 1,
        )
        self.num_blocks = self.num_requests * (-(-(self.prompt + self.output) // self.runner.block_size) + 1)
        self.runner.allocate(self.num_blocks)
        self.sampler = BatchSampler(reducer_for(self.runner.vocab_size, threads))
        assert self.runner.adapters is not None
        self.runner.adapters = self.runner.adapters.with_rank(self.rank, [])
        for slot in range(self.num_adapters):
            self.write(slot)

    def write(self, slot: int) -> float:
        """Write random weights into a slot; the seconds that the writing took."""
        rng = np.random.default_rng(slot)
        weights = {
            linear.name: LowRank(
                (rng.standard_normal((self.rank, linear.num_inputs)) / linear.num_inputs**0.5).astype(np.float32),
                (rng.standard_normal((linear.num_outputs, self.rank)) * 0.02).astype(np.float32),
            )
            for linear in self.runner.linears
        }
        memory = self.runner.adapters
        assert memory is not None
        start_s = time.perf_counter()
        memory.write(slot, weights)
        return time.perf_counter() - start_s

    def requests(self, slots: Sequence[int]) -> list[Request]:
        """A request for each of the slots."""
        rng = np.random.default_rng(5)
        sampling = SamplingParams(max_tokens=self.output, seed=0, temperature=0.0)
        return [
            Request(str(number), rng.integers(0, self.runner.vocab_size, self.prompt).tolist(), sampling, number,
                    adapter_slot=slot)
            for number, slot in enumerate(slots)
        ]  # fmt: skip

    def run(self, kind: str) -> Run:
        """Run a kind."""
        limits = step_limits(self.num_requests, 1024, 1024, exact_rows=self.runner.exact_rows)
        engine = build_engine(
            self.runner, self.sampler, self.num_blocks, limits, target_step_ms=STEP_MS, step_costs=self.costs
        )
        batches = self.of_kind(kind)
        num_tokens, num_steps, longest_s = 0, 0, 0.0
        start_s = time.perf_counter()
        for batch in batches:
            for request in batch:
                engine.scheduler.add(request)
            while engine.scheduler.has_requests:
                began_s = time.perf_counter()
                num_tokens += sum(len(output.token_ids) for output in engine.step())
                longest_s = max(longest_s, time.perf_counter() - began_s)
                num_steps += 1
        return Run(num_tokens / (time.perf_counter() - start_s), num_steps, 1000 * longest_s)

    def of_kind(self, kind: str) -> list[list[Request]]:
        """The batches of a kind of run."""
        slots = [number % (self.num_adapters + 1) - 1 for number in range(self.num_requests)]
        requests = self.requests([-1] * self.num_requests if kind.startswith("base") else slots)
        if kind in ("base", "mixed"):
            return [requests]
        return [
            [request for request, of in zip(requests, slots, strict=True) if of == slot]
            for slot in range(-1, self.num_adapters)
        ]


def loading(bench: Bench) -> None:
    """Print what writing an adapter takes while a batch runs, and the longest step with and without it."""
    quiet_ms = bench.run("mixed").longest_ms
    took: list[float] = []
    is_over = threading.Event()

    def load() -> None:
        while not is_over.wait(0.2):
            took.append(1000 * bench.write(bench.num_adapters))

    thread = threading.Thread(target=load)
    thread.start()
    loaded_ms = bench.run("mixed").longest_ms
    is_over.set()
    thread.join()
    if took:
        print(f"writing an adapter while a batch runs: median {statistics.median(took):.0f} ms of {len(took)}")
    print(f"longest step: {loaded_ms:.0f} ms, {quiet_ms:.0f} ms without loading")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    for name, default in (
        ("adapters", 8),
        ("rank", 16),
        ("requests", 64),
        ("prompt", 32),
        ("output", 128),
        ("rounds", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    arguments = parser.parse_args()
    kinds = arguments.kinds
    print(describe())
    plain = OpenVINOModelRunner(
        arguments.model_dir, threads=len(usable_cpus()), kv_precision="u8", execution_mode="performance"
    )
    without_mib = resident_mib()
    del plain
    bench = Bench(arguments)
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    orders = itertools.cycle(itertools.permutations(kinds))
    for number in range(arguments.rounds + 1):
        runs = {kind: bench.run(kind) for kind in next(orders)}
        for kind in kinds if number else ():
            rates[kind].append(runs[kind].rate)
        shown = (f"{kind} {runs[kind].rate:.1f} ({runs[kind].num_steps} steps)" for kind in kinds)
        print(f"round {number}:", *shown, flush=True)
    for kind in kinds:
        print(f"{kind}: {statistics.median(rates[kind]):.1f} tokens/s")
    for kind, other in (pair for pair in RATIOS if set(pair) <= set(kinds)):
        ratios = [rate / peer for rate, peer in zip(rates[kind], rates[other], strict=True)]
        print(f"{kind} to {other}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    loading(bench)
    print(f"resident: {resident_mib():.0f} MiB, {without_mib:.0f} MiB of one graph alone")


if __name__ == "__main__":
    main()
