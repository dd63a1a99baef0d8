"""Predicted waiting, and refusals by it."""

from __future__ import annotations

import pytest

from headrace.protos.status import Reason, StatusError
from headrace.worker.forecast import Forecast
from headrace.worker.mailbox import LoadReport


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def forecast(max_ttft_s: float = 10.0) -> tuple[Forecast, Clock]:
    clock = Clock()
    return Forecast(4, max_ttft_s, clock), clock


def report(finished: int = 0, **fields: float) -> LoadReport:
    return LoadReport(counters={"requests_finished": finished}, **fields)  # type: ignore[arg-type]


def test_while_nothing_is_learned_nobody_is_refused() -> None:
    under_test, _ = forecast()
    under_test.observe(report(num_uncached_tokens=10**9))
    under_test.check(10**9, deadline_s=0.001)


def test_the_wait_is_the_prompts_ahead_and_its_own() -> None:
    under_test, _ = forecast()
    under_test.observe(report(num_uncached_tokens=300, prefill_tokens_per_s=100.0))
    assert under_test.ttft_s(100) == pytest.approx(4.0)
    under_test.submitted(200)
    assert under_test.ttft_s(100) == pytest.approx(6.0)
    under_test.observe(report(num_uncached_tokens=500, prefill_tokens_per_s=100.0))
    assert under_test.ttft_s(100) == pytest.approx(6.0)


def test_with_a_full_batch_the_wait_for_a_seat_comes_on_top() -> None:
    under_test, clock = forecast()
    finished = 0
    for _ in range(1000):
        under_test.observe(report(finished, num_running=4, num_waiting=5, prefill_tokens_per_s=1e9))
        clock.now += 0.1
        finished += 1 if int(clock.now * 10) % 5 == 0 else 0
    assert under_test.ttft_s(1) == pytest.approx((4 + 5 + 1 - 4) / 2.0, rel=0.15)


def test_a_refusal_says_when_to_come_back() -> None:
    under_test, _ = forecast(max_ttft_s=10.0)
    under_test.observe(report(num_uncached_tokens=1200, prefill_tokens_per_s=100.0))
    with pytest.raises(StatusError, match="this worker lets anyone wait") as caught:
        under_test.check(100, None)
    assert (caught.value.reason, caught.value.retry_after_s) == (Reason.QUEUE_FULL, pytest.approx(3.0))
    with pytest.raises(StatusError, match="the request's deadline allows"):
        under_test.check(100, 5.0)
    under_test.observe(report(num_uncached_tokens=0, prefill_tokens_per_s=100.0))
    under_test.check(100, 5.0)
