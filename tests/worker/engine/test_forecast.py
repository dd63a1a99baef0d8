"""Predicted waiting, and refusals by it: only for what goes ahead."""

from __future__ import annotations

import math

import pytest

from headrace.protos.status import Reason
from headrace.worker.engine.forecast import Forecast
from headrace.worker.engine.scheduler import Scheduler
from headrace.worker.engine.step_cost import StepCosts
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from tests.worker.conftest import BLOCK_SIZE, EngineUnderTest, make_engine

RATE = 100.0
"""Prompt tokens a second, unless a test says otherwise."""
MAX_WAIT_S = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Rate:
    """A fixed rate of prompts, in tokens per second."""

    def __init__(self) -> None:
        self.tokens_per_s = RATE


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def rate(monkeypatch: pytest.MonkeyPatch) -> Rate:
    rate = Rate()
    monkeypatch.setattr(Scheduler, "prompt_tokens_per_s", lambda scheduler, past: rate.tokens_per_s)
    return rate


@pytest.fixture
def engine() -> EngineUnderTest:
    return make_engine(num_blocks=20_000, max_num_seqs=4, max_num_batched_tokens=64)


@pytest.fixture
def forecast(engine: EngineUnderTest, clock: Clock) -> Forecast:
    return Forecast(engine.scheduler, MAX_WAIT_S, clock)


def new(prompt: list[int], **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=4, seed=0, temperature=0.0)
    return Request("new", prompt, sampling, 1, **{"arrival_s": 1e6, **fields})  # type: ignore[arg-type]


def distinct(number: int, length: int) -> list[int]:
    """A prompt that shares no block with prompts of other numbers."""
    return [number] * length


def is_taken(forecast: Forecast, request: Request) -> bool:
    return forecast.refusal(request) is None


def test_while_nothing_is_learned_nobody_is_refused(engine: EngineUnderTest, forecast: Forecast) -> None:
    engine.request(distinct(1, 50_000))
    assert not is_taken(forecast, new(distinct(2, 50_000)))
    engine.scheduler.step_costs = StepCosts()
    assert is_taken(forecast, new(distinct(2, 50_000)))


@pytest.mark.parametrize("deadline_s", [None, 1.0])
def test_an_idle_worker_refuses_no_prompt_for_its_length(
    forecast: Forecast, clock: Clock, deadline_s: float | None
) -> None:
    deadline = {} if deadline_s is None else {"deadline_s": clock.now + deadline_s}
    assert is_taken(forecast, new(distinct(1, 50_000), **deadline))


def test_a_short_prompt_that_overtakes_a_long_one_does_not_wait_for_it(
    engine: EngineUnderTest, forecast: Forecast
) -> None:
    engine.request(distinct(1, 9_000))
    engine.step()
    assert is_taken(forecast, new(distinct(2, 50)))
    request = engine.request(distinct(2, 50))
    engine.step()
    engine.step()
    assert request.num_generated_tokens > 0, "it does overtake it"


def test_what_goes_ahead_counts(engine: EngineUnderTest, forecast: Forecast, rate: Rate) -> None:
    engine.request(distinct(1, 1_200), max_tokens=1)
    refused = forecast.refusal(new(distinct(2, 2_000)))
    assert refused is not None
    assert (refused.reason, refused.retry_after_s) == (Reason.QUEUE_FULL, pytest.approx(2.0))
    assert "12.0 s for others, 2.0 s longer than it may" in refused.message
    rate.tokens_per_s = 2 * RATE
    assert is_taken(forecast, new(distinct(2, 2_000)))
    assert not is_taken(forecast, new(distinct(2, 2_000), max_wait_s=5.0))
    rate.tokens_per_s = RATE
    for _ in range(5):
        engine.step()
    assert is_taken(forecast, new(distinct(2, 2_000))), "some of it is computed"


def test_a_prompt_that_is_nearly_cached_overtakes_what_is_longer_than_its_rest(
    engine: EngineUnderTest, forecast: Forecast
) -> None:
    prompt = distinct(1, 500) + distinct(2, 1_500)
    engine.request(prompt, max_tokens=1)
    engine.run()
    engine.request(distinct(3, 1_500))
    again = new([*prompt, *distinct(4, 100)])
    wait_s, own_s = forecast.wait_s(again)
    assert (wait_s, own_s) == (0.0, pytest.approx(1.0, abs=BLOCK_SIZE / RATE))
    assert is_taken(forecast, again)
    assert not is_taken(forecast, new(distinct(5, 2_000)))


def test_a_deadline_that_only_an_idle_worker_would_keep_refuses(
    engine: EngineUnderTest, forecast: Forecast, clock: Clock
) -> None:
    engine.request(distinct(1, 300))
    assert is_taken(forecast, new(distinct(2, 400), deadline_s=clock.now + 8.0))
    refused = forecast.refusal(new(distinct(2, 400), deadline_s=clock.now + 5.0))
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(2.0)
    assert is_taken(forecast, new(distinct(2, 400), deadline_s=clock.now + 3.0)), "waiting is not what it misses"


def test_an_answer_that_has_begun_is_never_refused(engine: EngineUnderTest, forecast: Forecast) -> None:
    engine.request(distinct(1, 5_000))
    assert not is_taken(forecast, new(distinct(2, 6_000)))
    assert is_taken(forecast, new(distinct(2, 6_000), resume_token_ids=[1, 2]))


def test_what_prompts_share_is_computed_once_and_counts_once(engine: EngineUnderTest, forecast: Forecast) -> None:
    shared = list(range(900))
    for number in range(3):
        engine.request([*shared, *distinct(number, 20)])
    wait_s, _ = forecast.wait_s(new(distinct(9, 2_000)))
    assert wait_s == pytest.approx((900 + 3 * 20) / RATE, abs=3 * BLOCK_SIZE / RATE)
    wait_s, _ = forecast.wait_s(new([*shared, *distinct(7, 30)]))
    assert wait_s == pytest.approx(3 * 20 / RATE, abs=4 * BLOCK_SIZE / RATE), "the shared part is its own work"
    engine.step()
    wait_s, _ = forecast.wait_s(new([*shared, *distinct(7, 30)]))
    assert wait_s == pytest.approx(3 * 20 / RATE, abs=4 * BLOCK_SIZE / RATE)


def test_what_waits_behind_it_does_not_count(engine: EngineUnderTest, forecast: Forecast, clock: Clock) -> None:
    for number in range(4):
        engine.request(distinct(number, 8), max_tokens=100)
    engine.step()
    for number in range(5):
        engine.request(distinct(10 + number, 400))
    end_one_each(engine, forecast, clock, seconds=2.0)
    assert not is_taken(forecast, new(distinct(2, 500)))
    assert is_taken(forecast, new(distinct(2, 500), priority=1))


def end_one_each(engine: EngineUnderTest, forecast: Forecast, clock: Clock, seconds: float) -> None:
    """Teach the forecast that requests end at this rate."""
    for _ in range(200):
        clock.now += seconds
        engine.scheduler.stats.requests_finished += 1
        forecast.observe()


def test_with_a_full_batch_the_wait_for_a_seat_counts(
    engine: EngineUnderTest, forecast: Forecast, clock: Clock, rate: Rate
) -> None:
    rate.tokens_per_s = math.inf
    for number in range(4):
        engine.request(distinct(number, 8), max_tokens=1000)
    engine.step()
    end_one_each(engine, forecast, clock, seconds=2.0)
    for number in range(3):
        wait_s, _ = forecast.wait_s(new(distinct(100, 8)))
        assert wait_s == pytest.approx(2.0 * (number + 1), rel=0.1)
        engine.request(distinct(10 + number, 8))


def test_requests_that_come_together_to_an_idle_worker_wait_for_no_seat(
    engine: EngineUnderTest, forecast: Forecast, clock: Clock
) -> None:
    end_one_each(engine, forecast, clock, seconds=1000.0)
    for number in range(4):
        assert is_taken(forecast, new(distinct(number, 8)))
        engine.request(distinct(number, 8))
    assert not is_taken(forecast, new(distinct(5, 8)))


def test_a_full_cache_is_waited_for_as_a_full_batch(clock: Clock, rate: Rate) -> None:
    rate.tokens_per_s = math.inf
    engine = make_engine(num_blocks=10, max_num_seqs=4)
    forecast = Forecast(engine.scheduler, MAX_WAIT_S, clock)
    engine.request(distinct(1, 30), max_tokens=9)
    engine.step()
    end_one_each(engine, forecast, clock, seconds=2.0)
    assert forecast.wait_s(new(distinct(2, 30)))[0] == pytest.approx(2.0, rel=0.1)
    assert forecast.wait_s(new(distinct(2, 3)))[0] == pytest.approx(0.0, abs=1e-3)


def test_blocks_that_prompts_share_are_waited_for_once(clock: Clock, rate: Rate) -> None:
    rate.tokens_per_s = math.inf
    engine = make_engine(num_blocks=60, max_num_seqs=50, max_num_batched_tokens=64)
    forecast = Forecast(engine.scheduler, MAX_WAIT_S, clock)
    prompt = list(range(160))
    engine.request(prompt)
    engine.step()
    end_one_each(engine, forecast, clock, seconds=2.0)
    for _ in range(10):
        assert is_taken(forecast, new(prompt))
        engine.request(prompt)
        assert forecast.wait_s(new(prompt))[0] == 0.0
    assert forecast.wait_s(new(distinct(3, 160)))[0] == pytest.approx(2.0, rel=0.1), "which does not fit beside them"
    engine.run()


def test_rest_does_not_count_as_time_in_which_nothing_ends(
    engine: EngineUnderTest, forecast: Forecast, clock: Clock, rate: Rate
) -> None:
    rate.tokens_per_s = math.inf
    end_one_each(engine, forecast, clock, seconds=2.0)
    clock.now += 10_000
    forecast.begin()
    for number in range(5):
        engine.request(distinct(number, 8))
    assert forecast.wait_s(new(distinct(100, 8)))[0] == pytest.approx(4.0, rel=0.1)


def test_who_has_waited_too_long_is_given_back_whatever_was_predicted(
    engine: EngineUnderTest, forecast: Forecast, clock: Clock
) -> None:
    for number in range(4):
        engine.request(distinct(number, 20), max_tokens=500)
    engine.step()
    engine.step()
    late = [new(distinct(10, 20)), new(distinct(11, 20), max_wait_s=3.0)]
    resumed = new(distinct(12, 20), resume_token_ids=[1], max_wait_s=3.0)
    for request in (*late, resumed):
        request.arrival_s = clock.now
        engine.scheduler.add(request)
    assert not forecast.overdue()
    clock.now += 4.0
    ((given_back, error),) = forecast.overdue()
    assert given_back is late[1]
    assert (error.reason, error.retry_after_s is not None) == (Reason.QUEUE_FULL, True)
    output = engine.scheduler.give_back(given_back, error)
    assert (output.error, output.token_ids) == (error, ())
    assert given_back not in engine.scheduler.waiting
    clock.now += 7.0
    assert [request for request, _ in forecast.overdue()] == [late[0]], "and no answer that has begun"


@pytest.mark.parametrize(
    "own", [{"fetch_wait_s": 3.5}, {"preparing_s": 3.5}, {"fetch_wait_s": 2.0, "preparing_s": 1.5}]
)
def test_the_wait_for_its_own_blocks_and_grammar_does_not_count(
    engine: EngineUnderTest, forecast: Forecast, clock: Clock, own: dict[str, float]
) -> None:
    """Nobody else is there, so an error that says "busy" would be wrong."""
    request = new(distinct(10, 20), max_wait_s=3.0, **own)
    request.arrival_s = clock.now
    clock.now += 4.0
    engine.scheduler.add(request)
    assert not forecast.overdue()
    clock.now += 2.6
    assert [late for late, _ in forecast.overdue()] == [request], "0.5 and 2.6 s for others"
