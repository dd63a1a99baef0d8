"""Requests whose prompts are mostly cached go before one that lacks blocks."""

from __future__ import annotations

import random

import pytest

from headrace.worker.engine.forecast import Forecast
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request, RequestState
from tests.worker.conftest import EngineUnderTest, RandomRequests, make_engine, run_random_load

PREFIX = list(range(100, 112))
NUM_BLOCKS = 16


class Clock:
    """The scheduler's time, in seconds."""

    def __init__(self) -> None:
        self.now_s = 1.0

    def __call__(self) -> float:
        return self.now_s


def short_of_blocks() -> tuple[EngineUnderTest, Clock, Request]:
    """An engine in which `PREFIX` is cached, a stream runs, and a long prompt waits for blocks."""
    engine, clock = make_engine(NUM_BLOCKS), Clock()
    engine.scheduler.clock = clock
    engine.request(PREFIX, max_tokens=1)
    engine.run()
    engine.request([7] * 24, max_tokens=16)
    engine.step()
    first = engine.request([8] * 40, max_tokens=2)
    engine.step()
    assert first.state is RequestState.WAITING
    return engine, clock, first


def test_who_has_most_cached_does_not_wait_for_the_first() -> None:
    engine, _, first = short_of_blocks()
    other, cached = engine.request([9] * 14, max_tokens=2), engine.request([*PREFIX, 1, 2], max_tokens=2)
    engine.step()
    assert cached.num_cached_tokens == len(PREFIX)
    assert (first.state, other.state) == (RequestState.WAITING, RequestState.WAITING)
    engine.run()
    assert first.scheduled_s <= other.scheduled_s


def test_little_that_is_cached_does_not_count() -> None:
    engine, _, _ = short_of_blocks()
    cached = engine.request([*PREFIX, *[1] * 14], max_tokens=2)
    engine.step()
    assert cached.state is RequestState.WAITING


@pytest.mark.parametrize("priority", [-1, 1])
def test_priorities_are_not_mixed(priority: int) -> None:
    engine, _, first = short_of_blocks()
    other = engine.request([*PREFIX, 1, 2], max_tokens=2, priority=priority)
    engine.step()
    is_more_urgent = priority > first.priority
    assert (other.state is not RequestState.WAITING) == is_more_urgent


def test_the_first_is_overtaken_for_as_long_as_its_prompt_takes() -> None:
    engine, clock, first = short_of_blocks()
    prompt_s = engine.scheduler.step_costs.prompts.chunk_ms(0, first.num_tokens) / 1000
    clock.now_s += 0.9 * prompt_s
    early = engine.request([*PREFIX, 1, 2], max_tokens=2)
    engine.step()
    assert early.state is not RequestState.WAITING
    clock.now_s += 0.2 * prompt_s
    late = engine.request([*PREFIX, 3, 4], max_tokens=2)
    while first.state is RequestState.WAITING:
        assert late.state is RequestState.WAITING
        engine.step()
    engine.run()
    assert late in engine.last


def test_the_forecast_knows_who_overtakes() -> None:
    engine, clock, first = short_of_blocks()
    forecast = Forecast(engine.scheduler, 1e9, clock)
    clock.now_s += 10.0
    engine.scheduler.stats.requests_finished += 1
    forecast.observe()  # one ends now and then
    clock.now_s = first.lacks_blocks_since_s

    def wait_s(prompt: list[int]) -> float:
        sampling = SamplingParams(max_tokens=2, seed=0)
        return forecast.wait_s(Request("r", prompt, sampling, 1, arrival_s=1e6))[0]

    assert wait_s([*PREFIX, 1, 2]) < 0.01
    assert wait_s([9] * 14) > 1.0
    clock.now_s += 1000.0
    assert wait_s([*PREFIX, 1, 2]) > 1.0, "the first has been overtaken for long enough"


def test_nobody_overtakes_who_was_cut_off_in_the_middle_of_an_answer() -> None:
    engine, _, _ = short_of_blocks()
    resumed = engine.request([5] * 40, max_tokens=3, resume_token_ids=[1])
    cached = engine.request([*PREFIX, 1, 2], max_tokens=2)
    engine.step()
    assert (resumed.state, cached.state) == (RequestState.WAITING, RequestState.WAITING)


@pytest.mark.parametrize("seed", range(6))
def test_random_loads_in_which_anybody_may_overtake_keep_every_promise(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(rng.randint(16, 24), max_num_batched_tokens=rng.randint(10, 40))
    engine.scheduler.clock = Clock()  # no time passes
    requests = RandomRequests(engine, rng)
    requests.check(run_random_load(engine, rng, requests.arrive))
