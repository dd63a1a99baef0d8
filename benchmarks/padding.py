"""What it gains that steps keep their token count (docs/decisions/0025): `python -m benchmarks.padding MODEL_DIR`.

First decode steps alone, milliseconds a step: the same number of sequences again and again; that number and one more in
turn; and in turn with the smaller one padded. Then the engine on the mixed and the Poisson load of benchmarks.engine,
with and without padding in turn, on fresh tokens each time: output tokens/s, p95 TTFT, and the ratio with/without of
each pair.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.engine import mixed_jobs, p95_ttft, rate
from benchmarks.engine_sides import EngineSettings, HeadraceSide, Job, JobTimes, run_jobs
from benchmarks.step_cost import NUM_BLOCKS, requests_of
from headrace.worker.engine.padding import Padding
from headrace.worker.host.numa import usable_cpus
from headrace.worker.model.batch import Batch, build_batch, padded
from headrace.worker.model.runner import OpenVINOModelRunner

BATCHES = (4, 8, 16, 32, 64)
CONTEXT = 256
POISSON_PER_S = 3.2


class NoPadding(Padding):
    """Lets every change happen."""

    def of(self, num_tokens: int, *, is_decode: bool, token_ms: float, change_ms: float) -> int:
        """See Padding."""
        return super().of(num_tokens, is_decode=is_decode, token_ms=token_ms, change_ms=0.0)


def alternated(runner: OpenVINOModelRunner, batches: Sequence[Batch], rounds: int) -> list[float]:
    """Median milliseconds of each of some steps that take turns."""
    times: list[list[float]] = [[] for _ in batches]
    for number in range(rounds + 3):
        for batch, taken in zip(batches, times, strict=True):
            runner.bind(batch, keeps_logits=False)
            runner.run()
            if number >= 3:  # in the first kernels are built
                taken.append(1000 * runner.infer_s)
    return [statistics.median(taken) for taken in times]


def compare_steps(model_dir: Path, rounds: int) -> None:
    """Decode steps alone."""
    runner = OpenVINOModelRunner(model_dir, threads=len(usable_cpus()), kv_precision="u8", execution_mode="performance")
    runner.allocate(NUM_BLOCKS)
    rng = random.Random(1)
    for size in BATCHES:
        fewer, more = (
            build_batch(requests_of(((CONTEXT, 1),) * number, rng, runner.block_size), runner.block_size)
            for number in (size, size + 1)
        )
        same = alternated(runner, [fewer], rounds)[0]
        turns = alternated(runner, [fewer, more], rounds)
        kept = alternated(runner, [padded(fewer, 1, NUM_BLOCKS), more], rounds)
        print(
            f"decode {size}: same count {same:.1f} ms, with {size + 1} in turn {turns[0]:.1f} and {turns[1]:.1f}, "
            f"padded {kept[0]:.1f} and {kept[1]:.1f}",
            flush=True,
        )


def compare_loads(model_dir: Path, pairs: int, tokens: int) -> None:
    """The engine with and without, in turn."""
    side = HeadraceSide(EngineSettings(model_dir, 4000, max_num_batched_tokens=tokens))
    run_jobs(side, mixed_jobs(np.random.default_rng(5), 40, None))
    kinds: dict[str, tuple[str, float | None, int, Callable[[tuple[float, list[JobTimes]]], float]]] = {
        "mixed": ("output tokens/s", None, 200, rate),
        "poisson": ("ms p95 TTFT", POISSON_PER_S, 120, p95_ttft),
    }
    for name, (unit, per_s, count, figure) in kinds.items():
        found: dict[type[Padding], list[float]] = {Padding: [], NoPadding: []}
        for number in range(pairs):
            order = list(found)
            for position, kind in enumerate(order if number % 2 else order[::-1]):
                side.engine.meter.padding = kind()
                jobs: list[Job] = mixed_jobs(np.random.default_rng([number, position]), count, per_s)
                found[kind].append(figure(run_jobs(side, jobs)))
        ratios = sorted(a / b for a, b in zip(found[Padding], found[NoPadding], strict=True))
        print(
            f"{name}: with {statistics.median(found[Padding]):.1f}, without "
            f"{statistics.median(found[NoPadding]):.1f} {unit}, ratio {statistics.median(ratios):.3f} "
            f"(min {ratios[0]:.3f}, max {ratios[-1]:.3f}, {pairs} pairs)",
            flush=True,
        )


def main() -> None:
    """Both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20, help="of the steps alone")
    parser.add_argument("--tokens", type=int, default=256, help="in a step, at most")
    args = parser.parse_args()
    compare_steps(args.model_dir, args.rounds)
    compare_loads(args.model_dir, args.pairs, args.tokens)


if __name__ == "__main__":
    main()
