"""What the order of prompts and pauses of streams gain (docs/decisions/0028): `python -m benchmarks.pauses MODEL_DIR`.

The engine on the Poisson load of benchmarks.engine, in three ways in turn, on fresh tokens each time: by what remains
to compute alone, with a quarter of each step for the first in rank; with the credit for waiting; with that and pauses.
Prints p95 TTFT, the mean time per output token, and the medians of the ratios to the first. Before that the same in
virtual time, the scheduler with the simulator's step cost, at several rates: there, runs do not differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np

from benchmarks.engine import mixed_jobs, p95_ttft, tpot
from benchmarks.engine_sides import EngineSettings, HeadraceSide, Job, JobTimes, run_jobs
from headrace.sim import step_cost, trace
from headrace.sim.worker import SimulatedWorker, WorkerSettings
from headrace.worker import scheduler
from headrace.worker.pauses import LONGEST_S, Pauses

# Part of the budget for the first in rank, credit for waiting, longest pause.
WAYS = {
    "remaining only": (4, 0.0, 0.0),
    "with credit": (scheduler.FIRST_IN_RANK_SHARE, scheduler.MAX_CREDIT_S, 0.0),
    "with pauses": (scheduler.FIRST_IN_RANK_SHARE, scheduler.MAX_CREDIT_S, LONGEST_S),
}
REQUESTS = 120
NUM_BLOCKS, BLOCK_SIZE = 4000, 32
VIRTUAL_PER_S = (3.0, 3.2, 3.4, 3.6)


def in_virtual_time(jobs: Sequence[Job], pauses: Pauses) -> tuple[tuple[float, list[JobTimes]], list[float]]:
    """What `run_jobs` gives, and the milliseconds between each answer's tokens. No two prompts share a block."""
    now_s = 0.0
    settings = WorkerSettings(step_cost.default(), kv_tokens=NUM_BLOCKS * BLOCK_SIZE, block_size=BLOCK_SIZE)
    worker = SimulatedWorker(settings, lambda: now_s)
    worker.scheduler.pauses = pauses
    coming = [
        trace.Job(number, job.arrival_s, ((number, len(job.prompt)),), job.output).hashed(BLOCK_SIZE)
        for number, job in enumerate(jobs)
    ]
    token_s: list[list[float]] = [[] for _ in jobs]
    while coming or worker.scheduler.has_requests:
        while coming and coming[0].arrival_s <= now_s:
            job = coming.pop(0)
            worker.take(job.request(job.arrival_s), job)
        step_ms = worker.begin_step()
        if step_ms is None:
            now_s = coming[0].arrival_s
            continue
        now_s += step_ms / 1000
        for output in worker.end_step(now_s)[0]:
            token_s[int(output.request.request_id)].append(now_s)
    times = [
        JobTimes(at[0] - job.arrival_s, at[-1] - job.arrival_s, len(at)) for job, at in zip(jobs, token_s, strict=True)
    ]
    return (now_s, times), [1000 * float(gap) for at in token_s for gap in np.diff(at)]


def compare_in_virtual_time() -> None:
    """The three, at several rates."""
    for per_s in VIRTUAL_PER_S:
        for name, (share, credit_s, longest_s) in WAYS.items():
            jobs = mixed_jobs(np.random.default_rng(1), REQUESTS, per_s)
            with patch.multiple(scheduler, FIRST_IN_RANK_SHARE=share, MAX_CREDIT_S=credit_s):
                run, gaps_ms = in_virtual_time(jobs, Pauses(longest_s))
            print(
                f"virtual, {per_s} a second, {name}: p95 TTFT {p95_ttft(run):.0f} ms, "
                f"time per output token {tpot(run):.1f} ms, p99 of gaps {np.percentile(gaps_ms, 99):.0f} ms"
            )


def main() -> None:
    """Compare the three, in virtual time and on the engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--per-s", type=float, default=3.2, help="requests that arrive in a second")
    args = parser.parse_args()
    compare_in_virtual_time()
    side = HeadraceSide(EngineSettings(args.model_dir, NUM_BLOCKS))
    run_jobs(side, mixed_jobs(np.random.default_rng(5), 40, None))
    figures = np.empty((args.rounds, len(WAYS), 2))
    for number in range(args.rounds):
        order = list(enumerate(WAYS.values()))
        for position, (share, credit_s, longest_s) in order if number % 2 else order[::-1]:
            side.engine.scheduler.pauses = Pauses(longest_s)
            jobs = mixed_jobs(np.random.default_rng([number, position]), REQUESTS, args.per_s)
            with patch.multiple(scheduler, FIRST_IN_RANK_SHARE=share, MAX_CREDIT_S=credit_s):
                run = run_jobs(side, jobs)
            figures[number, position] = p95_ttft(run), tpot(run)
    for position, name in enumerate(WAYS):
        ttft_ms, tpot_ms = np.median(figures[:, position], axis=0)
        ratios = np.median(figures[:, position] / figures[:, 0], axis=0)
        print(
            f"{name}: p95 TTFT {ttft_ms:.0f} ms ({ratios[0]:.3f}), "
            f"time per output token {tpot_ms:.1f} ms ({ratios[1]:.3f})"
        )


if __name__ == "__main__":
    main()
