"""Speculative decoding in virtual time: the speed-up is the one that the cost curves predict.

The costs are those of a model of 7 billion parameters and, as its draft, of one of 135 million.
"""

from __future__ import annotations

import pytest

from headrace.sim import step_cost
from headrace.sim.step_cost import StepCost
from headrace.sim.trace import Job
from headrace.sim.worker import OneWorker, WorkerSettings
from headrace.worker.engine.step_cost import StepShape
from headrace.worker.speculation.proposer import MAX_MODEL_DRAFT

LARGE = step_cost.read(step_cost.DEFAULT_FILE.with_name("step_cost_7b.json"))
SMALL = step_cost.default()
PROMPT, ANSWER, FIRST = 100, 900, 200


def tokens_per_s(acceptance: float | None, *, num_streams: int = 1, draft_cost: StepCost | None = SMALL) -> float:
    """Tokens a second of all streams, from token `FIRST` of each to the end of the first one to finish."""
    settings = WorkerSettings(LARGE, block_size=32, acceptance=acceptance, draft_cost=draft_cost)
    jobs = [Job(number, 0.0, ((number, PROMPT),), ANSWER).hashed(32) for number in range(num_streams)]
    token_s = OneWorker(settings).run(jobs)
    start_s = max(times[FIRST] for times in token_s)
    end_s = min(times[-1] for times in token_s)
    return sum(start_s < at_s <= end_s for times in token_s for at_s in times) / (end_s - start_s)


def predicted_speed_up(acceptance: float, num_streams: int) -> float:
    """With as many draft tokens for each stream as are best."""
    past = PROMPT + (FIRST + ANSWER) // 2

    def step_ms(cost: StepCost, num_drafted: int) -> float:
        rows = [(past + ahead, 1) for ahead in range(1 + num_drafted) for _ in range(num_streams)]
        return cost.milliseconds(StepShape.of(rows))

    alone_ms = step_ms(LARGE, 0)
    return max(
        sum(acceptance**depth for depth in range(count + 1))
        * alone_ms
        / (step_ms(LARGE, count) + count * step_ms(SMALL, 0))
        for count in range(MAX_MODEL_DRAFT + 1)
    )


@pytest.mark.parametrize("num_streams", [1, 4])
@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
def test_the_speed_up_is_within_a_tenth_of_what_the_costs_predict(acceptance: float, num_streams: int) -> None:
    found = tokens_per_s(acceptance, num_streams=num_streams) / tokens_per_s(None, num_streams=num_streams)
    predicted = predicted_speed_up(acceptance, num_streams)
    print(f"p = {acceptance}, {num_streams} streams: {found:.3f} times, predicted {predicted:.3f}")
    assert found == pytest.approx(predicted, rel=0.1)
    assert num_streams > 1 or predicted > 1.2


def test_drafts_that_are_seldom_right_cost_little() -> None:
    assert tokens_per_s(0.05) >= 0.97 * tokens_per_s(None)
    assert tokens_per_s(0.05, num_streams=32) >= 0.97 * tokens_per_s(None, num_streams=32)


def test_routers_are_told_of_tokens_and_not_of_steps() -> None:
    reported = []
    for acceptance in (None, 0.9):
        one = OneWorker(WorkerSettings(LARGE, block_size=32, acceptance=acceptance, draft_cost=SMALL))
        token_s = one.run([Job(0, 0.0, ((0, PROMPT),), ANSWER).hashed(32)])[0]
        rate = one.worker.scheduler.step_costs.rates
        reported.append(rate.decode_token_ms)
        assert rate.decode_token_ms == pytest.approx(1000 * (token_s[-1] - token_s[FIRST]) / (ANSWER - FIRST), rel=0.25)
    assert reported[0] > 1.5 * reported[1]
