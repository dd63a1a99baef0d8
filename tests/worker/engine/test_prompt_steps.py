"""The number of prompt tokens in a step, alone and with streams, and the choice of prompts."""

from __future__ import annotations

import pytest

from headrace.worker.engine.step_cost import StepCosts
from tests.worker.conftest import EngineUnderTest, KnownCosts, make_engine


def timed_engine(step_s: float) -> EngineUnderTest:
    """An engine whose clock advances by a fixed time in each step."""
    engine = make_engine(num_blocks=1000, max_num_batched_tokens=64)
    now = [0.0]
    engine.scheduler.clock = lambda: now[0]
    run = engine.runner.run

    def tick():  # type: ignore[no-untyped-def]
        now[0] += step_s
        return run()

    engine.runner.run = tick  # type: ignore[method-assign]
    return engine


def knowing(engine: EngineUnderTest, step_ms: float, token_ms: float) -> EngineUnderTest:
    """The engine, with fixed costs of steps and their tokens instead of learned ones. Everything else costs next to
    nothing."""
    engine.scheduler.step_costs = KnownCosts(step_ms, token_ms)
    return engine


def first_step_of(engine: EngineUnderTest) -> int:
    """Tokens of a long prompt that the next step computes."""
    long = engine.request(list(range(10, 2000)), max_tokens=1)
    engine.step()
    return long.num_computed_tokens


def large_engine() -> EngineUnderTest:
    return make_engine(num_blocks=2000, max_num_batched_tokens=1000, max_num_mixed_tokens=64)


def test_a_step_of_prompts_alone_grows_until_an_eighth_of_it_is_what_any_step_costs() -> None:
    assert first_step_of(knowing(large_engine(), 20.0, 0.4)) in (256, 320)
    assert first_step_of(knowing(large_engine(), 1.0, 0.4)) == 192, "80 ms"
    assert first_step_of(knowing(large_engine(), 20.0, 0.01)) == 1000
    assert first_step_of(knowing(large_engine(), 130.0, 10.0)) in (64, 80), "a large model: 8 x 130 ms"


def test_before_anything_is_learned_steps_are_those_of_a_large_model_on_few_cores() -> None:
    engine = large_engine()
    engine.scheduler.step_costs = StepCosts()
    assert 64 <= first_step_of(engine) <= 280


def test_no_step_of_streams_grows() -> None:
    engine = knowing(large_engine(), 20.0, 0.4)
    engine.request([1, 2, 3], max_tokens=60)
    engine.step()
    assert first_step_of(engine) == 63


def with_streams(engine: EngineUnderTest, number: int) -> EngineUnderTest:
    """An engine with this many running streams and a stopped clock."""
    engine.scheduler.clock = lambda: 0.0
    for stream in range(number):
        engine.request([1, 2, stream], max_tokens=60)
    while any(request.num_uncomputed_tokens > 1 for request in engine.scheduler.running + engine.scheduler.waiting):
        engine.step()
    return engine


def test_prompts_get_little_of_a_step_beside_the_streams_of_a_large_model() -> None:
    engine = with_streams(knowing(large_engine(), 130.0, 10.0), 2)
    assert 8 <= first_step_of(engine) <= 16, "285 ms, 1.9 times what a step of the streams takes"


@pytest.mark.parametrize(
    ("step_ms", "token_ms", "target_ms", "least", "most"), [(130.0, 10.0, 50.0, 7, 7), (30.0, 0.25, 20.0, 19, 31)]
)
def test_where_a_target_cannot_be_kept_prompts_have_a_fifth_of_the_time(
    step_ms: float, token_ms: float, target_ms: float, least: int, most: int
) -> None:
    engine = with_streams(knowing(large_engine(), step_ms, token_ms), 1)
    engine.scheduler.target_step_ms = target_ms
    engine.scheduler.max_num_mixed_tokens = 1000
    assert least <= first_step_of(engine) <= most


@pytest.mark.parametrize("target_ms", [None, 1000.0])
def test_streams_get_a_token_in_every_step(target_ms: float | None) -> None:
    engine = timed_engine(0.05)
    engine.scheduler.target_step_ms = target_ms
    stream = engine.request([1, 2, 3], max_tokens=60)
    engine.step()
    engine.request(list(range(10, 300)), max_tokens=1)
    engine.step()
    assert len(engine.tokens[stream]) == 2
    engine.run()


def test_of_prompts_the_one_that_needs_least_is_next_and_the_first_in_rank_goes_on() -> None:
    engine = timed_engine(0.02)
    long = engine.request(list(range(640)), max_tokens=1)
    engine.step()
    begun = long.num_computed_tokens
    short = [engine.request([900 + number] * 50, max_tokens=1) for number in range(4)]
    ended = []
    while len(ended) < 4:
        before = long.num_computed_tokens
        engine.step()
        assert long.num_computed_tokens - before >= 8, "an eighth of 64"
        ended += [request for request in short if request in engine.last and request not in ended]
    assert ended == short
    assert long.num_computed_tokens - begun <= 8 * 4 + 64
    engine.run()
