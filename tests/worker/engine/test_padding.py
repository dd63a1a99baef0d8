"""Steps that keep the token count of the one before."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.worker.engine.padding import Padding
from headrace.worker.engine.step_cost import StepCostModel, StepCosts, StepShape
from headrace.worker.model.step_limits import MIN_PROMPT_STEP
from tests.worker.conftest import VOCAB_SIZE, make_engine
from tests.worker.fake_runner import expected_tokens


def paddings(counts: list[int], token_ms: float, change_ms: float) -> list[int]:
    padding = Padding()
    return [padding.of(count, is_decode=True, token_ms=token_ms, change_ms=change_ms) for count in counts]


def test_a_step_with_one_token_less_is_padded_until_a_change_would_have_been_paid() -> None:
    assert paddings([8, 7, 7, 7, 7, 7, 7], 1.0, 3.5) == [0, 1, 1, 1, 0, 0, 0]


def test_a_step_with_far_fewer_tokens_changes_at_once() -> None:
    assert paddings([256, 10, 9, 10, 9], 0.25, 5.0) == [0, 0, 1, 0, 1]


def test_where_a_token_costs_more_than_a_change_nothing_is_padded() -> None:
    assert paddings([8, 7, 6, 5], 10.0, 5.0) == [0, 0, 0, 0]


def test_a_step_with_a_prompt_has_a_least_number_of_tokens() -> None:
    padding = Padding()
    counts = [2, MIN_PROMPT_STEP - 1, MIN_PROMPT_STEP, MIN_PROMPT_STEP + 3, 4, 4, 4]
    assert [count + padding.of(count, is_decode=False, token_ms=1.0, change_ms=5.0) for count in counts] == [
        *[MIN_PROMPT_STEP] * 3,
        MIN_PROMPT_STEP + 3,
        *[MIN_PROMPT_STEP + 3, MIN_PROMPT_STEP, MIN_PROMPT_STEP],
    ]
    assert padding.changed is False


def test_before_the_first_step_is_learned_nothing_is_padded() -> None:
    unknown = StepCosts().decode
    assert paddings([8, 7, 6], unknown.token_ms, unknown.change_ms) == [0, 0, 0]


def test_after_a_prompt_a_decode_step_is_never_padded_to_its_size() -> None:
    """What is learned of changes first is little and may be wrong, and one size of decode steps says little of what a
    token costs."""
    padding, costs, rng = Padding(), StepCosts(), random.Random(2)
    for _ in range(200):
        for step in ([(0, 256)], *[[(100, 1)] * 8] * 20):
            is_decode = len(step) > 1
            count = 8 if is_decode else 256
            token_ms, change_ms = costs.of(is_decode=is_decode).token_ms, costs.decode.change_ms
            more = padding.of(count, is_decode=is_decode, token_ms=token_ms, change_ms=change_ms)
            assert more < 30
            step_ms = 8.0 + 0.22 * (count + more) + (5.0 if padding.changed else 0.0) + rng.expovariate(1.0)
            costs.observe(StepShape.of(step, padding=more, changed=padding.changed), step_ms, is_first=False)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_padding_costs_at_most_twice_what_changing_every_time_costs(counts: list[int]) -> None:
    given_out = paddings(counts, 1.0, 4.0)
    padded = [count + more for count, more in zip(counts, given_out, strict=True)]
    changes = sum(a != b for a, b in itertools.pairwise([0, *padded]))
    needed = sum(a != b for a, b in itertools.pairwise([0, *counts]))
    assert 4.0 * changes + sum(given_out) <= 2 * 4.0 * needed
    assert all(more >= 0 for more in given_out)


def test_it_says_of_each_step_whether_its_count_changed() -> None:
    padding = Padding()
    changed = []
    for count in (8, 7, 7, 9, 9, 30):
        padding.of(count, is_decode=True, token_ms=1.0, change_ms=5.0)
        changed.append(padding.changed)
    assert changed == [True, False, False, True, False, True]


@pytest.mark.parametrize(("step_ms", "change_ms"), [(8.0, 5.0), (45.0, 7.0), (145.0, 6.0)])
def test_the_cost_of_a_change_is_learned_among_streams_that_come_and_go(step_ms: float, change_ms: float) -> None:
    """Of large models it is a small part of a step. Some steps take five times as long."""
    padding, costs, rng = Padding(), StepCosts(), random.Random(1)
    streams = 16
    for _ in range(2000):
        if rng.random() < 0.1:
            streams = max(1, min(32, streams + rng.choice([-2, -1, 1, 2])))
        token_ms = costs.decode.token_ms
        more = padding.of(streams, is_decode=True, token_ms=token_ms, change_ms=costs.decode.change_ms)
        took_ms = step_ms + step_ms / 40 * (streams + more) + change_ms * padding.changed
        took_ms *= 5.0 if rng.random() < 0.002 else rng.uniform(0.9, 1.1)
        costs.observe(
            StepShape.of([(300, 1)] * streams, padding=more, changed=padding.changed), took_ms, is_first=False
        )
    assert 0.6 * change_ms < costs.decode.change_ms < 1.4 * change_ms + 0.1 * step_ms


def test_padded_steps_give_the_tokens_of_unpadded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(num_blocks=64)
    monkeypatch.setattr(StepCostModel, "token_ms", 0.25)
    monkeypatch.setattr(StepCostModel, "change_ms", 5.0)
    requests = [engine.request(list(range(number, number + 5)), max_tokens=3 + 2 * number) for number in range(6)]
    engine.run()
    for number, request in enumerate(requests):
        expected = expected_tokens(list(range(number, number + 5)), 3 + 2 * number, VOCAB_SIZE)
        assert engine.tokens[request] == expected
    assert engine.runner.num_padding == engine.engine.stats.num_padding_tokens > 10
