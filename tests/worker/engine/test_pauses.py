"""Streams that wait for prompts: how long in a row, and how much in all."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from headrace.worker.__main__ import config_of
from headrace.worker.config import ConfigurationError
from headrace.worker.engine.pauses import LONGEST_S, RATE, Pauses
from headrace.worker.engine.step_cost import StepCosts
from tests.worker.conftest import VOCAB_SIZE, EngineUnderTest, KnownCosts, make_engine
from tests.worker.fake_runner import expected_tokens


def decided(pauses: Pauses, now_s: float, *, is_wanted: bool) -> bool:
    """Pause as long as anything is left."""
    left_s = pauses.left_s(now_s)
    pauses.begin(is_pause=is_wanted and left_s > 0)
    return pauses.is_pause


def pauses_of(steps_s: list[float], *, wanted: list[bool] | None = None) -> list[bool]:
    """What is decided of steps that take so long."""
    pauses, now_s, found = Pauses(), 100.0, []
    for number, step_s in enumerate(steps_s):
        is_wanted = wanted[number] if wanted else True
        found.append(decided(pauses, now_s, is_wanted=is_wanted))
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
    assert not any(decided(pauses, float(second), is_wanted=True) for second in range(100))


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
    """It has learned that this is what steps and their tokens cost, all else next to nothing, and learns no more."""
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
    engine.scheduler.pauses = Pauses(0.0)
    engine.request([1, 2, 3], max_tokens=60)
    engine.step()
    assert first_step_of(engine) == 63


def with_streams(engine: EngineUnderTest, number: int) -> EngineUnderTest:
    """So many streams run, and its clock stands still."""
    engine.scheduler.clock = lambda: 0.0
    for stream in range(number):
        engine.request([1, 2, stream], max_tokens=60)
    while any(request.num_uncomputed_tokens > 1 for request in engine.scheduler.running + engine.scheduler.waiting):
        engine.step()
    return engine


def test_a_step_that_streams_wait_for_takes_no_longer_than_they_may_wait() -> None:
    engine = knowing(large_engine(), 10.0, 0.4)
    engine.scheduler.pauses = Pauses(0.06)
    with_streams(engine, 7)
    engine.scheduler.max_num_mixed_tokens = 24
    assert first_step_of(engine) == 112
    assert engine.scheduler.pauses.is_pause


def test_a_pause_is_not_begun_for_less_than_it_could_be() -> None:
    engine = with_streams(knowing(large_engine(), 20.0, 0.4), 7)
    engine.scheduler.pauses.saved_s = 0.05
    first_step_of(engine)
    assert not engine.scheduler.pauses.is_pause


def test_streams_do_not_pause_where_prompts_get_on_no_faster_by_it() -> None:
    """A decode token costs next to nothing beside the step, and the pause is shorter than the step beside streams."""
    engine = with_streams(knowing(large_engine(), 20.0, 0.4), 1)
    engine.scheduler.max_num_mixed_tokens = 1000
    engine.scheduler.pauses = Pauses(0.07)
    first_step_of(engine)
    assert not engine.scheduler.pauses.is_pause


def test_streams_of_a_large_model_do_not_pause_for_steps_have_them_wait_anyway() -> None:
    engine = with_streams(knowing(large_engine(), 130.0, 10.0), 2)
    assert 8 <= first_step_of(engine) <= 16, "285 ms, 1.9 times what a step of the streams takes"
    assert not engine.scheduler.pauses.is_pause


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

    def left_s(self, now_s: float) -> float:
        return self.longest_s if next(self._numbers) % self._every != 0 else 0.0


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
