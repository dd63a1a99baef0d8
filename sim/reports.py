"""Reports of workers: their transport to routers, and the reported state.

    worker ---- report ---> outbox: at most one message every 20 ms ---- report_delay ----> all routers

All routers get the same messages at the same time, so loads and blocks are kept once for all of them. Nothing is done
when a message arrives: it is read when a router needs to know, because most are outdated before that.

Pure: the caller passes the time.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import numpy as np

from headrace.protos.load_report import LoadReport
from headrace.router.placement.bookings import Bookings
from headrace.router.placement.candidates import OWN_SHARE, Candidate, Columns, Values
from headrace.router.placement.prefix_index import PrefixIndex
from headrace.sim.decode_run import DecodeRun
from headrace.sim.worker import Report

# The minimum interval between two messages to a watcher, as in worker.server.watch.
WATCH_INTERVAL_S = 0.02
_MAX_INDEX_ENTRIES = 4_000_000
_STEP_MS = Columns._fields.index("step_ms")
_AS_OF_S = Columns._fields.index("as_of_s")
_NO_BOOKINGS = Bookings()


class _Outbox:
    """When a worker's messages are sent. A message takes the reports that came before it."""

    __slots__ = ("_interval_s", "last_s")

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.last_s = -interval_s

    def sent_s(self, put_s: float) -> float:
        """The time at which a report that is ready at `put_s` is sent. Call it in the order of time."""
        if put_s > self.last_s:  # otherwise the next message waits to be sent
            self.last_s = max(put_s, self.last_s + self._interval_s)
        return self.last_s


class _Followed(NamedTuple):
    """The run that determines a worker's latest load, and the number of its latest report within the run."""

    run: DecodeRun
    report: int


class ReportedFleet:
    """What the workers have reported to all routers, with the index of their blocks. `on_report` is called with each
    report that says more than the time of a decode step."""

    def __init__(
        self,
        num_workers: int,
        block_size: int,
        delay_s: float,
        interval_s: float,
        on_report: Callable[[int, Report], None],
    ) -> None:
        self.num_workers = num_workers
        self.block_size = block_size
        self.index = PrefixIndex(_MAX_INDEX_ENTRIES, 0, 0.0)
        self.names = [str(worker) for worker in range(num_workers)]
        for name in self.names:
            self.index.add_worker(name)
        self.versions = [0] * num_workers
        """The version of each worker's latest report."""
        self.num_read = [0] * num_workers
        """How many times reports of each worker were read."""
        self.num_messages = 0
        """Messages that have arrived at each router. Reports of one message count as so many."""
        self._delay_s = delay_s
        self._on_report = on_report
        self._outboxes = [_Outbox(interval_s) for _ in range(num_workers)]
        self._loads = [LoadReport()] * num_workers
        self._followed: list[_Followed | None] = [None] * num_workers
        self._sent_before: dict[DecodeRun, float] = {}
        self._columns: Values = np.zeros((len(Columns._fields), num_workers))
        self._coming: list[tuple[float, int, int, Report | DecodeRun]] = []
        self._number = count()
        for worker in range(num_workers):
            self._put(worker, LoadReport())

    def send(self, worker: int, report: Report, now_s: float) -> None:
        """Send a worker's report."""
        delivered_s = self._outboxes[worker].sent_s(now_s) + self._delay_s
        heapq.heappush(self._coming, (delivered_s, next(self._number), worker, report))

    def follow(self, worker: int, run: DecodeRun) -> None:
        """Take a worker's load from a run of steps with reports, which has begun."""
        outbox = self._outboxes[worker]
        self._sent_before[run] = outbox.last_s
        sent_s, delay_s = outbox.sent_s, self._delay_s
        run.delivered_s = [sent_s(run.ends_s[number]) + delay_s for number in run.reported]
        if run.delivered_s:
            heapq.heappush(self._coming, (run.delivered_s[0], next(self._number), worker, run))

    def ended(self, worker: int, run: DecodeRun) -> None:
        """Stop following a run, because it has ended or was cut."""
        before_s = self._sent_before.pop(run)
        if run.is_cut:
            self._outboxes[worker].last_s = run.delivered_s[-1] - self._delay_s if run.delivered_s else before_s

    def advance(self, now_s: float) -> None:
        """Read the messages that have arrived by now."""
        coming = self._coming
        while coming and coming[0][0] <= now_s:
            _, number, worker, message = coming[0]
            if isinstance(message, Report):
                heapq.heappop(coming)
                self._read(worker, message)
                continue
            num_read = bisect_right(message.delivered_s, now_s)
            if num_read < len(message.delivered_s):
                heapq.heapreplace(coming, (message.delivered_s[num_read], number, worker, message))
            else:
                heapq.heappop(coming)
            if num_read:
                self._read_run(worker, message, num_read - 1)

    def load(self, worker: int) -> LoadReport:
        """A worker's latest reported load."""
        followed = self._followed[worker]
        if followed is not None:
            run, report = followed
            as_of_s = run.reported_s(report) + self._delay_s
            self._loads[worker] = replace(run.load, decode_step_ms=run.reported_ms(report), as_of_s=as_of_s)
            self._followed[worker] = None
        return self._loads[worker]

    def columns(self) -> Values:
        """The loads of all workers without bookings, with a row for each of `Columns`. The caller owns the array."""
        return self._columns.copy()

    def _read(self, worker: int, report: Report) -> None:
        self.num_messages += 1
        name = self.names[worker]
        if report.evicted:
            self.index.evict(name, report.evicted)
        if report.stored:
            self.index.store(name, report.stored)
        if report.disk_changes:
            changes = report.disk_changes.items()
            gone = [block_hash for block_hash, is_there in changes if not is_there]
            self.index.disk.apply(worker, [block_hash for block_hash, is_there in changes if is_there], gone)
        # Like real routers, these do not know the delay, so they assume that the report is newer than it is.
        delay_s = self._delay_s
        load = replace(report.load, as_of_s=report.load.as_of_s + delay_s) if delay_s else report.load
        self._loads[worker] = load
        self._followed[worker] = None
        self.versions[worker] = report.version
        self.num_read[worker] += 1
        self._put(worker, load)
        self._on_report(worker, report)

    def _read_run(self, worker: int, run: DecodeRun, report: int) -> None:
        version = run.version + report + 1
        before = self.versions[worker]
        if version <= before:
            return
        self.num_messages += version - max(before, run.version)
        if before <= run.version:  # the first report of the run that is read
            self._put(worker, run.load)
        self._followed[worker] = _Followed(run, report)
        self.versions[worker] = version
        self.num_read[worker] += 1
        self._columns[_STEP_MS, worker] = run.reported_ms(report) ** OWN_SHARE
        self._columns[_AS_OF_S, worker] = run.reported_s(report) + self._delay_s

    def _put(self, worker: int, load: LoadReport) -> None:
        candidate = Candidate.of(self.names[worker], load, self.block_size, _NO_BOOKINGS)
        self._columns[:, worker] = candidate.columns()
