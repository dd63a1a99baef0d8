"""Decisions to retry a generation, and their delays. Pure."""

from __future__ import annotations

import pytest

from headrace.gateway.upstream.retries import (
    FIRST_BACKOFF_S,
    MAX_ATTEMPTS,
    MAX_BACKOFF_S,
    MAX_FRUITLESS_ATTEMPTS,
    Retries,
)
from headrace.protos.status import Reason, StatusError

LOST = StatusError(Reason.WORKER_LOST, "lost")


def waits(retries: Retries, *, progress: bool = False, failure: StatusError = LOST, lost: bool = True) -> list[float]:
    """The waits until it gives up."""
    found = []
    while (wait_s := retries.after(failure, lost=lost, progress=progress)) is not None:
        found.append(wait_s)
    return found


def test_the_next_address_is_asked_at_once_and_a_round_waits_longer_each_time() -> None:
    first = FIRST_BACKOFF_S
    assert waits(Retries(3))[:8] == [0.0, 0.0, first, 0.0, 0.0, 2 * first, 0.0, 0.0]
    assert waits(Retries(1))[:3] == [first, 2 * first, 4 * first]


def test_attempts_without_progress_are_bounded() -> None:
    found = waits(Retries(1))
    assert len(found) == MAX_FRUITLESS_ATTEMPTS - 1
    assert max(found) == MAX_BACKOFF_S


def test_progress_starts_the_count_anew_but_not_for_ever() -> None:
    found = waits(Retries(1), progress=True)
    assert set(found) == {FIRST_BACKOFF_S}
    assert len(found) == MAX_ATTEMPTS - 1


@pytest.mark.parametrize("reason", [Reason.INVALID_FIELD, Reason.INTERNAL, Reason.WORKER_LOST, Reason.DEADLINE])
def test_what_a_server_decided_is_final(reason: Reason) -> None:
    retries = Retries(2)
    assert retries.after(StatusError(reason, ""), lost=False, progress=True) is None
    assert retries.attempt == 0


@pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.DRAINING])
def test_want_of_room_is_waited_out_by_who_has_begun_for_as_long_as_its_client_waits(reason: Reason) -> None:
    full = StatusError(reason, "full")
    retries = Retries(1)
    found = [retries.after(full, lost=False) for _ in range(10 * MAX_ATTEMPTS)]
    assert None not in found
    assert found[-1] == MAX_BACKOFF_S
    assert retries.attempt == len(found), "each resumption has a number of its own"


def test_want_of_room_is_final_for_who_has_nothing_yet() -> None:
    assert Retries(1).after(StatusError(Reason.QUEUE_FULL, "full"), lost=False, started=False) is None


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("failure", [LOST, StatusError(Reason.NO_CAPACITY, "none")])
def test_while_nobody_is_there_an_attempt_costs_nothing(failure: StatusError, started: bool) -> None:
    retries = Retries(1)
    for _ in range(10 * MAX_ATTEMPTS):
        assert retries.after(failure, lost=failure is LOST, started=started, present=False) is not None
    assert started or retries.attempt == 0, "to routers it is a new request"
    assert len(waits(retries)) == MAX_FRUITLESS_ATTEMPTS - 1, "and none is held against those who come back"


UNKNOWN, NONE = StatusError(Reason.MODEL_NOT_FOUND, "no model"), StatusError(Reason.NO_CAPACITY, "none")


def test_a_model_that_one_router_expects_back_is_waited_for_although_another_one_does_not_know_it() -> None:
    retries = Retries(2)
    for _ in range(10 * MAX_ATTEMPTS):
        assert retries.after(NONE, lost=False, started=False) is not None
        assert retries.after(UNKNOWN, lost=False, started=False) is not None


@pytest.mark.parametrize("num_addresses", [1, 2, 3])
def test_a_model_that_no_router_knows_is_final(num_addresses: int) -> None:
    retries = Retries(num_addresses)
    found = [retries.after(UNKNOWN, lost=False, started=False) for _ in range(num_addresses)]
    assert found == [0.0] * (num_addresses - 1) + [None]


def test_a_lost_router_does_not_keep_a_model_that_the_other_one_does_not_know() -> None:
    retries = Retries(2)
    assert retries.after(UNKNOWN, lost=False, started=False) == 0.0
    assert retries.after(LOST, lost=True, started=False, present=False) is not None
    assert retries.after(UNKNOWN, lost=False, started=False) is None
