"""One model on one core, on two ranks with a core each, and in one process with both cores.

    python -m benchmarks.engine.ranks MODEL_DIR [--rounds 15] [--step 'decode 1']

Each side is a process that loads the model once; an idle one takes no CPU time. The sides compute the same steps in
turns. It prints the milliseconds of each, and the median and quartiles of the ratios of the ranks to the other two;
then how long the ranks waited for each other in a step. Before, it prints what a sum takes by itself, and at the end
the resident memory of each process.

Nothing else should run on the machine. Each rank has half of the weights' products, so with memory of its own it could
take half of one core's time; ranks that share one memory cannot be faster than one process with both cores.
"""

from __future__ import annotations

import os
import random
import statistics
import time
import timeit
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13

from benchmarks.engine.divided import CONTEXT, NUM_BLOCKS, REPEATS, Make, arguments, running
from benchmarks.engine.step_cost import requests_of
from benchmarks.machine import describe
from benchmarks.memory import memory_of
from headrace.bench.process_tree import descendants
from headrace.worker.model.batch import Batch, build_batch
from headrace.worker.model.rank_sum import RankSum
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.ranks.group import GroupRunner

# Names, with the sequences of a step: tokens that are computed, and those that the step computes.
STEPS = {
    **{f"decode {size}": ((CONTEXT, 1),) * size for size in (1, 8, 32)},
    **{f"prompt {tokens}": ((0, tokens),) for tokens in (64, 256, 512)},
}
NUM_SUMS = 60


@dataclass(frozen=True)
class Measured:
    """Milliseconds of a step, and those that each rank waited in it."""

    step_ms: float
    waited_ms: tuple[float, ...]


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
        hangs_after_s=60.0,
        on_lost=lambda reason: os._exit(70) if reason else None,
    )


def compute(make: Make, model_dir: Path, cpus: list[int], link: Connection) -> None:
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


def memories_of(pid: int) -> list[str]:
    """The memory of a process and of those that it started, the largest last."""
    memories = [memory_of(process.pid) for process in descendants(pid)]
    found = sorted((memory.private + memory.shared, memory.of_files) for memory in memories)
    return [f"{own / 1e6:.0f} MB and {of_files / 1e6:.0f} of files" for own, of_files in found]


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
    args = arguments(__doc__, STEPS)
    print(describe())
    print(f"a sum that waits for nobody takes {sum_us():.0f} us", flush=True)
    with running(args.model_dir, "two ranks", ranks, compute) as sides:
        for step in args.step:
            found: list[list[Measured]] = sides.measure(step, args.rounds)
            times = np.array([[one.step_ms for one in row] for row in found])
            waited = np.median([row[1].waited_ms for row in found], axis=0)
            print(f"{sides.describe(step, times)}; waited {', '.join(f'{ms:.2f}' for ms in waited)} ms", flush=True)
        for name, pid in sides.pids.items():
            print(f"{name}: resident {', '.join(memories_of(pid))}", flush=True)


if __name__ == "__main__":
    main()
