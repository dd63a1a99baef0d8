"""Simulates streams of a 7B model on few cores: `python -m benchmarks.router.large_model [--rates 0.05 0.08]`.

It runs one worker's real scheduler in virtual time, with the calculated step cost in sim/step_cost_7b.json. It compares
three ways to limit the steps that streams and prompts share (docs/decisions/scheduling.md#step-cost):

    256 tokens             regardless of their time
    in milliseconds        the worker's default: 200 ms, or 1.9 times the time of the step without prompts
    three times            the same with a factor of three

It prints means over the loads: the p99 and the maximum of the time between two tokens of an answer; the mean time per
token; p50 and p95 of the time to the first token; and the share of good requests, whose first token comes within 10 s
and whose tokens take 300 ms each. Loads differ by their seeds and are the same for each way.
"""

from __future__ import annotations

import argparse
import random
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from headrace.sim import step_cost
from headrace.sim.step_cost import StepCost
from headrace.sim.trace import Job
from headrace.sim.worker import OneWorker, WorkerSettings
from headrace.worker.engine import step_budget

STEP_COST = step_cost.DEFAULT_FILE.with_name("step_cost_7b.json")
BLOCK_SIZE = 32
KV_TOKENS = 128_000
REQUESTS, LOADS = 60, 24
# As in `headrace sim`.
TTFT_S, TPOT_S = 10.0, 0.3
RATES_PER_S = (0.05, 0.08, 0.12, 0.16)


class Way(NamedTuple):
    """A way to limit the steps that streams and prompts share."""

    times_without_prompts: float = step_budget.TIMES_WITHOUT_PROMPTS
    max_num_mixed_tokens: int | None = None
    target_step_ms: float | None = None

    def settings(self, cost: StepCost) -> WorkerSettings:
        """The worker's settings for this way."""
        return WorkerSettings(
            cost,
            kv_tokens=KV_TOKENS,
            block_size=BLOCK_SIZE,
            max_num_mixed_tokens=self.max_num_mixed_tokens,
            target_step_ms=self.target_step_ms,
        )

    def patch(self) -> AbstractContextManager[object]:
        """Have the scheduler's constant so."""
        return patch.object(step_budget, "TIMES_WITHOUT_PROMPTS", self.times_without_prompts)


WAYS = {
    # A target that no step reaches leaves the limit in tokens.
    "256 tokens": Way(max_num_mixed_tokens=256, target_step_ms=1e9),
    "in milliseconds": Way(),
    "three times": Way(times_without_prompts=3.0),
}


class Figures(NamedTuple):
    """The results of a load."""

    gap_p99_ms: float
    longest_gap_ms: float
    token_ms: float
    ttft_p50_s: float
    ttft_p95_s: float
    good: float
    """Part of the requests."""


def jobs_of(per_s: float, seed: int) -> list[Job]:
    """Prompts of some 380 tokens and answers of some 80, arriving at random."""
    rng, arrival_s, jobs = random.Random(seed), 0.0, []
    for number in range(REQUESTS):
        arrival_s += rng.expovariate(per_s)
        prompt, output = max(16, int(300 * rng.lognormvariate(0, 0.7))), 2 + int(rng.expovariate(1 / 80))
        jobs.append(Job(number, arrival_s, ((number, prompt),), output).hashed(BLOCK_SIZE))
    return jobs


def gaps_ms(token_s: list[list[float]]) -> list[float]:
    """The times between two tokens of an answer, for all answers, in milliseconds."""
    return [1000 * float(gap) for at in token_s for gap in np.diff(at)]


def goodput(jobs: list[Job], token_s: list[list[float]], tpot_s: float) -> float:
    """The share of requests within both limits: TTFT_S, and the given seconds per token."""
    good = [
        at[0] - job.arrival_s <= TTFT_S and (at[-1] - at[0]) / (len(at) - 1) <= tpot_s
        for job, at in zip(jobs, token_s, strict=True)
    ]
    return sum(good) / len(good)


def figures_of(jobs: list[Job], token_s: list[list[float]], tpot_s: float) -> Figures:
    """Compute all figures of a load."""
    gaps = gaps_ms(token_s)
    ttft_s = [at[0] - job.arrival_s for job, at in zip(jobs, token_s, strict=True)]
    token_ms = [1000 * (at[-1] - at[0]) / (len(at) - 1) for at in token_s]
    return Figures(
        float(np.percentile(gaps, 99)),
        max(gaps),
        float(np.mean(token_ms)),
        float(np.median(ttft_s)),
        float(np.percentile(ttft_s, 95)),
        goodput(jobs, token_s, tpot_s),
    )


def main() -> None:
    """Run every way at every rate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES_PER_S, help="requests that arrive in a second")
    parser.add_argument("--loads", type=int, default=LOADS)
    parser.add_argument("--tpot-s", type=float, default=TPOT_S, help="most seconds a token of a good request")
    parser.add_argument("--step-cost", type=Path, default=STEP_COST)
    args = parser.parse_args()
    cost = step_cost.read(args.step_cost)
    for per_s in args.rates:
        for name, way in WAYS.items():
            found = []
            for seed in range(args.loads):
                jobs = jobs_of(per_s, seed)
                with way.patch():
                    found.append(figures_of(jobs, OneWorker(way.settings(cost)).run(jobs), args.tpot_s))
            mean = Figures(*np.mean(found, axis=0).tolist())
            print(
                f"{per_s} a second, {name}: gaps p99 {mean.gap_p99_ms:.0f} ms, longest {mean.longest_gap_ms:.0f}; "
                f"{mean.token_ms:.0f} ms a token; TTFT p50 {mean.ttft_p50_s:.1f} s, p95 {mean.ttft_p95_s:.1f}; "
                f"good {mean.good:.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
