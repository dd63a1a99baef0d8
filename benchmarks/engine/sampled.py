"""Measures the cost of random sampling in a decode step: sampled steps compared with greedy ones of the same engine.

    python -m benchmarks.engine.sampled MODEL_DIR [--batch 1 8] [--rounds 8] [--steps 24]
        [--model own|widened|random]...

Every round runs each kind of sampling once, in a changing order, and compares its median step with the round's greedy
run, in wall time and in CPU time of all threads. The models are those of benchmarks.engine.overhead.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.engine.overhead import KINDS, MODELS, PROMPT, directory_of, random_prompts, step, text_prompts
from headrace.worker.engine.build import build_engine
from headrace.worker.host.numa import usable_cpus
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.row_sums import reducer_for
from headrace.worker.sampling.sampler import BatchSampler


def step_times(
    runner: OpenVINOModelRunner,
    sampler: BatchSampler,
    prompts: list[list[int]],
    steps: int,
    sampling: dict[str, float],
) -> tuple[float, float]:
    """Median wall and CPU milliseconds of a decode step."""
    num_blocks = len(prompts) * (-(-(PROMPT + 2 * steps) // runner.block_size) + 1)
    engine = build_engine(runner, sampler, num_blocks, StepLimits(len(prompts), 1024, 1024, is_exact=False))
    scheduler = engine.scheduler
    for index, prompt in enumerate(prompts):
        params = SamplingParams(**{"max_tokens": 2 * steps, "seed": index, **sampling})  # type: ignore[arg-type]
        scheduler.add(Request(str(index), prompt, params, 0, arrival_s=index))
    while any(request.num_uncomputed_tokens > 1 for request in scheduler.running) or scheduler.waiting:
        step(engine)
    times = []
    for _ in range(steps):
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        step(engine)
        times.append((time.perf_counter() - wall_s, time.process_time() - cpu_s))
    wall_ms, cpu_ms = 1000 * np.median(np.array(times), axis=0)
    return float(wall_ms), float(cpu_ms)


def compare(runner: OpenVINOModelRunner, name: str, prompts: list[list[int]], steps: int, rounds: int) -> None:
    """Print each kind of sampling in comparison with greedy decoding."""
    sampler = BatchSampler(reducer_for(runner.vocab_size, len(usable_cpus())))
    kinds = list(KINDS)
    found = {kind: np.zeros((rounds, 2)) for kind in kinds}
    gc.freeze()  # as the worker does
    for number in range(-1, rounds):
        for kind in np.roll(kinds, number).tolist():
            times = step_times(runner, sampler, prompts, steps, KINDS[kind])
            if number >= 0:
                found[kind][number] = times
    greedy = found["greedy"]
    where = f"{name}, vocabulary {runner.vocab_size}, batch {len(prompts)}"
    print(f"{where}, greedy: {np.median(greedy[:, 0]):.2f} ms a step, {np.median(greedy[:, 1]):.2f} ms of CPU")
    for kind in kinds[1:]:
        wall, cpu = (found[kind] / greedy).T
        print(
            f"{where}, {kind}: {np.median(wall):.3f} (min {wall.min():.3f}, max {wall.max():.3f}) of greedy, "
            f"CPU {np.median(cpu):.3f} (min {cpu.min():.3f}, max {cpu.max():.3f})",
            flush=True,
        )


def main() -> None:
    """Compare for each model and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one")
    parser.add_argument("--text", action="store_true", help="prompts of text")
    parser.add_argument("--decode-graph", action="store_true", help="with a graph of its own for small decode steps")
    args = parser.parse_args()
    most = max(args.batch)
    prompts = text_prompts(args.model_dir, most) if args.text else random_prompts(most)
    for model in args.model or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            runner = OpenVINOModelRunner(
                directory_of(model, args.model_dir, Path(folder)),
                threads=len(usable_cpus()),
                kv_precision="u8",
                execution_mode="performance",
                decode_graph=args.decode_graph,
            )
            runner.allocate(most * (-(-(PROMPT + 2 * args.steps) // 32) + 1))
            for batch in args.batch:
                compare(runner, model, prompts[:batch], args.steps, args.rounds)


if __name__ == "__main__":
    main()
