"""Measures the gain from rewriting a model's graph (docs/decisions/graphs.md#fewer-products):
`python -m benchmarks.engine.graph MODEL_DIR`.

Three graphs alternate in one process: the original one, one with query, key and value fused into one product, and one
that also computes the last layer only for sampled rows. It prints the milliseconds of the first, and for the others the
median and quartiles of the ratio to the first.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from unittest.mock import patch

import numpy as np

from benchmarks.engine.step_cost import NUM_BLOCKS, requests_of
from headrace.worker.host.numa import usable_cpus
from headrace.worker.model import lm_head
from headrace.worker.model import runner as model_runner
from headrace.worker.model.batch import Batch, build_batch
from headrace.worker.model.sampled_rows import gathered

CONTEXT = 160
STEPS = {
    **{f"decode {size}": ((CONTEXT, 1),) * size for size in (1, 8, 32, 64)},
    **{f"prompt {tokens}": ((0, tokens),) for tokens in (64, 256, 512)},
}
# Of a step in one go, on each graph.
REPEATS = 5


def runners(model_dir: Path) -> dict[str, model_runner.OpenVINOModelRunner]:
    """A runner for each kind of graph."""

    def runner() -> model_runner.OpenVINOModelRunner:
        threads = len(usable_cpus())
        made = model_runner.OpenVINOModelRunner(
            model_dir, threads=threads, kv_precision="u8", execution_mode="performance"
        )
        made.allocate(NUM_BLOCKS)
        return made

    at_head = patch.object(lm_head, "states_of_rows", lambda states, rows, model: gathered(states, rows))
    with at_head, patch.object(model_runner, "fuse_projections", lambda *_: 0):
        as_it_is = runner()
    with at_head:
        fused = runner()
    return {"as it is": as_it_is, "one product": fused, "and sampled rows": runner()}


def timed(runner: model_runner.OpenVINOModelRunner, batch: Batch) -> float:
    """Mean milliseconds of the step, the first left out."""
    times = []
    for _ in range(REPEATS + 1):
        runner.bind(batch, keeps_logits=False)
        runner.run()
        times.append(1000 * runner.infer_s)
    return sum(times[1:]) / REPEATS


def main() -> None:
    """Compare all steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    graphs = runners(args.model_dir)
    rng = random.Random(1)
    for name, step in STEPS.items():
        block_size = next(iter(graphs.values())).block_size
        batch = build_batch(requests_of(step, rng, block_size), block_size)
        times = np.array(
            [[timed(runner, batch) for runner in graphs.values()] for _ in range(args.rounds + 1)][1:]
        )  # in the first round kernels are built
        ratios = np.percentile(times / times[:, :1], [25, 50, 75], axis=0)
        figures = [
            f"{graph} {ratios[1, index]:.3f} ({ratios[0, index]:.3f} to {ratios[2, index]:.3f})"
            for index, graph in enumerate(graphs)
            if index
        ]
        print(f"{name}: {np.median(times[:, 0]):.1f} ms; {', '.join(figures)}", flush=True)


if __name__ == "__main__":
    main()
