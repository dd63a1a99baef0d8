"""A simulated router's knowledge of the fleet, and the interface of a policy. Pure: the caller passes the time."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from headrace.protos.load_report import LoadReport
from headrace.router.placement.bookings import Bookings
from headrace.router.placement.candidates import Candidate, Candidates, CandidateTable, Places
from headrace.router.placement.policy import Placement
from headrace.router.placement.predictions import Run
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
    """One router's knowledge of the workers, which are numbered from 0."""

    def __init__(self, num_workers: int, block_size: int) -> None:
        self.block_size = block_size
        self.loads = [LoadReport()] * num_workers
        self.bookings = [Bookings() for _ in range(num_workers)]
        self._worker_ids = [str(worker) for worker in range(num_workers)]
        self._numbers = {worker_id: number for number, worker_id in enumerate(self._worker_ids)}
        self._all = np.arange(num_workers)
        self._table = CandidateTable()
        for worker in range(num_workers):
            self.changed(worker)

    def changed(self, worker: int) -> None:
        """Note that the load or the bookings of this worker have changed."""
        load = self.loads[worker]
        bookings = self.bookings[worker]
        self._table.put(worker, Candidate.of(self._worker_ids[worker], load, self.block_size, bookings))

    def candidates(self, workers: Places | None = None) -> Candidates:
        """These workers as candidates for the policy; None for all."""
        if workers is None:
            return Candidates(self._worker_ids, self._numbers, self._table.at(self._all))
        names = [self._worker_ids[worker] for worker in workers]
        return Candidates(names, {name: number for number, name in enumerate(names)}, self._table.at(workers))

    def num_requests(self, worker: int) -> int:
        """How many requests a worker has, by its last report and the router's bookings since."""
        load = self.loads[worker]
        return load.num_running + load.num_waiting + load.num_arrived + self.bookings[worker].num_pending


class Policy(Protocol):
    """Chooses workers on behalf of one router."""

    def choose(self, job: Job, view: FleetView, now_s: float) -> Choice:
        """Choose a worker for `job`, which arrives at `now_s` (virtual seconds), by what the router knows of the
        workers."""
        ...

    def observe(self, worker: int, report: Report) -> None:
        """Learn from the `report` of a worker which blocks it has stored and evicted."""
        ...

    def ended(self, job: Job) -> None:
        """Forget what was noted for a request, because its answer is complete."""
        ...

    def not_taken(self, choice: Choice) -> None:
        """Take back what was noted for this choice, because the worker had more work than the router believed and
        returned the request."""
        ...
