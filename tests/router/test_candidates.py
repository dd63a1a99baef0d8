"""The table of loads and bookings: a change is read before the next use, and only then."""

from __future__ import annotations

import numpy as np

from headrace.router.placement.candidates import Candidate, CandidateTable, LoadReport


class _Worker:
    """A worker whose bookings change."""

    def __init__(self) -> None:
        self.num_booked = 0
        self.num_reads = 0

    def candidate(self) -> Candidate:
        """The worker as it is now."""
        self.num_reads += 1
        return Candidate("a", LoadReport(), 16, self.num_booked)


def test_changes_are_read_once_before_the_next_use() -> None:
    table, worker = CandidateTable(), _Worker()
    for number in range(1, 4):
        worker.num_booked = number
        table.changed(20, worker.candidate)
    assert worker.num_reads == 0
    for _ in "12":
        assert table.at(np.array([20])).booked_requests.tolist() == [3.0]
    assert worker.num_reads == 1


def test_a_worker_that_has_left_is_not_read() -> None:
    table, worker = CandidateTable(), _Worker()
    table.changed(0, worker.candidate)
    table.forget(0)
    table.at(np.array([0]))
    assert worker.num_reads == 0


def test_requests_that_wait_for_their_blocks_do_not_make_a_worker_full() -> None:
    """A disk or another worker that is slow must not keep requests from idle cores."""
    full = LoadReport(max_num_seqs=16, num_waiting=2)
    assert not full.has_room(0), "the pool is full"
    assert LoadReport(max_num_seqs=16, num_waiting=2, num_fetching=1).has_room(0)
    busy = LoadReport(max_num_seqs=16, num_running=14, num_waiting=4, num_fetching=4)
    assert not busy.has_room(0), "they take their seats later"
