"""An operator sees where prompts part that repeat much of each other, and nothing of their texts."""

from __future__ import annotations

import logging
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.telemetry import partings
from headrace.gateway.telemetry.metrics import Metrics
from headrace.gateway.telemetry.partings import Partings, num_common

DRAWN = random.Random(7)
STABLE = [DRAWN.randrange(50_000) for _ in range(2_500)]
HEAD = list(range(35))


class Seen(Partings):
    """Records what it observes."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int]] = []
        super().__init__(lambda *values: self.seen.append(values))

    def add(self, *tokens: int, scope: str = "", model: str = "m") -> None:
        self.prompt(model, scope, "", tokens)


def test_a_volatile_first_line_is_seen_with_its_position() -> None:
    seen = Seen()
    seen.add(*HEAD, 1, 2, 3, *STABLE, 7)
    assert not seen.seen
    seen.add(*HEAD, 4, 5, 6, 6, *STABLE, 8)  # of another length, too
    ((model, position, num_repeated),) = seen.seen
    assert (model, position) == ("m", 35)
    assert 2_000 <= num_repeated <= 2_510


def test_a_prompt_that_goes_on_from_another_is_none() -> None:
    seen = Seen()
    seen.add(*STABLE)
    seen.add(*STABLE, *range(400))
    seen.add(*STABLE)
    seen.add(*[DRAWN.randrange(50_000) for _ in range(2_500)])
    seen.add(*range(100))
    assert not seen.seen


def test_the_best_of_the_recent_prompts_counts() -> None:
    """An agent has several kinds of prompts in turn."""
    seen = Seen()
    seen.add(1, *STABLE)
    seen.add(2, *STABLE[::-1])
    seen.add(1, *STABLE, 5)
    assert not seen.seen


def test_other_tenants_and_models_are_not_compared() -> None:
    seen = Seen()
    seen.add(1, *STABLE, scope="a")
    seen.add(2, *STABLE, scope="b")
    seen.add(2, *STABLE, scope="a", model="n")
    assert not seen.seen


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partings, "MAX_SCOPES", 2)
    seen = Seen()
    for number in range(20):
        seen.add(number, *STABLE, scope=f"{number}")
    assert len(seen._recent) == 2
    for number in range(20):
        seen.add(*[number] * 40_000)
    assert max(len(prompt) for recent in seen._recent.values() for prompt in recent) == partings.MAX_TOKENS
    assert max(map(len, seen._recent.values())) == partings.PROMPTS_OF_SCOPE


def test_it_is_logged_once_without_texts(caplog: pytest.LogCaptureFixture) -> None:
    watch = Partings(Metrics().parted)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            watch.prompt("m", "salt", "alice", [*HEAD, number + 60_000, *STABLE])
    (record,) = caplog.records
    assert "prompts for m of the tenant alice differ first at token 35" in record.getMessage()
    assert "60000" not in record.getMessage()


def test_the_metrics_have_position_and_tokens() -> None:
    metrics = Metrics()
    watch = Partings(metrics.parted)
    for number in range(2):
        watch.prompt("m", "", "", [*HEAD, number + 60_000, *STABLE])
    value = metrics.registry.get_sample_value
    assert value("headrace_prompt_parting_tokens_count", {"model": "m"}) == 1
    assert value("headrace_prompt_parting_tokens_sum", {"model": "m"}) == 35
    assert (value("headrace_prompt_tokens_behind_difference_total", {"model": "m"}) or 0) > 2_000


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30), st.integers(0, 1200))
def test_the_common_beginning_is_exact(one: list[int], other: list[int], num_same: int) -> None:
    same = [3] * num_same
    position = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert num_common([*same, *one], [*same, *other]) == num_same + position
