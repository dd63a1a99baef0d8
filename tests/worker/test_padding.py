"""Steps that keep the token count of the one before."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.worker.padding import MIN_PROMPT_STEP, Padding
from tests.worker.conftest import VOCAB_SIZE, make_engine
from tests.worker.fake_runner import expected_tokens


def believing(change_ms: float, token_ms: float = 1.0) -> Padding:
    padding = Padding()
    padding.change_ms, padding.token_ms = change_ms, token_ms
    return padding


def paddings(counts: list[int], token_ms: float, change_ms: float) -> list[int]:
    padding = believing(change_ms, token_ms)
    return [padding.of(count, is_decode=True) for count in counts]


def test_a_step_with_one_token_less_is_padded_until_a_change_would_have_been_paid() -> None:
    assert paddings([8, 7, 7, 7, 7, 7, 7], 1.0, 3.5) == [0, 1, 1, 1, 0, 0, 0]


def test_a_step_with_far_fewer_tokens_changes_at_once() -> None:
    assert paddings([256, 10, 9, 10, 9], 0.25, 5.0) == [0, 0, 1, 0, 1]


def test_where_a_token_costs_more_than_a_change_nothing_is_padded() -> None:
    assert paddings([8, 7, 6, 5], 10.0, 5.0) == [0, 0, 0, 0]


def test_a_step_with_a_prompt_has_a_least_number_of_tokens() -> None:
    padding = believing(5.0, 1.0)
    counts = [2, MIN_PROMPT_STEP - 1, MIN_PROMPT_STEP, MIN_PROMPT_STEP + 3, 4, 4, 4]
    assert [count + padding.of(count, is_decode=False) for count in counts] == [
        *[MIN_PROMPT_STEP] * 3,
        MIN_PROMPT_STEP + 3,
        *[MIN_PROMPT_STEP + 3, MIN_PROMPT_STEP, MIN_PROMPT_STEP],
    ]
    assert padding.changed is False


def test_before_both_costs_are_known_nothing_is_padded() -> None:
    for padding in (Padding(), believing(0.0, 0.0), believing(5.0, math.inf)):
        assert [padding.of(count, is_decode=True) for count in (8, 7, 6)] == [0, 0, 0]


def test_a_token_costs_the_least_that_one_of_a_step_has_cost_of_late() -> None:
    padding = believing(5.0, math.inf)
    for count, is_decode, step_ms in ((256, False, 400.0), (8, True, 11.0), (256, False, 64.0), (8, True, 11.0)):
        padding.of(count, is_decode=is_decode)
        padding.observe(step_ms, is_decode=is_decode)
    assert padding.token_ms == pytest.approx(0.25, rel=0.01)
    for _ in range(6000):
        padding.of(8, is_decode=True)
        padding.observe(11.0, is_decode=True)
    assert padding.token_ms == pytest.approx(11 / 8)


def test_after_a_prompt_a_decode_step_is_never_padded_to_its_size() -> None:
    """What is learned of changes first is little and may be wrong; what a token costs is known from the first step."""
    padding, rng = Padding(), random.Random(2)
    for _ in range(200):
        for count in (256, *[8] * 20):
            more = padding.of(count, is_decode=count == 8)
            assert more < 30
            step_ms = 8.0 + 0.22 * (count + more) + (5.0 if padding.changed else 0.0) + rng.expovariate(1.0)
            padding.observe(step_ms, is_decode=count == 8)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_padding_costs_at_most_twice_what_changing_every_time_costs(counts: list[int]) -> None:
    given_out = paddings(counts, 1.0, 4.0)
    padded = [count + more for count, more in zip(counts, given_out, strict=True)]
    changes = sum(a != b for a, b in itertools.pairwise([0, *padded]))
    needed = sum(a != b for a, b in itertools.pairwise([0, *counts]))
    assert 4.0 * changes + sum(given_out) <= 2 * 4.0 * needed
    assert all(more >= 0 for more in given_out)


def test_it_says_of_each_step_whether_its_count_changed() -> None:
    padding = believing(5.0)
    changed = []
    for count in (8, 7, 7, 9, 9, 30):
        padding.of(count, is_decode=True)
        changed.append(padding.changed)
    assert changed == [True, False, False, True, False, True]


def test_the_cost_of_a_change_comes_to_the_median_of_what_was_seen() -> None:
    padding, rng = Padding(), random.Random(1)
    for number in range(600):
        padding.of(8 + number % 2 * 100, is_decode=True)
        building_ms = 200.0 if number % 10 == 0 else 0.0
        padding.observe(20.0 + 5.0 + building_ms + rng.gauss(0, 0.5), is_decode=True)
        padding.of(8 + number % 2 * 100, is_decode=True)
        padding.observe(20.0 + rng.gauss(0, 0.5), is_decode=True)
    assert padding.change_ms == pytest.approx(5.0, abs=0.8)


def test_steps_with_prompts_say_nothing_of_a_change() -> None:
    padding = Padding()
    for _ in range(50):
        for count, is_decode, step_ms in ((64, False, 90.0), (64, True, 20.0), (8, True, 30.0), (8, False, 5.0)):
            padding.of(count, is_decode=is_decode)
            padding.observe(step_ms, is_decode=is_decode)
    assert padding.change_ms == 0.0


def test_padded_steps_give_the_tokens_of_unpadded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Padding, "observe", lambda *_, **__: None)
    engine = make_engine(num_blocks=64)
    engine.engine.padding.change_ms, engine.engine.padding.token_ms = 5.0, 0.25
    requests = [engine.request(list(range(number, number + 5)), max_tokens=3 + 2 * number) for number in range(6)]
    engine.run()
    for number, request in enumerate(requests):
        expected = expected_tokens(list(range(number, number + 5)), 3 + 2 * number, VOCAB_SIZE)
        assert engine.tokens[request] == expected
    assert engine.runner.num_padding == engine.engine.stats.num_padding_tokens > 10
