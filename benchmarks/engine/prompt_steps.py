"""Measures the gain from the order of prompts (docs/decisions/scheduling.md) and from larger steps of prompts alone
(docs/decisions/scheduling.md#steps-of-prompts): `python -m benchmarks.engine.prompt_steps MODEL_DIR`.

The engine runs the Poisson load of benchmarks.engine.throughput in three ways in turn, with fresh tokens each time:
prompts in order of arrival; prompts in order of their remaining tokens; and the latter with larger steps. It prints p95
TTFT, the mean time per output token, and the medians of the ratios to the first way. Each round has another load.
Before that, it simulates the scheduler in virtual time, with the simulator's step cost or one from a file, at several
rates, and prints means over many loads.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from benchmarks.engine.sides import EngineSettings, HeadraceSide, Job, JobTimes, run_jobs
from benchmarks.engine.throughput import mixed_jobs, p95_ttft, tpot
from headrace.sim import step_cost, trace
from headrace.sim.step_cost import StepCost
from headrace.sim.worker import OneWorker, WorkerSettings
from headrace.worker.engine import step_budget


class Way(NamedTuple):
    """How steps are made: one part in how many is for the first in rank (1: prompts in the order of arrival); the most
    tokens."""

    first_in_rank_share: int
    max_num_batched_tokens: int

    def patch(self) -> AbstractContextManager[object]:
        """Have the scheduler's constant so."""
        return patch.object(step_budget, "FIRST_IN_RANK_SHARE", self.first_in_rank_share)


AS_IT_IS = Way(step_budget.FIRST_IN_RANK_SHARE, 1024)
WAYS = {
    "in the order of arrival": Way(1, 256),
    "by what remains": AS_IT_IS._replace(max_num_batched_tokens=256),
    "with larger steps": AS_IT_IS,
}
REQUESTS = 120
NUM_BLOCKS, BLOCK_SIZE = 4000, 32
VIRTUAL_PER_S = (3.0, 3.2, 3.4, 3.6)
VIRTUAL_LOADS = 24


def in_virtual_time(jobs: Sequence[Job], cost: StepCost, way: Way) -> tuple[tuple[float, list[JobTimes]], list[float]]:
    """The result of `run_jobs`, and the milliseconds between the tokens of each answer. No two prompts share a
    block."""
    settings = WorkerSettings(
        cost,
        kv_tokens=NUM_BLOCKS * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=way.max_num_batched_tokens,
    )
    alone = OneWorker(settings)
    simulated = [
        trace.Job(number, job.arrival_s, ((number, len(job.prompt)),), job.output).hashed(BLOCK_SIZE)
        for number, job in enumerate(jobs)
    ]
    token_s = alone.run(simulated)
    times = [
        JobTimes(at[0] - job.arrival_s, at[-1] - job.arrival_s, len(at)) for job, at in zip(jobs, token_s, strict=True)
    ]
    return (alone.now_s, times), [1000 * float(gap) for at in token_s for gap in np.diff(at)]


def compare_in_virtual_time(cost: StepCost, rates_per_s: Sequence[float]) -> None:
    """Run all ways at several rates, and print means over the loads."""
    rng = np.random.default_rng(1)
    for per_s in rates_per_s:
        for name, way in WAYS.items():
            figures = []
            for number in range(VIRTUAL_LOADS):
                with way.patch():
                    run, gaps_ms = in_virtual_time(mixed_jobs(rng, REQUESTS, per_s, number), cost, way)
                figures.append((p95_ttft(run), tpot(run), float(np.percentile(gaps_ms, 99))))
            ttft_ms, tpot_ms, gap_ms = np.mean(figures, axis=0)
            print(
                f"virtual, {per_s} a second, {name}: p95 TTFT {ttft_ms:.0f} ms, "
                f"time per output token {tpot_ms:.1f} ms, p99 of gaps {gap_ms:.0f} ms"
            )


def compare_on_the_engine(model_dir: Path, rounds: int, per_s: float) -> None:
    """Run all ways in turn, and compute the medians of their ratios to the first."""
    side = HeadraceSide(EngineSettings(model_dir, NUM_BLOCKS, max_num_batched_tokens=AS_IT_IS.max_num_batched_tokens))
    run_jobs(side, mixed_jobs(np.random.default_rng(5), 40, None))
    figures = np.empty((rounds, len(WAYS), 2))
    for number in range(rounds):
        order = list(enumerate(WAYS.values()))
        for position, way in order if number % 2 else order[::-1]:
            side.engine.scheduler.max_num_batched_tokens = way.max_num_batched_tokens
            jobs = mixed_jobs(np.random.default_rng([number, position]), REQUESTS, per_s, number)
            with way.patch():
                run = run_jobs(side, jobs)
            figures[number, position] = p95_ttft(run), tpot(run)
    for position, name in enumerate(WAYS):
        ttft_ms, tpot_ms = np.median(figures[:, position], axis=0)
        ratios = np.median(figures[:, position] / figures[:, 0], axis=0)
        print(
            f"{name}: p95 TTFT {ttft_ms:.0f} ms ({ratios[0]:.3f}), "
            f"time per output token {tpot_ms:.1f} ms ({ratios[1]:.3f})"
        )


def main() -> None:
    """Compare them, in virtual time and on the engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--rounds", type=int, default=3, help="on the engine; 0 leaves it out")
    parser.add_argument("--per-s", type=float, default=3.2, help="requests that arrive in a second, on the engine")
    parser.add_argument("--virtual-per-s", type=float, nargs="*", default=VIRTUAL_PER_S)
    parser.add_argument(
        "--step-cost", type=Path, default=step_cost.DEFAULT_FILE, help="made by benchmarks.engine.step_cost"
    )
    args = parser.parse_args()
    compare_in_virtual_time(step_cost.read(args.step_cost), args.virtual_per_s)
    if args.rounds:
        compare_on_the_engine(args.model_dir, args.rounds, args.per_s)


if __name__ == "__main__":
    main()
