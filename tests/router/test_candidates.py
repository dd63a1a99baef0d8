"""The table of loads and bookings: a change is read before the next use, and only then."""

from __future__ import annotations

import numpy as np

from headrace.protos.load_report import LoadReport
from headrace.router.placement.candidates import Candidate, CandidateTable


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
