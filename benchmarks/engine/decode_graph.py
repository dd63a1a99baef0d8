"""Compares decode steps on the general graph with those on the graph for small decode steps (docs/decisions/graphs.md).

    python -m benchmarks.engine.decode_graph MODEL_DIR [--rounds 15]

The graphs alternate. It prints the milliseconds of both, and the median and quartiles of the ratio second/first. On
CPUs without AMX a worker builds the second graph only on request; this benchmark always builds it.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np

from benchmarks.engine.graph import timed
from benchmarks.engine.step_cost import NUM_BLOCKS, requests_of
from headrace.worker.host.numa import usable_cpus
from headrace.worker.model.batch import build_batch
from headrace.worker.model.runner import OpenVINOModelRunner

CONTEXT = 256
SIZES = (1, 4, 5, 8, 16, 24, 32, 64)


def main() -> None:
    """Compare all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    runner = OpenVINOModelRunner(
        args.model_dir,
        threads=len(usable_cpus()),
        kv_precision="u8",
        execution_mode="performance",
        decode_graph=True,
    )
    runner.allocate(NUM_BLOCKS)
    rng = random.Random(1)
    for size in SIZES:
        batch = build_batch(requests_of(((CONTEXT, 1),) * size, rng, runner.block_size), runner.block_size)
        rounds = []
        for _ in range(args.rounds + 1):
            taken = []
            for most in (0, size):
                runner.small_decode = most
                taken.append(timed(runner, batch))
            rounds.append(taken)
        times = np.array(rounds[1:])  # in the first round kernels are built
        low, median, high = np.percentile(times[:, 1] / times[:, 0], [25, 50, 75])
        one, other = np.median(times, axis=0)
        print(f"decode {size}: {one:.1f} and {other:.1f} ms, ratio {median:.3f} ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
