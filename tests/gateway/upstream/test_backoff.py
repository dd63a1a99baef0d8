"""The pauses between the attempts of a generation at routers. Pure."""

from __future__ import annotations

import pytest

from headrace.common.retries import MAX_FAILED, Verdict
from headrace.gateway.upstream.routers import FIRST_BACKOFF_S, MAX_BACKOFF_S, MAX_IN_VAIN, Backoff


def pauses(backoff: Backoff, *, progressed: bool = False) -> list[float]:
    """The pauses after lost attempts, until it gives up."""
    found = []
    while (pause_s := backoff.after(Verdict.LOST, progressed=progressed)) is not None:
        found.append(pause_s)
    return found


def test_the_next_address_is_asked_at_once_and_a_round_waits_longer_each_time() -> None:
    first = FIRST_BACKOFF_S
    assert pauses(Backoff(3))[:8] == [0.0, 0.0, first, 0.0, 0.0, 2 * first, 0.0, 0.0]
    assert pauses(Backoff(1))[:3] == [first, 2 * first, 4 * first]


def test_attempts_without_progress_are_bounded() -> None:
    found = pauses(Backoff(1))
    assert len(found) == MAX_IN_VAIN - 1
    assert max(found) == MAX_BACKOFF_S


def test_progress_starts_the_count_anew_but_not_for_ever() -> None:
    found = pauses(Backoff(1), progressed=True)
    assert set(found) == {FIRST_BACKOFF_S}
    assert len(found) == MAX_FAILED - 1


@pytest.mark.parametrize("verdict", [Verdict.FINAL, Verdict.LOST_BEHIND])
def test_what_a_server_decided_is_final(verdict: Verdict) -> None:
    backoff = Backoff(2)
    assert backoff.after(verdict, progressed=True) is None
    assert backoff.attempts.number == 0


@pytest.mark.parametrize("verdict", [Verdict.FULL, Verdict.DRAINING])
def test_want_of_room_is_waited_out_by_who_has_begun_for_as_long_as_its_client_waits(verdict: Verdict) -> None:
    backoff = Backoff(1)
    found = [backoff.after(verdict) for _ in range(10 * MAX_FAILED)]
    assert None not in found
    assert found[-1] == MAX_BACKOFF_S
    assert backoff.attempts.number == len(found), "each resumption has a number of its own"


def test_want_of_room_is_final_for_who_has_nothing_yet() -> None:
    assert Backoff(1).after(Verdict.FULL, has_begun=False) is None


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("verdict", [Verdict.LOST, Verdict.NO_WORKER])
def test_while_nobody_is_there_an_attempt_costs_nothing(verdict: Verdict, has_begun: bool) -> None:
    backoff = Backoff(1)
    for _ in range(10 * MAX_FAILED):
        assert backoff.after(verdict, has_begun=has_begun, was_connected=False) is not None
    assert has_begun or backoff.attempts.number == 0, "to routers it is a new request"
    assert len(pauses(backoff)) == MAX_IN_VAIN - 1, "and none is held against those who come back"


def test_a_model_that_one_router_expects_back_is_waited_for_although_another_one_does_not_know_it() -> None:
    backoff = Backoff(2)
    for _ in range(10 * MAX_FAILED):
        assert backoff.after(Verdict.NO_WORKER, has_begun=False) is not None
        assert backoff.after(Verdict.UNKNOWN_MODEL, has_begun=False) is not None


@pytest.mark.parametrize("num_addresses", [1, 2, 3])
def test_a_model_that_no_router_knows_is_final(num_addresses: int) -> None:
    backoff = Backoff(num_addresses)
    found = [backoff.after(Verdict.UNKNOWN_MODEL, has_begun=False) for _ in range(num_addresses)]
    assert found == [0.0] * (num_addresses - 1) + [None]


def test_a_lost_router_does_not_keep_a_model_that_the_other_one_does_not_know() -> None:
    backoff = Backoff(2)
    assert backoff.after(Verdict.UNKNOWN_MODEL, has_begun=False) == 0.0
    assert backoff.after(Verdict.LOST, has_begun=False, was_connected=False) is not None
    assert backoff.after(Verdict.UNKNOWN_MODEL, has_begun=False) is None
