"""Streams that wait for prompts: how long in a row, and how much in all."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from headrace.worker.__main__ import config_of
from headrace.worker.config import ConfigurationError
from headrace.worker.pauses import LONGEST_S, RATE, Pauses
from headrace.worker.step_cost import StepCostModel, StepShape
from tests.worker.conftest import VOCAB_SIZE, EngineUnderTest, make_engine
from tests.worker.fake_runner import expected_tokens


def pauses_of(steps_s: list[float], *, wanted: list[bool] | None = None) -> list[bool]:
    """What is decided of steps that take so long."""
    pauses, now_s, found = Pauses(), 100.0, []
    for number, step_s in enumerate(steps_s):
        is_wanted = wanted[number] if wanted else True
        found.append(pauses.decide(now_s, is_wanted=is_wanted))
        now_s += step_s
    return found


def test_streams_wait_for_prompts_at_once_and_about_as_long_as_they_may() -> None:
    assert pauses_of([0.07] * 8)[:6] == [True] * 5 + [False]


@pytest.mark.parametrize("step_s", [0.003, 0.06, 0.5])
def test_where_prompts_never_end_streams_wait_for_their_share_of_the_time(step_s: float) -> None:
    found = pauses_of([step_s] * 4000)
    assert sum(found) / len(found) == pytest.approx(RATE / (1 + RATE), abs=LONGEST_S / (4000 * step_s) + 0.01)


def test_what_streams_give_is_saved_up_to_one_pause() -> None:
    found = pauses_of([0.06] * 400 + [0.06] * 20, wanted=[False] * 400 + [True] * 20)
    assert sum(found[400:]) <= (LONGEST_S + RATE / (1 + RATE) * 20 * 0.06) / 0.06 + 1


def test_nobody_waits_if_pauses_are_off() -> None:
    pauses = Pauses(0.0)
    assert not any(pauses.decide(float(second), is_wanted=True) for second in range(100))


def timed_engine(step_s: float) -> EngineUnderTest:
    """Its clock goes on by so much with each step."""
    engine = make_engine(num_blocks=1000, max_num_batched_tokens=64)
    now = [0.0]
    engine.scheduler.clock = lambda: now[0]
    run = engine.runner.run

    def tick():  # type: ignore[no-untyped-def]
        now[0] += step_s
        return run()

    engine.runner.run = tick  # type: ignore[method-assign]
    return engine


def test_prompts_go_first_for_a_while_then_streams_go_on_beside_them() -> None:
    engine = timed_engine(0.05)
    stream = engine.request([1, 2, 3], max_tokens=60)
    engine.step()
    long = engine.request(list(range(10, 900)), max_tokens=1)
    counts = []
    while long not in engine.last:
        engine.step()
        counts.append(len(engine.tokens[stream]))
    waits = [later == earlier for earlier, later in itertools.pairwise(counts)]
    assert counts[5] == 1, "six steps of 50 ms are for the prompt alone"
    assert 2 in counts[6:8]
    assert sum(waits[7:]) <= len(waits[7:]) / 2 + 1
    engine.run()


def knowing(engine: EngineUnderTest, step_ms: float, token_ms: float) -> EngineUnderTest:
    """It has learned that this is what steps and their tokens cost, attention nothing, and learns no more."""
    model = engine.scheduler.step_cost = StepCostModel()
    for number in range(1000):
        shape = StepShape(8 + number * 7 % 250, number * 13 % 5000, number * 17 % 900)
        model.observe(shape, step_ms + token_ms * shape.tokens)
    model.observe = lambda *_: None  # type: ignore[method-assign]
    return engine


def first_step_of(engine: EngineUnderTest) -> int:
    """Tokens of a long prompt that the next step computes."""
    long = engine.request(list(range(10, 2000)), max_tokens=1)
    engine.step()
    return long.num_computed_tokens


def large_engine() -> EngineUnderTest:
    return make_engine(num_blocks=2000, max_num_batched_tokens=1000, max_num_mixed_tokens=64)


def test_a_step_of_prompts_alone_grows_until_an_eighth_of_it_is_what_any_step_costs() -> None:
    assert first_step_of(knowing(large_engine(), 20.0, 0.4)) == 320
    assert first_step_of(knowing(large_engine(), 80.0, 0.4)) == 256, "200 ms are the limit"
    assert first_step_of(knowing(large_engine(), 1.0, 0.4)) == 64
    assert first_step_of(knowing(large_engine(), 20.0, 0.01)) == 1000


def test_a_step_of_prompts_alone_is_no_larger_than_others_before_costs_are_learned() -> None:
    assert first_step_of(large_engine()) == 64


def test_no_step_of_streams_grows() -> None:
    engine = knowing(large_engine(), 20.0, 0.4)
    engine.scheduler.pauses = Pauses(0.0)
    engine.request([1, 2, 3], max_tokens=60)
    engine.step()
    assert first_step_of(engine) == 63


def test_a_step_that_streams_wait_for_takes_no_longer_than_they_may_still_wait() -> None:
    engine = knowing(large_engine(), 20.0, 0.4)
    engine.scheduler.pauses = Pauses(0.1)
    engine.scheduler.clock = lambda: 0.0
    engine.request([1, 2, 3], max_tokens=60)
    engine.step()
    assert first_step_of(engine) == 192
    assert engine.scheduler.pauses.is_pause


def test_with_a_target_for_the_time_per_token_nobody_waits() -> None:
    engine = timed_engine(0.05)
    engine.scheduler.target_step_ms = 1000.0
    stream = engine.request([1, 2, 3], max_tokens=60)
    engine.step()
    engine.request(list(range(10, 300)), max_tokens=1)
    engine.step()
    assert len(engine.tokens[stream]) == 2
    engine.run()


def test_a_pause_beside_a_target_for_the_time_per_token_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="leave out --max-pause-ms"):
        config_of(Path("model"), None, {"target_tpot_ms": 20.0, "max_pause_ms": 100.0})


@pytest.mark.parametrize(("priority", "waits"), [(-1, False), (0, True), (1, True)])
def test_streams_do_not_wait_for_prompts_of_lower_priority(priority: int, waits: bool) -> None:
    engine = timed_engine(0.05)
    stream = engine.request([1, 2, 3], max_tokens=60)
    engine.step()
    engine.request(list(range(10, 300)), max_tokens=1, priority=priority)
    engine.step()
    assert len(engine.tokens[stream]) == (1 if waits else 2)
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


class Sometimes(Pauses):
    """Streams wait but for one step in `every`."""

    def __init__(self, every: int, first: int) -> None:
        super().__init__()
        self._numbers = itertools.count(first)
        self._every = every

    def decide(self, now_s: float, *, is_wanted: bool) -> bool:
        self.is_pause = is_wanted and next(self._numbers) % self._every != 0
        return self.is_pause


@pytest.mark.parametrize("seed", range(30))
def test_where_streams_hold_the_blocks_that_prompts_want_every_step_computes_something(seed: int) -> None:
    """Of these, seed 9 has a prompt that gives way to the streams that wait for it."""
    rng = random.Random(seed)
    every, first = rng.choice([2, 3, 4]), rng.randrange(4) + 1
    engine = make_engine(
        num_blocks=rng.randrange(10, 30), max_num_batched_tokens=rng.choice([8, 12, 16]), max_num_seqs=6
    )
    engine.scheduler.pauses = Sometimes(every, first)
    expected = {}
    for _ in range(rng.randrange(3, 9)):
        prompt = [rng.randrange(900) for _ in range(rng.randrange(2, 30))]
        request = engine.request(prompt, max_tokens=rng.randrange(1, 12))
        expected[request] = expected_tokens(prompt, request.sampling.max_tokens, VOCAB_SIZE)
        for _ in range(rng.randrange(4)):
            engine.step()
    while engine.scheduler.has_requests:
        num_steps = engine.engine.stats.num_steps
        engine.step()
        assert engine.engine.stats.num_steps == num_steps + 1
    assert engine.tokens == expected
