"""The costs of routers: Python's own time for requests, reports and tokens, and that of messages between processes.

A router is one thread. Its time goes to reports and tokens all the time, and requests share what is left, in order of
arrival:

    share left     1 - report_us * reports a second - token_us * tokens a second
    a request      (request_us + per_worker_us * workers) / share left, after the requests before it

benchmarks/router/real_fleet.py measures the costs with real routers; `default()` is the committed measurement. Pure,
except for `read`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

DEFAULT_FILE = Path(__file__).with_name("process_cost.json")
# A router that is overloaded still serves requests, slowly.
_LEAST_LEFT = 0.02
# Rates are means over about so long.
_MEMORY_S = 2.0


class ProcessCost(msgspec.Struct, frozen=True):
    """CPU time of a router in microseconds, and the time of a message between two processes in milliseconds."""

    request_us: float = 0.0
    per_worker_us: float = 0.0
    """In addition, for each worker of the fleet."""
    report_us: float = 0.0
    token_us: float = 0.0
    hop_ms: float = 0.0
    machine: str = ""


NOTHING = ProcessCost()


class RouterTime:
    """The time of one router's thread. Times are in seconds, and never fall from call to call."""

    def __init__(self, cost: ProcessCost, num_workers: int) -> None:
        self._cost = cost
        self._request_s = (cost.request_us + cost.per_worker_us * num_workers) / 1e6
        self._free_s = 0.0
        self._counted_s = 0.0
        self._background = 0.0
        self._work_s = 0.0
        self._num_reports = 0

    @property
    def background(self) -> float:
        """The fraction of the process's time that reports and tokens took recently."""
        return self._background

    def tokens(self, count: int) -> None:
        """Record that the router passes on `count` tokens."""
        self._work_s += count * self._cost.token_us / 1e6

    def request_done_s(self, now_s: float, num_reports: int) -> float:
        """Record that a request arrives, after `num_reports` messages of workers in all. Returns the time at which the
        request is placed."""
        self._work_s += (num_reports - self._num_reports) * self._cost.report_us / 1e6
        self._num_reports = num_reports
        passed_s = now_s - self._counted_s
        if passed_s > 0.0:
            kept = 0.5 ** (passed_s / _MEMORY_S)
            self._background = self._background * kept + (1.0 - kept) * self._work_s / passed_s
            self._counted_s, self._work_s = now_s, 0.0
        left = max(1.0 - self._background, _LEAST_LEFT)
        self._free_s = max(self._free_s, now_s) + self._request_s / left
        return self._free_s


def read(path: Path) -> ProcessCost:
    """Read a measurement from a file. Raises OSError or ValueError."""
    return msgspec.json.decode(path.read_bytes(), type=ProcessCost)


def default() -> ProcessCost:
    """The measurement in `process_cost.json`, whose field `machine` says where it was made."""
    return read(DEFAULT_FILE)
