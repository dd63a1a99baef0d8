"""The last reported load of a worker, and the interval of its reports. Pure."""

from __future__ import annotations

from collections.abc import Callable

from headrace.protos import worker_pb2
from headrace.protos.load_report import LoadReport

# The target for the reports of all workers together, and the bounds of one worker's interval.
_REPORTS_PER_S = 3200
_SHORTEST_INTERVAL_MS = 20
_LONGEST_INTERVAL_MS = 250
# A worker gets a new interval only if it differs from the last one by more than this factor.
_CHANGED_BY = 1.25


class ReportedLoad:
    """The newest load of one worker, from its reports and from requests that it returned."""

    def __init__(self) -> None:
        self.load = LoadReport()
        self.message = worker_pb2.Load()
        """The newest load as the worker sent it."""
        self._version = 0
        self._reported_at_s: float | None = None

    def begin_epoch(self) -> None:
        """Start a new epoch: a worker that restarts numbers its loads from the beginning."""
        self._version = 0

    def take(self, load: worker_pb2.Load, now_s: float) -> None:
        """Apply a load that has just arrived. A load that is older than the newest one is ignored."""
        self._reported_at_s = now_s
        if load.version < self._version:
            return
        self._version = load.version
        self.message = load
        self.load = LoadReport.of(load, now_s)

    def age_ms(self, now_s: float) -> int:
        """Milliseconds since the last report; 0 before the first one."""
        return 0 if self._reported_at_s is None else int(1000 * (now_s - self._reported_at_s))


def report_interval_ms(num_workers: int) -> int:
    """The minimum interval between two reports of one worker in a fleet of this size, in milliseconds.

    In a small fleet, workers report as often as they can; in a large one, a few times a second. Bookings account for
    the requests placed between two reports.
    """
    return min(max(1000 * num_workers // _REPORTS_PER_S, _SHORTEST_INTERVAL_MS), _LONGEST_INTERVAL_MS)


class ReportPace:
    """How often a worker is asked to report. `wanted_ms` returns the interval that is right now; 0 leaves it to the
    worker.

    Workers join one by one. An interval that was right for the first ones would be far too short for all of them.
    """

    def __init__(self, wanted_ms: Callable[[], int]) -> None:
        self._wanted_ms = wanted_ms
        self._asked_ms = 0

    def begin(self) -> int:
        """The interval in milliseconds to ask for in a new Watch."""
        self._asked_ms = self._wanted_ms()
        return self._asked_ms

    def change(self) -> int | None:
        """The interval to request now; None while the last one is close enough."""
        wanted_ms = self._wanted_ms()
        if self._asked_ms / _CHANGED_BY <= wanted_ms <= _CHANGED_BY * self._asked_ms:
            return None
        self._asked_ms = wanted_ms
        return wanted_ms
