"""What the order of prompts and pauses of streams gain (docs/decisions/0028): `python -m benchmarks.pauses MODEL_DIR`.

The engine on the Poisson load of benchmarks.engine, in three ways in turn, on fresh tokens each time: by what remains
to compute alone, with a quarter of each step for the first in rank; with the credit for waiting; with that and pauses.
Prints p95 TTFT, the mean time per output token, and the medians of the ratios to the first.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest.mock import patch

import numpy as np

from benchmarks.engine import mixed_jobs, p95_ttft, tpot
from benchmarks.engine_sides import EngineSettings, HeadraceSide, run_jobs
from headrace.worker import scheduler
from headrace.worker.pauses import LONGEST_S, Pauses

# Part of the budget for the first in rank, credit for waiting, longest pause.
WAYS = {
    "remaining only": (4, 0.0, 0.0),
    "with credit": (scheduler.FIRST_IN_RANK_SHARE, scheduler.MAX_CREDIT_S, 0.0),
    "with pauses": (scheduler.FIRST_IN_RANK_SHARE, scheduler.MAX_CREDIT_S, LONGEST_S),
}
REQUESTS = 120


def main() -> None:
    """Compare the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--per-s", type=float, default=3.2, help="requests that arrive in a second")
    args = parser.parse_args()
    side = HeadraceSide(EngineSettings(args.model_dir, 4000))
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
