"""The simulation's events: arrivals at routers, steps of workers, reports in transit.

    arrival -> router.place -> worker.take -> step ... step -> first token -> ... -> last token
                   ^   ^           |           |
                   |   +-- 2 ms ---+ given back, because the worker has more work than the router believed
                   +----- report_delay --------+   at most one message every 20 ms from each worker

Routers share no state. A request and each token take `hop_s` between client and router, and between router and worker.
Reports take `report_delay_s`, and other messages no time, except for requests that workers give back. All random
numbers come from one seed.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from headrace.protos.inference_pb2 import Belief
from headrace.router.placement.policy import MAX_GIVEN_BACK
from headrace.sim.admission import SimulatedAdmission
from headrace.sim.clock import VirtualClock
from headrace.sim.decode_run import DecodeRun
from headrace.sim.images import EncodeHosts, Events, encoder_of
from headrace.sim.process_cost import NOTHING, ProcessCost, RouterTime
from headrace.sim.reports import WATCH_INTERVAL_S, ReportedFleet
from headrace.sim.router import PlacedJob, PolicyKind, SimulatedRouter
from headrace.sim.tiers import DiskSlots, Timer
from headrace.sim.trace import Job
from headrace.sim.view import FleetShape
from headrace.sim.worker import Report, SimulatedWorker, WorkerSettings
from headrace.worker.request.request import Request

# The delay before a returned request is placed again.
GIVEN_BACK_S = 0.002


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """The simulated fleet. If `concurrency` is set, the trace's arrival times are ignored: that many requests are
    always in flight, and when one ends, the next one of the trace arrives."""

    worker: WorkerSettings
    num_workers: int = 16
    num_routers: int = 1
    report_delay_s: float = 0.02
    hop_s: float = 0.0
    """Time of a message from the client to a router, from there to a worker, and back."""
    process_cost: ProcessCost = NOTHING
    """What routers take for requests, reports and tokens. Its `hop_ms` is not used."""
    seed: int = 1
    num_prefill: int = 0
    """This many workers, the first ones, are reserved for long prompts, whose answers continue at the others; 0: all do
    both."""
    concurrency: int | None = None
    workers_per_host: int = 1
    slowdown: float = 0.0
    """Each other busy worker of a host makes a step longer by this share of its time. Without `skips_steps` of the
    workers, because how busy they are changes from step to step."""


@dataclass(slots=True)
class JobRecord:
    """The result of a request. Times are the client's, in seconds, and negative until they are known."""

    job: Job
    worker: int
    arrived_s: float
    first_token_s: float = -1.0
    ended_s: float = -1.0
    cached_tokens: int = 0
    disk_tokens: int = 0
    """The number of cached tokens that were read from the disk for the request."""
    peer_tokens: int = 0
    """The number of cached tokens that came from other workers."""
    num_tokens: int = 0
    prefill_worker: int = -1
    """The worker that computed its prompt, if the answer continued at another one."""
    num_given_back: int = 0
    is_refused: bool = False
    """Whether router or worker refused it, because it would have waited too long. It then has no tokens."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All requests of a simulation in order of arrival, and each worker's busy seconds until the last arrival. The time
    after it is excluded, because it reflects the end of the trace rather than the policy."""

    records: Sequence[JobRecord]
    busy_s: Sequence[float]
    num_steps: int
    num_preemptions: int
    num_images_encoded: int = 0


class Simulation:
    """One run of a trace over a fleet with one policy. `on_end` is called whenever a request ends."""

    def __init__(
        self,
        jobs: Sequence[Job],
        kind: PolicyKind,
        settings: FleetSettings,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        rng = random.Random(settings.seed)
        count = settings.num_workers
        exact = kind.is_exact
        self._jobs = deque(jobs)
        self._num_jobs = len(jobs)
        self._settings = settings
        self._on_end = on_end
        self._rng = rng
        self._is_exact = exact
        self.clock = VirtualClock()
        tiers = settings.worker.tiers
        block_size = settings.worker.block_size
        self._shared_disk = DiskSlots(tiers.disk_tokens // block_size) if tiers.is_disk_shared else None
        images = settings.worker.images
        self.encode_hosts = EncodeHosts(images) if images is not None and images.num_hosts else None
        self.workers = [self._worker(number) for number in range(count)]
        num_routers = 1 if exact else settings.num_routers
        shape = FleetShape(count, tiers, settings.num_prefill)
        delay_s, interval_s = (0.0, 0.0) if exact else (settings.report_delay_s, WATCH_INTERVAL_S)
        self._reported = ReportedFleet(count, block_size, delay_s, interval_s, self._observe)
        self.routers = [
            SimulatedRouter(kind.make(shape, random.Random(rng.random())), self._reported, rank, num_routers)
            for rank in range(num_routers)
        ]
        max_wait_s = settings.worker.max_wait_s
        self._admissions = [
            SimulatedAdmission(router, max_wait_s, partial(self._admit, router), self._refuse)
            for router in (self.routers if math.isfinite(max_wait_s) else ())
        ]
        self._times = [RouterTime(settings.process_cost, count) for _ in self.routers]
        self._records: list[JobRecord] = []
        self._busy_s: list[float] = []
        self._followers: dict[int, list[Job]] = {}
        self._in_flight: dict[str, tuple[JobRecord, PlacedJob, SimulatedRouter]] = {}

    def run(self) -> Outcome:
        """Run until the last request ends. Asserts that every request ended exactly once and none is left."""
        if self._settings.concurrency is None:
            for job in self._jobs:
                if job.follows is not None:
                    self._followers.setdefault(job.follows, []).append(job)
                    continue
                self.clock.at(job.arrival_s, partial(self._arrive, job))
        else:
            for _ in range(min(self._settings.concurrency, len(self._jobs))):
                self._arrive(self._jobs.popleft())
        self.clock.run()
        self.check()
        assert not self._in_flight, "a request has not ended"
        return Outcome(
            self._records,
            self._busy_s,
            sum(worker.num_steps for worker in self.workers),
            sum(worker.scheduler.stats.preemptions for worker in self.workers),
            sum(worker.encoder.num_encoded for worker in self.workers if worker.encoder is not None),
        )

    def _worker(self, number: int) -> SimulatedWorker:
        def now_s() -> float:
            return self.clock.now_s

        def on_ended() -> None:
            self._cut(number)
            self._wake(number)

        timer = Timer(now_s, self.clock.at, partial(self._wake, number))
        images = self._settings.worker.images
        events = Events(now_s, self.clock.at, on_ended)
        return SimulatedWorker(
            self._settings.worker,
            now_s,
            reports_every_step=self._is_exact,
            timer=timer,
            cache_of=lambda address: self.workers[int(address)].scheduler.kv_cache,
            shared_disk=self._shared_disk,
            encoder=None if images is None else encoder_of(images, events, self.encode_hosts),
        )

    def check(self) -> None:
        """Assert the invariants of workers and bookings."""
        for worker in self.workers:
            worker.check()
        for router in self.routers:
            router.check()
        assert sum(router.num_in_flight for router in self.routers) == len(self._in_flight)

    def _arrive(self, job: Job) -> None:
        now_s = self.clock.now_s
        router = self._rng.choice(self.routers)
        record = JobRecord(job, -1, now_s)
        self._records.append(record)
        if len(self._records) == self._num_jobs:
            self._busy_s = [worker.busy_s for worker in self.workers]
        if self._admissions:
            self._after_hop(partial(self._come, len(self._records) - 1, self.routers.index(router)))
        else:
            self._after_hop(partial(self._place, record, router))

    def _come(self, number: int, rank: int) -> None:
        """Hand a request that has arrived at a router to its admission control."""
        admission = self._admissions[rank]
        had_waiting = admission.has_waiting
        admission.arrived(number, self.clock.now_s)
        if admission.has_waiting and not had_waiting:
            self.clock.at(self.clock.now_s + WATCH_INTERVAL_S, partial(self._look, admission))

    def _look(self, admission: SimulatedAdmission) -> None:
        admission.look(self.clock.now_s)
        if admission.has_waiting:
            self.clock.at(self.clock.now_s + WATCH_INTERVAL_S, partial(self._look, admission))

    def _admit(self, router: SimulatedRouter, number: int) -> None:
        self._place(self._records[number], router)

    def _refuse(self, number: int) -> None:
        """Refuse a request at a router."""
        record = self._records[number]
        record.is_refused = True
        record.ended_s = self.clock.now_s + self._settings.hop_s
        self._end_of(record)

    def _end_refused(self, number: int) -> None:
        """End the requests that a worker has refused."""
        for output in self.workers[number].take_refused():
            record, _, _ = self._in_flight[output.request.request_id]
            record.is_refused = True
            record.ended_s = self.clock.now_s + 2 * self._settings.hop_s
            self._after_hop(partial(self._end, output.request.request_id))

    def _after_hop(self, action: Callable[[], None]) -> None:
        """Call `action` when a message has arrived at the next process."""
        if self._settings.hop_s:
            self.clock.at(self.clock.now_s + self._settings.hop_s, action)
        else:
            action()

    def _place(self, record: JobRecord, router: SimulatedRouter) -> None:
        """Place a request that is at a router, after the router's thread has reached it."""
        if self._settings.process_cost is NOTHING:
            self._decide(record, router)
            return
        now_s = self.clock.now_s
        self._reported.advance(now_s)
        done_s = self._times[router.rank].request_done_s(now_s, self._reported.num_messages)
        self.clock.at(done_s, partial(self._decide, record, router))

    def _decide(self, record: JobRecord, router: SimulatedRouter) -> None:
        """Place a request at a worker."""
        job = record.job
        now_s = self.clock.now_s
        source = record.prefill_worker if record.prefill_worker >= 0 else None
        placed = router.place(job, now_s, source)
        belief = router.belief(placed, may_be_given_back=record.num_given_back < MAX_GIVEN_BACK)
        self._after_hop(partial(self._take, record, router, placed, belief))

    def _take(self, record: JobRecord, router: SimulatedRouter, placed: PlacedJob, belief: Belief) -> None:
        """Give a request to its worker. If the worker returns it, the router places it again."""
        job = record.job
        now_s = self.clock.now_s
        worker = self.workers[placed.worker]
        self._cut(placed.worker)
        report = worker.contradiction(belief)
        if report is not None:
            record.num_given_back += 1
            router.given_back(placed, report, now_s)
            self.clock.at(now_s + GIVEN_BACK_S, partial(self._place, record, router))
            return
        record.worker = placed.worker
        request = job.request(record.arrived_s, record.num_tokens)
        if placed.choice.placement is not None and placed.choice.placement.source:
            request.kv_source = placed.choice.placement.source
            request.num_source_tokens = placed.choice.cached_tokens
        self._in_flight[request.request_id] = (record, placed, router)
        self._reported.send(placed.worker, worker.take(request, job, belief), now_s)
        if not worker.is_stepping:
            self._step(placed.worker)

    def _step(self, number: int) -> None:
        worker = self.workers[number]
        run = worker.begin_run()
        if run is not None:
            self._reported.follow(number, run)
            self.clock.at(run.end_s, partial(self._end_run, number, run))
            return
        milliseconds = worker.begin_step(self._stretch(number))
        self._end_refused(number)
        if milliseconds is not None:
            self.clock.at(self.clock.now_s + milliseconds / 1000, partial(self._end_step, number))
            return
        if worker.pause_s:
            self.clock.at(self.clock.now_s + worker.pause_s, partial(self._wake, number))
        if (news := worker.take_news(self.clock.now_s)) is not None:
            self._reported.send(number, news, self.clock.now_s)

    def _wake(self, number: int) -> None:
        """Let a worker continue: something may have changed for it, or a pause has ended."""
        if not self.workers[number].is_stepping:
            self._step(number)

    def _end_run(self, number: int, run: DecodeRun) -> None:
        if run.is_cut:
            return
        self.workers[number].end_run()
        self._reported.ended(number, run)
        self._step(number)

    def _cut(self, number: int) -> None:
        """Cut the worker's run of steps, because something happens there. The current step becomes a separate step."""
        worker = self.workers[number]
        run = worker.run
        end_s = worker.cut_run()
        if run is not None and end_s is not None:
            self._reported.ended(number, run)
            self.clock.at(end_s, partial(self._end_step, number))

    def _stretch(self, number: int) -> float:
        """How many times as long a step takes that this worker begins now, because other workers of its host compute
        too."""
        size = self._settings.workers_per_host
        if size == 1 or not self._settings.slowdown:
            return 1.0
        first = number - number % size
        busy = sum(worker.is_stepping for worker in self.workers[first : first + size])
        return 1.0 + self._settings.slowdown * busy

    def _end_step(self, number: int) -> None:
        now_s = self.clock.now_s
        hands_on = number < self._settings.num_prefill
        outputs, report = self.workers[number].end_step(now_s, hands_on=hands_on)
        at_client_s = now_s + 2 * self._settings.hop_s
        for output in outputs:
            record, placed, router = self._in_flight[output.request.request_id]
            if record.num_tokens == 0:
                record.first_token_s = at_client_s
                self._after_hop(partial(router.first_token, placed))
            record.num_tokens = output.start_pos + len(output.token_ids)
            if output.is_last:
                assert output.error is None, "a request has failed"
                assert record.ended_s < 0, "a request has ended twice"
                record.ended_s = at_client_s
                self._count_cached(record, output.request)
                self._after_hop(partial(self._end, output.request.request_id))
            elif hands_on:
                self._count_cached(record, output.request)
                record.prefill_worker = number
                self._after_hop(partial(self._move, output.request.request_id))
        if report is not None:
            self._reported.send(number, report, now_s)
        if not self.workers[number].is_stepping:
            self._step(number)

    def _end(self, request_id: str) -> None:
        """End a request at its router, which has received the last token."""
        record, placed, router = self._in_flight.pop(request_id)
        self._times[router.rank].tokens(record.num_tokens)
        if record.is_refused:
            router.moved(placed)
        else:
            router.ended(placed)
        self._end_of(record)

    def _end_of(self, record: JobRecord) -> None:
        """End a request at its client."""
        self._on_end()
        for job in self._followers.get(record.job.number, ()):
            self.clock.at(record.ended_s + job.think_s, partial(self._arrive, job))
        if self._settings.concurrency is not None and self._jobs:
            self._after_hop(partial(self._arrive, self._jobs.popleft()))

    def _move(self, request_id: str) -> None:
        """Move a request to another worker, because its router has received the first token and the answer continues
        elsewhere."""
        record, placed, router = self._in_flight.pop(request_id)
        router.moved(placed)
        self._place(record, router)

    @staticmethod
    def _count_cached(record: JobRecord, request: Request) -> None:
        """Record the cached tokens of a prompt at the worker that computed it."""
        if record.prefill_worker < 0:
            record.cached_tokens = request.num_cached_tokens
            record.disk_tokens = min(request.num_disk_tokens, record.cached_tokens)
            record.peer_tokens = min(request.num_peer_tokens, record.cached_tokens)

    def _observe(self, worker: int, report: Report) -> None:
        """Give a report to all routers."""
        if report.stored:
            for router in self.routers:
                router.observe(worker, report)
        for placed in report.placed:
            self.routers[placed.router].named(worker, placed.placement_id)
