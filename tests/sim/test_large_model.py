"""A model of 7 billion parameters on few cores: streams are not held up by prompts."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.router.large_model import STEP_COST, TPOT_S, WAYS, Way, gaps_ms, goodput, jobs_of
from headrace.sim import step_cost
from headrace.sim.worker import OneWorker

LARGE = step_cost.read(STEP_COST)
# Twice what a decode step of one stream takes, which is the target of steps with prompts.
TARGET_MS = 300.0


@pytest.mark.parametrize("target_step_ms", [None, TARGET_MS])
def test_gaps_between_tokens_stay_below_twice_the_target_and_goodput_is_no_less(target_step_ms: float | None) -> None:
    """Compared with steps of 256 tokens, regardless of their time."""
    gaps, good, good_by_tokens = [], [], []
    for seed in range(3):
        jobs = jobs_of(0.1, seed)
        token_s = OneWorker(Way(target_step_ms=target_step_ms).settings(LARGE)).run(jobs)
        gaps += gaps_ms(token_s)
        good.append(goodput(jobs, token_s, TPOT_S))
        by_tokens = OneWorker(WAYS["256 tokens"].settings(LARGE)).run(jobs)
        good_by_tokens.append(goodput(jobs, by_tokens, TPOT_S))
    assert np.percentile(gaps, 99) < 2 * TARGET_MS
    assert np.mean(good) >= np.mean(good_by_tokens)


def test_no_stream_waits_longer_than_for_a_step_with_prompts() -> None:
    """A few streams, so that a step with prompts takes 400 ms at most. Predictions are within a tenth."""
    alone = OneWorker(Way().settings(LARGE))
    assert max(gaps_ms(alone.run(jobs_of(0.04, 1)))) <= 1.1 * 400
