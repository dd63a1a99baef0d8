"""When a generation is attempted again, and after how long (pure)."""

from __future__ import annotations

import pytest

from headrace.gateway.upstream import (
    FIRST_BACKOFF_S,
    MAX_ATTEMPTS,
    MAX_BACKOFF_S,
    MAX_FRUITLESS_ATTEMPTS,
    Retries,
)
from headrace.protos.status import Reason, StatusError

LOST = StatusError(Reason.WORKER_LOST, "lost")


def waits(retries: Retries, *, progress: bool = False, failure: StatusError = LOST, lost: bool = True) -> list[float]:
    """Waits until it gives up."""
    found = []
    while (wait_s := retries.after(failure, lost, progress, True)) is not None:
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
    assert retries.after(StatusError(reason, ""), False, True, True) is None
    assert retries.attempt == 0


@pytest.mark.parametrize("reason", [Reason.NO_CAPACITY, Reason.QUEUE_FULL])
def test_want_of_room_is_waited_out_a_few_times_only_by_who_has_begun(reason: Reason) -> None:
    full = StatusError(reason, "full")
    assert Retries(1).after(full, False, False, False) is None
    assert 1 <= len(waits(Retries(1), failure=full, lost=False)) < MAX_FRUITLESS_ATTEMPTS // 2
