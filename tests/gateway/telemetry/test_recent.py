"""The intervals of a gateway's last minutes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.telemetry.recent import INTERVAL_S, MAX_SAMPLES, NUM_INTERVALS, Recent, percentile


class Clock:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_what_happens_is_shown_when_its_interval_is_over() -> None:
    clock = Clock()
    recent = Recent(clock)
    recent.delivered(3)
    recent.delivered(4)
    recent.first_token(0.25)
    recent.prompt(100, 64)
    assert not recent.complete()
    clock.now_s += INTERVAL_S
    (interval,) = recent.complete()
    assert interval.number == 500
    assert (interval.num_tokens, interval.num_prompt_tokens, interval.num_cached_tokens) == (7, 100, 64)
    assert interval.ttft_ms == [250.0]


def test_whoever_asks_again_gets_only_what_is_new() -> None:
    clock = Clock()
    recent = Recent(clock)
    recent.delivered(1)
    clock.now_s += INTERVAL_S
    seen_until = recent.number
    recent.delivered(2)
    clock.now_s += INTERVAL_S
    assert [one.num_tokens for one in recent.complete(seen_until)] == [2]


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
        recent.first_token(number / 1000)
    clock.now_s += INTERVAL_S
    (interval,) = recent.complete()
    assert len(interval.ttft_ms) == MAX_SAMPLES
    assert min(interval.ttft_ms) == 10.0
    assert interval.num_first_tokens == MAX_SAMPLES + 10


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 9)), max_size=300))
def test_nothing_recent_is_lost_and_nothing_old_is_kept(steps: list[tuple[float, int]]) -> None:
    clock = Clock()
    recent = Recent(clock)
    entered: list[tuple[int, int]] = []
    for pause_s, num_tokens in steps:
        clock.now_s += pause_s
        entered.append((recent.number, num_tokens))
        recent.delivered(num_tokens)
    present = recent.number
    expected = sum(count for number, count in entered if present - NUM_INTERVALS <= number < present)
    shown = recent.complete()
    assert sum(one.num_tokens for one in shown) == expected
    assert len(shown) <= NUM_INTERVALS
    assert [one.number for one in shown] == sorted({one.number for one in shown})


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_is_a_value_that_the_share_does_not_exceed(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)


def test_there_is_no_percentile_of_nothing() -> None:
    assert percentile([], 0.5) is None
