"""Requests that have arrived but are not yet reported, and contradictions of a router's belief."""

from __future__ import annotations

import pytest

from headrace.protos.inference_pb2 import Belief
from headrace.worker.server.arrivals import Arrivals, is_contradicted


def sums(arrivals: Arrivals) -> tuple[int, int, int]:
    return arrivals.num_requests, arrivals.num_tokens, arrivals.num_blocks


def test_requests_count_until_a_report_shows_them_in_the_order_in_which_they_came() -> None:
    arrivals = Arrivals(block_size=16)
    arrivals.add(100, 0)
    arrivals.add(100, 64)
    arrivals.add(5, 0)
    assert sums(arrivals) == (3, 141, 7 + 3 + 1)
    arrivals.shown(0)
    assert sums(arrivals) == (3, 141, 11)
    arrivals.shown(2)
    assert sums(arrivals) == (1, 5, 1)
    arrivals.shown(3)
    assert sums(arrivals) == (0, 0, 0)


def test_requests_that_are_not_handed_over_in_order_count_until_they_are_shown_or_dropped() -> None:
    arrivals = Arrivals(block_size=16)
    first, second, third = (arrivals.expect(num_tokens, 0) for num_tokens in (100, 10, 1))
    arrivals.hand_over(second)
    arrivals.shown(1)
    assert sums(arrivals) == (2, 101, 7 + 1)
    arrivals.drop(third)
    assert sums(arrivals) == (1, 100, 7)
    arrivals.shown(1)
    assert sums(arrivals) == (1, 100, 7), "it has not been handed over"
    arrivals.hand_over(first)
    arrivals.shown(2)
    assert sums(arrivals) == (0, 0, 0)


def test_a_token_is_computed_whatever_is_said_to_be_cached() -> None:
    arrivals = Arrivals(block_size=16)
    arrivals.add(32, 1000)
    assert sums(arrivals) == (1, 1, 2)


@pytest.mark.parametrize(
    ("num_requests", "num_tokens", "is_wrong"),
    [(2, 300, False), (2, 400, False), (2, 401, True), (7, 300, False), (8, 300, True), (3, 390, True), (0, 0, False)],
)
def test_a_belief_is_wrong_when_what_came_on_top_costs_more_than_it_allows(
    num_requests: int, num_tokens: int, is_wrong: bool
) -> None:
    belief = Belief(num_requests=2, num_uncached_tokens=300, ms_per_token=1.0, ms_per_request=20.0, slack_ms=100.0)
    assert is_contradicted(belief, num_requests, num_tokens) is is_wrong


def test_less_of_one_does_not_make_up_for_more_of_the_other() -> None:
    belief = Belief(num_requests=9, num_uncached_tokens=0, ms_per_token=1.0, ms_per_request=50.0, slack_ms=100.0)
    assert is_contradicted(belief, 0, 101)


def test_a_belief_without_slack_is_never_wrong() -> None:
    assert not is_contradicted(Belief(ms_per_token=1.0), 99, 99_999)
