"""Which requests count as the cause of lost workers. Pure."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from headrace.protos.status import Reason, StatusError
from headrace.router.dispatch.suspects import MAX_REMEMBERED, REMEMBER_S, Suspects


@dataclass(eq=False)
class Request:
    digest: bytes = b"a"
    has_progressed: bool = False


class Fleet:
    """Loses workers one after the other, each with these requests."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.suspects = Suspects(4, clock=lambda: self.now_s)
        self._num_lives = 0

    def lose(self, *requests: Request, num_reported: int = 0, has_died: bool = True) -> None:
        self._num_lives += 1
        with ExitStack() as stack:
            for request in requests:
                stack.enter_context(self.suspects.running(self._num_lives, request))
            for request in requests:
                self.suspects.lost(self._num_lives, request, num_reported, has_died=has_died)

    def is_refused(self, request: Request) -> bool:
        try:
            self.suspects.check(request)
        except StatusError as error:
            return error.reason is Reason.INTERNAL and error.retry_after_s is None
        return False


def test_a_request_that_is_alone_costs_two_workers() -> None:
    fleet, request = Fleet(), Request()
    fleet.lose(request)
    assert not fleet.is_refused(request)
    fleet.lose(request)
    assert fleet.is_refused(request)
    assert fleet.is_refused(Request()), "also when it is asked for again"
    assert not fleet.is_refused(Request(b"b"))


def test_requests_that_share_their_workers_cost_as_many_as_are_allowed() -> None:
    fleet, requests = Fleet(), [Request(b"a"), Request(b"b")]
    for _ in range(3):
        fleet.lose(*requests)
        assert not any(map(fleet.is_refused, requests))
    fleet.lose(*requests)
    assert all(map(fleet.is_refused, requests))


def test_requests_of_other_routers_are_company() -> None:
    fleet, request = Fleet(), Request()
    for _ in range(3):
        fleet.lose(request, num_reported=2)
        assert not fleet.is_refused(request)
    fleet.lose(request, num_reported=2)
    assert fleet.is_refused(request)


def test_a_worker_that_only_fell_silent_counts_among_all() -> None:
    fleet, request = Fleet(), Request()
    for has_died in (False, True, False):
        fleet.lose(request, has_died=has_died)
        assert not fleet.is_refused(request)
    fleet.lose(request, has_died=False)
    assert fleet.is_refused(request)


def test_choices_of_one_prompt_count_as_one_request() -> None:
    fleet, choices = Fleet(), [Request() for _ in range(8)]
    fleet.lose(*choices)
    assert not fleet.is_refused(choices[0])
    fleet.lose(*choices)
    assert fleet.is_refused(choices[0])


def test_a_token_or_a_whole_answer_begins_the_count_anew() -> None:
    fleet, request = Fleet(), Request(has_progressed=True)
    for _ in range(9):
        fleet.lose(request)
        assert not fleet.is_refused(request)
    request.has_progressed = False
    fleet.suspects.answered(request)
    fleet.lose(request)
    assert not fleet.is_refused(request)
    fleet.lose(request)
    assert fleet.is_refused(request)


def test_what_is_remembered_is_bounded_in_time_and_number() -> None:
    fleet, request = Fleet(), Request()
    fleet.lose(request)
    fleet.lose(request)
    fleet.now_s = REMEMBER_S
    assert fleet.is_refused(request)
    fleet.now_s = REMEMBER_S + 1
    assert not fleet.is_refused(request)
    fleet.lose(request)
    fleet.lose(request)
    for number in range(MAX_REMEMBERED):
        fleet.lose(Request(number.to_bytes(4, "big")))
    assert not fleet.is_refused(request)


def test_a_request_that_left_its_worker_is_no_company() -> None:
    fleet, request = Fleet(), Request()
    for life in range(2):
        with fleet.suspects.running(life, request):
            with fleet.suspects.running(life, Request(b"b")):
                pass
            fleet.suspects.lost(life, request)
    with pytest.raises(StatusError, match="2 workers were lost"):
        fleet.suspects.check(request)
