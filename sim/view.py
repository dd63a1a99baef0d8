"""A simulated router's knowledge of the fleet, and the interface of a policy. Pure: the caller passes the time."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from headrace.protos.load_report import LoadReport
from headrace.router.placement.bookings import Bookings
from headrace.router.placement.candidates import Candidate, Candidates, Columns, Places
from headrace.router.placement.policy import Placement
from headrace.router.placement.predictions import Run
from headrace.sim.reports import ReportedFleet
from headrace.sim.tiers import TierSettings
from headrace.sim.trace import Job
from headrace.sim.worker import Report


class FleetShape(NamedTuple):
    """What a policy knows of the fleet from the beginning: the number of workers, and their tiers beyond their memory.
    The first `num_prefill` workers are reserved for long prompts, and the others for the rest; 0: all do both."""

    num_workers: int
    tiers: TierSettings = TierSettings()
    num_prefill: int = 0


class Choice(NamedTuple):
    """A chosen worker, with the tokens and blocks of the prompt that are expected to be cached there. `prediction` is
    the index entry for the prompt's blocks. `placement` is the result of the real policy, if it was used."""

    worker: int
    cached_tokens: int = 0
    cached_blocks: int = 0
    prediction: Run | None = None
    placement: Placement | None = None


class FleetView:
    """One router's knowledge of the workers, which are numbered from 0: what reports have told all routers, its own
    bookings, and what workers told it when they returned requests."""

    def __init__(self, reported: ReportedFleet) -> None:
        self.block_size = reported.block_size
        self.reported = reported
        self.bookings = [Bookings() for _ in range(reported.num_workers)]
        self._answers: dict[int, _Answer] = {}
        self._booked: set[int] = set()
        """Workers that may have pending bookings."""
        self._worker_ids = [str(worker) for worker in range(reported.num_workers)]
        self._numbers = {worker_id: number for number, worker_id in enumerate(self._worker_ids)}

    def booked(self, worker: int) -> None:
        """Note that a request was booked at this worker."""
        self._booked.add(worker)

    def answered(self, worker: int, load: LoadReport, version: int) -> None:
        """Store the load that a worker told this router directly. It replaces the reported load."""
        reported = self.reported
        before = self._answers.get(worker)
        if version >= max(reported.versions[worker], 0 if before is None else before.version):
            self._answers[worker] = _Answer(load, version, reported.num_read[worker])

    def load(self, worker: int) -> LoadReport:
        """The latest load of this worker that the router knows."""
        answer = self._answers.get(worker)
        if answer is not None:
            reported = self.reported
            if reported.num_read[worker] == answer.num_read or reported.versions[worker] < answer.version:
                return answer.load
            del self._answers[worker]
        return self.reported.load(worker)

    def candidates(self, workers: Places | None = None) -> Candidates:
        """These workers as candidates for the policy; None for all."""
        values = self.reported.columns()
        self._booked = {worker for worker in self._booked if self.bookings[worker].num_pending}
        for worker in self._booked | self._answers.keys():
            own = Candidate.of(self._worker_ids[worker], self.load(worker), self.block_size, self.bookings[worker])
            values[:, worker] = own.columns()
        if workers is None:
            return Candidates(self._worker_ids, self._numbers, Columns(*values))
        names = [self._worker_ids[worker] for worker in workers]
        numbers = {name: number for number, name in enumerate(names)}
        return Candidates(names, numbers, Columns(*values.take(workers, axis=1)))

    def num_requests(self, worker: int) -> int:
        """How many requests a worker has, by its last report and the router's bookings since."""
        load = self.load(worker)
        return load.num_running + load.num_waiting + load.num_arrived + self.bookings[worker].num_pending


class _Answer(NamedTuple):
    """What a worker told one router, and how many reports it had sent to all before."""

    load: LoadReport
    version: int
    num_read: int


class Policy(Protocol):
    """Chooses workers on behalf of one router."""

    def choose(self, job: Job, view: FleetView, now_s: float) -> Choice:
        """Choose a worker for `job`, which arrives at `now_s` (virtual seconds), by what the router knows of the
        workers."""
        ...

    def observe(self, worker: int, report: Report) -> None:
        """Learn from the `report` of a worker. The fleet's index already has its blocks."""
        ...

    def ended(self, job: Job) -> None:
        """Forget what was noted for a request, because its answer is complete."""
        ...

    def not_taken(self, choice: Choice) -> None:
        """Take back what was noted for this choice, because the worker had more work than the router believed and
        returned the request."""
        ...
