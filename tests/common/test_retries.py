"""Verdicts on failed calls, and the bounds of attempts."""

from __future__ import annotations

import grpc
import pytest
from grpc.aio import Metadata

from headrace.common.retries import AT_ROUTERS, AT_WORKERS, MAX_FAILED, Attempts, Verdict, verdict_of
from headrace.protos.status import Reason, StatusError


def failure(code: grpc.StatusCode, details: str = "", error: StatusError | None = None) -> grpc.aio.AioRpcError:
    """A failed call; `error` is what the peer sent along."""
    trailing = Metadata() if error is None else Metadata(*error.trailing_metadata())
    return grpc.aio.AioRpcError(code, Metadata(), trailing, details)


@pytest.mark.parametrize(
    ("reason", "at_worker", "at_router"),
    [
        (Reason.WORKER_LOST, Verdict.LOST_BEHIND, Verdict.FINAL),
        (Reason.MODEL_CHANGED, Verdict.LOST_BEHIND, Verdict.FINAL),
        (Reason.DRAINING, Verdict.DRAINING, Verdict.DRAINING),
        (Reason.GIVEN_BACK, Verdict.GIVEN_BACK, Verdict.FINAL),
        (Reason.QUEUE_FULL, Verdict.FULL, Verdict.FULL),
        (Reason.NO_CAPACITY, Verdict.FULL, Verdict.NO_WORKER),
        (Reason.MODEL_NOT_FOUND, Verdict.FINAL, Verdict.UNKNOWN_MODEL),
        (Reason.INVALID_FIELD, Verdict.FINAL, Verdict.FINAL),
        (Reason.DEADLINE, Verdict.FINAL, Verdict.FINAL),
    ],
)
def test_the_reason_of_a_peer_decides(reason: Reason, at_worker: Verdict, at_router: Verdict) -> None:
    error = StatusError(reason, "why")
    call = failure(error.row.grpc_code, "why", error)
    assert (verdict_of(call, AT_WORKERS), verdict_of(call, AT_ROUTERS)) == (at_worker, at_router)


@pytest.mark.parametrize("reasons", [AT_WORKERS, AT_ROUTERS])
def test_a_transport_that_fails_loses_the_peer_and_what_it_refuses_is_final(reasons: dict[Reason, Verdict]) -> None:
    assert verdict_of(failure(grpc.StatusCode.UNAVAILABLE, "Socket closed"), reasons) is Verdict.LOST
    assert verdict_of(failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "message too large"), reasons) is Verdict.FINAL


def test_losses_in_a_row_without_a_token_are_bounded() -> None:
    attempts = Attempts(3, number=5)
    attempts.lost(progressed=False)
    attempts.lost(progressed=False)
    assert attempts.are_left
    attempts.lost(progressed=True)
    assert (attempts.num_in_vain, attempts.are_left) == (1, True), "after a token, only its own loss counts"
    attempts.lost(progressed=False)
    attempts.lost(progressed=False)
    assert not attempts.are_left
    assert (attempts.number, attempts.num_failed) == (10, 5)


def test_failures_are_bounded_however_many_tokens_come() -> None:
    attempts = Attempts(3)
    for _ in range(MAX_FAILED):
        assert attempts.are_left
        attempts.lost(progressed=True)
    assert not attempts.are_left


def test_refusals_count_as_failures_and_not_as_losses() -> None:
    attempts = Attempts(1, max_failed=3)
    attempts.refused()
    attempts.refused()
    assert (attempts.num_in_vain, attempts.are_left, attempts.number) == (0, True, 2)
    attempts.refused()
    assert not attempts.are_left


def test_who_moves_with_tokens_may_move_on_and_who_brings_none_is_bounded() -> None:
    attempts = Attempts(2)
    for _ in range(2 * MAX_FAILED):
        attempts.moved(progressed=True)
    assert (attempts.num_failed, attempts.are_left) == (0, True)
    attempts.moved(progressed=False)
    attempts.moved(progressed=False)
    assert not attempts.are_left


def test_a_wait_costs_nothing_and_is_no_attempt_before_the_answer_begins() -> None:
    attempts = Attempts(2)
    attempts.lost(progressed=False)
    attempts.waited(progressed=False, has_begun=False)
    assert (attempts.number, attempts.num_in_vain, attempts.num_failed) == (1, 1, 1)
    attempts.waited(progressed=True, has_begun=True)
    assert (attempts.number, attempts.num_in_vain, attempts.num_failed) == (2, 0, 1)
