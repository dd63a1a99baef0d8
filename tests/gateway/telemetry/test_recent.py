"""The intervals of a gateway's last minutes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.telemetry.recent import (
    INTERVAL_S,
    MAX_MODELS,
    MAX_SAMPLES,
    NUM_INTERVALS,
    OTHERS,
    RANGES,
    Recent,
    percentile,
)


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_what_happens_is_shown_when_its_interval_is_over() -> None:
    clock = Clock()
    recent = Recent(clock)
    recent.delivered("m", 3)
    recent.delivered("m", 4)
    recent.first_token("m", 0.25)
    recent.prompt("m", 100, 64)
    assert not recent.complete()
    clock.now_s += INTERVAL_S
    (interval,) = recent.complete()
    assert interval.number == 500
    figures = interval.figures()
    assert (figures.num_tokens, figures.num_prompt_tokens, figures.num_cached_tokens) == (7, 100, 64)
    assert list(figures.ttft_ms) == [250.0]


def test_whoever_asks_again_gets_only_what_is_new() -> None:
    clock = Clock()
    recent = Recent(clock)
    recent.delivered("m", 1)
    clock.now_s += INTERVAL_S
    seen_until = recent.number
    recent.delivered("m", 2)
    clock.now_s += INTERVAL_S
    assert [one.figures().num_tokens for one in recent.complete(seen_until)] == [2]


def test_requests_are_told_apart_by_their_outcome() -> None:
    clock = Clock()
    recent = Recent(clock)
    for outcome in (
        "ok",
        "cancelled",
        "client_deadline",
        "queue_full",
        "quota",
        "invalid_field",
        "unauthenticated",
        "internal",
        "worker_lost",
        "no_capacity",
        "no_capacity",
        "draining",
    ):
        recent.request_ended("chat", outcome)
    clock.now_s += INTERVAL_S
    (interval,) = recent.complete()
    assert (interval.num_answered, interval.num_cancelled, interval.num_refused, interval.num_failed) == (1, 2, 4, 5)
    assert interval.reasons["no_capacity"] == 2
    assert sum(interval.reasons.values()) == 9, "what was refused or failed"


@pytest.mark.parametrize(
    "endpoint",
    [
        *("chat", "completions", "responses", "messages", "ollama_chat", "ollama_generate", "tgi_generate"),
        *("kserve_infer", "kserve_generate", "grpc_chat", "grpc_complete", "grpc_kserve_infer", "grpc_kserve_stream"),
    ],
)
def test_requests_of_every_protocol_are_counted(endpoint: str) -> None:
    clock = Clock()
    recent = Recent(clock)
    recent.request_ended(endpoint, "ok")
    clock.now_s += INTERVAL_S
    assert [one.num_answered for one in recent.complete()] == [1]


def test_requests_that_generate_nothing_are_not_counted() -> None:
    clock = Clock()
    recent = Recent(clock)
    for endpoint in ("models", "health", "metrics", "console", "fleet", "count_tokens", "grpc_tokenize", "unknown"):
        recent.request_ended(endpoint, "ok")
    clock.now_s += INTERVAL_S
    assert not recent.complete()


def test_of_many_first_tokens_an_interval_keeps_the_latest() -> None:
    clock = Clock()
    recent = Recent(clock)
    for number in range(MAX_SAMPLES + 10):
        recent.first_token("m", number / 1000)
    clock.now_s += INTERVAL_S
    (interval,) = recent.complete()
    figures = interval.figures()
    assert len(figures.ttft_ms) == MAX_SAMPLES
    assert min(figures.ttft_ms) == 10.0
    assert figures.num_first_tokens == MAX_SAMPLES + 10


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 9)), max_size=300))
def test_nothing_recent_is_lost_and_nothing_old_is_kept(steps: list[tuple[float, int]]) -> None:
    clock = Clock()
    recent = Recent(clock)
    entered: list[tuple[int, int]] = []
    for pause_s, num_tokens in steps:
        clock.now_s += pause_s
        entered.append((recent.number, num_tokens))
        recent.delivered("m", num_tokens)
    present = recent.number
    expected = sum(count for number, count in entered if present - NUM_INTERVALS <= number < present)
    shown = recent.complete()
    assert sum(one.figures().num_tokens for one in shown) == expected
    assert len(shown) <= NUM_INTERVALS
    assert [one.number for one in shown] == sorted({one.number for one in shown})


def test_models_are_told_apart_and_summed() -> None:
    clock = Clock()
    recent = Recent(clock)
    recent.delivered("a", 3)
    recent.delivered("b", 4)
    recent.first_token("b", 0.5)
    recent.prompt("a", 10, 2)
    clock.now_s += INTERVAL_S
    (interval,) = recent.complete()
    assert (interval.figures("a").num_tokens, interval.figures("b").num_tokens, interval.figures().num_tokens) == (
        3,
        4,
        7,
    )
    assert (list(interval.figures("a").ttft_ms), list(interval.figures("b").ttft_ms)) == ([], [500.0])
    assert interval.figures("unknown").num_tokens == 0


def test_an_interval_tells_a_bounded_number_of_models_apart() -> None:
    clock = Clock()
    recent = Recent(clock)
    for number in range(MAX_MODELS + 5):
        recent.delivered(f"adapter {number}", 1)
    recent.delivered("adapter 0", 1)
    clock.now_s += INTERVAL_S
    (interval,) = recent.complete()
    assert len(interval.models) == MAX_MODELS + 1
    assert (interval.figures("adapter 0").num_tokens, interval.figures(OTHERS).num_tokens) == (2, 5)
    assert interval.figures().num_tokens == MAX_MODELS + 6


@given(
    st.lists(st.tuples(st.floats(0, 400), st.integers(1, 9), st.booleans()), max_size=200),
    st.sampled_from(sorted(RANGES)),
)
def test_longer_intervals_have_what_the_shortest_had(steps: list[tuple[float, int, bool]], length_s: int) -> None:
    clock = Clock()
    recent = Recent(clock)
    entered: list[tuple[int, int]] = []
    for pause_s, num_tokens, looks in steps:
        clock.now_s += pause_s
        if looks:
            recent.complete(0, length_s)  # whoever looks in between changes nothing
        entered.append((recent.number_of(length_s), num_tokens))
        recent.delivered("m", num_tokens)
        recent.request_ended("chat", "quota")
    clock.now_s += length_s
    present = recent.number_of(length_s)
    expected = [(number, count) for number, count in entered if present - RANGES[length_s] <= number < present]
    shown = recent.complete(0, length_s)
    assert sum(one.figures("m").num_tokens for one in shown) == sum(count for _, count in expected)
    assert sum(one.reasons["quota"] for one in shown) == sum(one.num_refused for one in shown) == len(expected)
    assert [one.number for one in shown] == sorted({number for number, _ in expected})


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_is_a_value_that_the_share_does_not_exceed(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)


def test_there_is_no_percentile_of_nothing() -> None:
    assert percentile([], 0.5) is None
