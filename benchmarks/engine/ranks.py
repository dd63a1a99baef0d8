"""One model on one core, on two ranks with a core each, and in one process with both cores.

    python -m benchmarks.engine.ranks MODEL_DIR [--rounds 15]

Each side is a process that loads the model once; an idle one takes no CPU time. The sides compute the same steps in
turns. It prints the milliseconds of each, and the median and quartiles of the ratios of the ranks to the other two;
then how long the ranks waited for each other in a step. Before, it prints what a sum takes by itself, and the
resident memory of each process.

Nothing else should run on the machine. Each rank has half of the weights' products, so with memory of its own it could
take half of one core's time; ranks that share one memory cannot be faster than one process with both cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13

from benchmarks.engine.step_cost import requests_of
from benchmarks.machine import describe
from headrace.worker.model.batch import Batch, build_batch
from headrace.worker.model.rank_sum import RankSum
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.ranks.group import GroupRunner

NUM_BLOCKS = 2100
CONTEXT = 256
# Names, with the sequences of a step: tokens that are computed, and those that the step computes.
STEPS = {
    **{f"decode {size}": ((CONTEXT, 1),) * size for size in (1, 8, 32)},
    **{f"prompt {tokens}": ((0, tokens),) for tokens in (64, 256, 512)},
}
NUM_SUMS = 60
# Of a step in one go, the first of which is not counted.
REPEATS = 6


@dataclass(frozen=True)
class Measured:
    """Milliseconds of a step, and those that each rank waited in it."""

    step_ms: float
    waited_ms: tuple[float, ...]


def one_process(model_dir: Path, cpus: list[int]) -> OpenVINOModelRunner:
    """The undivided model on these CPUs."""
    os.sched_setaffinity(0, cpus)
    return OpenVINOModelRunner(model_dir, threads=len(cpus), kv_precision="u8", execution_mode="performance")


def ranks(model_dir: Path, cpus: list[int]) -> OpenVINOModelRunner:
    """The divided model, a rank on each CPU."""
    os.sched_setaffinity(0, cpus[:1])
    return GroupRunner(
        model_dir,
        [[cpu] for cpu in cpus],
        threads=1,
        kv_precision="u8",
        execution_mode="performance",
        max_context_tokens=NUM_BLOCKS,
        speculates=False,
        most_tokens=1024,
        on_lost=lambda reason: os._exit(70) if reason else None,
    )


def compute(
    make: Callable[[Path, list[int]], OpenVINOModelRunner], model_dir: Path, cpus: list[int], link: Connection
) -> None:
    """Load, and compute the steps that are asked for until None comes."""
    runner = make(model_dir, cpus)
    runner.allocate(NUM_BLOCKS)
    runner.touch()
    link.send(os.getpid())
    rng = random.Random(1)
    batches = {
        name: build_batch(requests_of(step, rng, runner.block_size), runner.block_size) for name, step in STEPS.items()
    }
    while (name := link.recv()) is not None:
        link.send(timed(runner, batches[name]))
    if isinstance(runner, GroupRunner):
        runner.close()


def timed(runner: OpenVINOModelRunner, batch: Batch) -> Measured:
    """The means over the repeats."""
    times, waits = [], []
    for _ in range(REPEATS):
        before = runner.ranks()
        start_s = time.perf_counter()
        runner.bind(batch, keeps_logits=False)
        runner.run()
        times.append(1000 * (time.perf_counter() - start_s))
        pairs = zip(before, runner.ranks(), strict=True)
        waits.append([1000 * (new.waited_s - old.waited_s) for old, new in pairs])
    return Measured(statistics.mean(times[1:]), tuple(np.mean(waits[1:], axis=0).tolist()))


def resident_mb(pid: int) -> list[float]:
    """The memory of a process and of its children, largest last, in MB."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += (task / "children").read_text().split()
    found = []
    for process in {pid, *map(int, children)}:
        status = Path(f"/proc/{process}/status").read_text()
        found.append(int(status.partition("VmRSS:")[2].split()[0]) / 1000)
    return sorted(found)


def sum_us() -> float:
    """Microseconds that a sum of 576 numbers adds to an inference, besides waiting: the difference between a graph of
    sums and one without, whose other operations are the same."""

    def seconds(is_summed: bool) -> float:
        parameter = opset13.parameter([-1, 576], np.float32)
        values = parameter.output(0)
        for number in range(NUM_SUMS):
            values = opset13.add(values, opset13.constant(np.float32(1))).output(0)
            if is_summed:
                values = RankSum([values], number=number, add=lambda _, part, total: np.copyto(total, part)).output(0)
        compiled = ov.Core().compile_model(
            ov.Model([opset13.result(values)], [parameter], "sums"), "CPU", {"INFERENCE_NUM_THREADS": 1}
        )
        request = compiled.create_infer_request()
        request.set_input_tensor(ov.Tensor(np.zeros((1, 576), np.float32)))
        return statistics.median(timeit.repeat(request.infer, number=20, repeat=20)) / 20

    return 1e6 * (seconds(is_summed=True) - seconds(is_summed=False)) / NUM_SUMS


def main() -> None:
    """Compare all steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print(describe())
    print(f"a sum that waits for nobody takes {sum_us():.0f} us", flush=True)
    first, second = sorted(os.sched_getaffinity(0))[:2]
    sides = {
        "one core": (one_process, [first]),
        "two ranks": (ranks, [first, second]),
        "two threads": (one_process, [first, second]),
    }
    context = multiprocessing.get_context("spawn")
    links: dict[str, Connection] = {}
    for name, (make, cpus) in sides.items():
        links[name], theirs = context.Pipe()
        context.Process(target=compute, args=(make, args.model_dir, cpus, theirs)).start()
        pid = links[name].recv()
        print(f"{name}: resident {', '.join(f'{size:.0f}' for size in resident_mb(pid))} MB", flush=True)
    try:
        for step in STEPS:
            compare(step, links, args.rounds)
    finally:
        for link in links.values():
            link.send(None)


def compare(step: str, links: dict[str, Connection], rounds: int) -> None:
    """Compute a step on all sides in turns, and print the figures."""
    found: list[list[Measured]] = []
    for number in range(rounds + 1):
        names = list(links)
        of_round: dict[str, Measured] = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            links[name].send(step)
            of_round[name] = links[name].recv()
        if number:  # in the first round kernels are built
            found.append([of_round[name] for name in names])
    times = np.array([[one.step_ms for one in row] for row in found])
    one, two, threads = np.median(times, axis=0)
    waited = np.median([row[1].waited_ms for row in found], axis=0)
    against = [
        f"{name} {np.median(ratios):.3f} ({np.percentile(ratios, 25):.3f} to {np.percentile(ratios, 75):.3f})"
        for name, ratios in (("one core", times[:, 1] / times[:, 0]), ("two threads", times[:, 1] / times[:, 2]))
    ]
    print(
        f"{step}: {one:.1f} ms on one core, {two:.1f} on two ranks, {threads:.1f} on two threads; "
        f"ranks to {', to '.join(against)}; waited {', '.join(f'{ms:.2f}' for ms in waited)} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
