"""Simulated routers: each sees the fleet through delayed reports and its own bookings, and chooses by a policy.

`HeadracePolicy` is the real index and the real policy; the others are what it is compared with. A policy has a state of
its own for each router and is not told anything that a real router would not know, but for the two oracles, whose
reports come without delay after every step and whose predictions never end: their index is the truth.

Pure: the caller keeps time.
"""

from __future__ import annotations

import bisect
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple, Protocol

import msgspec

from headrace.router.answer_lengths import AnswerLengths
from headrace.router.bookings import Booking, Bookings
from headrace.router.policy import Candidate, LoadReport, RequestFacts, place
from headrace.router.prefix_index import PrefixIndex
from headrace.sim.trace import Job
from headrace.sim.worker import Report

_MAX_INDEX_ENTRIES = 4_000_000
_MAX_PREDICTED_BLOCKS = 500_000
_PREDICTION_TTL_S = 30.0
# Points of each worker on the ring of consistent hashing.
_RING_POINTS = 100


class Choice(NamedTuple):
    """A worker and how many tokens and blocks of the prompt are taken to be cached there."""

    worker: int
    cached_tokens: int = 0
    cached_blocks: int = 0


class FleetView:
    """What one router knows of the workers, by their number."""

    def __init__(self, num_workers: int, block_size: int) -> None:
        self.block_size = block_size
        self.loads = [LoadReport()] * num_workers
        self.bookings = [Bookings() for _ in range(num_workers)]
        self._candidates: list[Candidate | None] = [None] * num_workers

    def changed(self, worker: int) -> None:
        """Load or bookings of this worker are not what they were."""
        self._candidates[worker] = None

    def candidates(self) -> list[Candidate]:
        """All workers for the policy."""
        return [known or self._made(worker) for worker, known in enumerate(self._candidates)]

    def num_requests(self, worker: int) -> int:
        """Requests there as far as known."""
        load = self.loads[worker]
        return load.num_running + load.num_waiting + self.bookings[worker].num_pending

    def _made(self, worker: int) -> Candidate:
        bookings = self.bookings[worker]
        candidate = self._candidates[worker] = Candidate(
            worker_id=str(worker),
            load=self.loads[worker],
            block_size=self.block_size,
            num_booked_requests=bookings.num_pending,
            num_booked_tokens=bookings.num_tokens,
            num_booked_blocks=bookings.num_blocks,
        )
        return candidate


class Policy(Protocol):
    """Chooses workers for one router."""

    def choose(self, job: Job, view: FleetView, now_s: float) -> Choice:
        """The worker for a request."""
        ...

    def observe(self, worker: int, report: Report) -> None:
        """A worker's blocks changed."""
        ...

    def ended(self, job: Job) -> None:
        """A request ended."""
        ...


class _Blind:
    """A policy that does not look at blocks."""

    def observe(self, worker: int, report: Report) -> None:
        """Nothing to note."""

    def ended(self, job: Job) -> None:
        """Nothing to note."""


class RandomPolicy(_Blind):
    """Any worker."""

    def __init__(self, num_workers: int, rng: random.Random) -> None:
        self._num_workers, self._rng = num_workers, rng

    def choose(self, job: Job, view: FleetView, now_s: float) -> Choice:
        """See Policy."""
        return Choice(self._rng.randrange(self._num_workers))


class RoundRobinPolicy(_Blind):
    """One after the other; each router begins somewhere else."""

    def __init__(self, num_workers: int, rng: random.Random) -> None:
        self._num_workers, self._next = num_workers, rng.randrange(num_workers)

    def choose(self, job: Job, view: FleetView, now_s: float) -> Choice:
        """See Policy."""
        worker, self._next = self._next, (self._next + 1) % self._num_workers
        return Choice(worker)


class LeastLoadedPolicy(_Blind):
    """The fewest requests as far as known, own bookings included; ties at random."""

    def __init__(self, num_workers: int, rng: random.Random) -> None:
        self._num_workers, self._rng = num_workers, rng

    def choose(self, job: Job, view: FleetView, now_s: float) -> Choice:
        """See Policy."""
        counts = [view.num_requests(worker) for worker in range(self._num_workers)]
        least = min(counts)
        return Choice(self._rng.choice([worker for worker, count in enumerate(counts) if count == least]))


class ConsistentHashingPolicy(_Blind):
    """The worker behind the hash of the prompt's first segment on a ring (Karger et al. 1997): what a load balancer
    does that hashes a session or the beginning of the prompt."""

    def __init__(self, num_workers: int, rng: random.Random) -> None:
        self._ring = sorted(
            (_ring_point(f"worker {worker} {point}"), worker)
            for worker in range(num_workers)
            for point in range(_RING_POINTS)
        )

    def choose(self, job: Job, view: FleetView, now_s: float) -> Choice:
        """See Policy."""
        position = bisect.bisect(self._ring, (_ring_point(f"prompt {job.segments[0][0]}"), -1))
        return Choice(self._ring[position % len(self._ring)][1])


def _ring_point(name: str) -> int:
    return int.from_bytes(sha256(name.encode()).digest()[:8], "little")


class _Indexed:
    """Keeps a prefix index as a router does."""

    def __init__(self, num_workers: int, rng: random.Random, prediction_ttl_s: float = _PREDICTION_TTL_S) -> None:
        self.index = PrefixIndex(_MAX_INDEX_ENTRIES, _MAX_PREDICTED_BLOCKS, prediction_ttl_s)
        self._names = [str(worker) for worker in range(num_workers)]
        for name in self._names:
            self.index.add_worker(name)
        self._rng = rng
        self._answer_lengths = AnswerLengths()

    def ended(self, job: Job) -> None:
        """Learn how long answers are."""
        self._answer_lengths.ended("", job.num_output_tokens)

    def observe(self, worker: int, report: Report) -> None:
        """Apply the events."""
        self.index.evict(self._names[worker], report.evicted)
        self.index.store(self._names[worker], report.stored)

    def _chosen(self, job: Job, worker_id: str, cached_tokens: int, cached_blocks: int, now_s: float) -> Choice:
        self.index.predict(worker_id, job.hashes, cached_blocks, now_s)
        return Choice(int(worker_id), cached_tokens, cached_blocks)


class HeadracePolicy(_Indexed):
    """The product's: see headrace.router.policy."""

    def choose(self, job: Job, view: FleetView, now_s: float) -> Choice:
        """See Policy."""
        self.index.expire(now_s)
        matched = self.index.match(job.hashes, self._names)
        facts = RequestFacts(job.num_prompt_tokens)  # how long the answer will be is known to nobody
        priors = self._answer_lengths.priors("")
        placement = place(facts, view.candidates(), matched, now_s, self._rng, priors=priors)
        assert placement is not None, "every worker takes requests"
        worker_id = placement.worker_id
        return self._chosen(job, worker_id, placement.predicted_cached_tokens, matched[worker_id], now_s)


class LongestPrefixPolicy(_Indexed):
    """Always where most of the prompt is cached, however loaded; of equals the one with the fewest requests."""

    def choose(self, job: Job, view: FleetView, now_s: float) -> Choice:
        """See Policy."""
        matched = self.index.match(job.hashes, self._names)
        self._rng.shuffle(order := list(range(len(self._names))))
        worker = min(order, key=lambda worker: (-matched[str(worker)], view.num_requests(worker)))
        blocks = matched[str(worker)]
        return self._chosen(job, str(worker), min(blocks * view.block_size, job.num_prompt_tokens - 1), blocks, now_s)


def _exact(policy: type[_Indexed]) -> Callable[[int, random.Random], Policy]:
    def make(num_workers: int, rng: random.Random) -> Policy:
        made: Policy = policy(num_workers, rng, float("inf"))  # type: ignore[assignment]
        return made

    return make


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """A policy by name. An exact one is told everything at once and is alone in front of the fleet."""

    make: Callable[[int, random.Random], Policy]
    is_exact: bool = False


POLICIES = {
    "headrace": PolicyKind(HeadracePolicy),
    "oracle": PolicyKind(_exact(HeadracePolicy), is_exact=True),
    "longest-prefix": PolicyKind(_exact(LongestPrefixPolicy), is_exact=True),
    "least-loaded": PolicyKind(LeastLoadedPolicy),
    "round-robin": PolicyKind(RoundRobinPolicy),
    "consistent-hashing": PolicyKind(ConsistentHashingPolicy),
    "random": PolicyKind(RandomPolicy),
}


class PlacedJob(NamedTuple):
    """A job at its worker, with what has to be released."""

    job: Job
    worker: int
    booking: Booking


class SimulatedRouter:
    """One router: a view, a policy and bookings. An exact one is alone in front of the fleet and told all at once."""

    def __init__(self, policy: Policy, num_workers: int, block_size: int, *, is_exact: bool) -> None:
        self.view = FleetView(num_workers, block_size)
        self._policy = policy
        self._is_exact = is_exact
        self._not_taken: list[deque[Booking]] = [deque() for _ in range(num_workers)]
        self._num_taken = [0] * num_workers

    def place(self, job: Job, now_s: float) -> PlacedJob:
        """Choose and book, as Fleet.place does."""
        choice = self._policy.choose(job, self.view, now_s)
        num_tokens = job.num_prompt_tokens - choice.cached_tokens
        bookings = self.view.bookings[choice.worker]
        booking = bookings.book(num_tokens, len(job.hashes) + 1 - choice.cached_blocks, now_s)
        self.view.changed(choice.worker)
        if self._is_exact:
            self._not_taken[choice.worker].append(booking)
        return PlacedJob(job, choice.worker, booking)

    def observe(self, worker: int, reports: Sequence[Report], now_s: float) -> None:
        """A message of a worker's Watch came in."""
        for report in reports:
            self._policy.observe(worker, report)
        self.view.loads[worker] = msgspec.structs.replace(reports[-1].load, received_at_s=now_s)
        if self._is_exact:
            self._settle_taken(worker, reports[-1].taken)
        else:
            self.view.bookings[worker].settle_shown(now_s)
        self.view.changed(worker)

    def _settle_taken(self, worker: int, taken: int) -> None:
        """The report shows the first `taken` requests that were ever placed there."""
        while self._num_taken[worker] < taken:
            self.view.bookings[worker].settle(self._not_taken[worker].popleft())
            self._num_taken[worker] += 1

    def first_token(self, placed: PlacedJob) -> None:
        """The first token of a request passed."""
        if self.view.bookings[placed.worker].settle(placed.booking):
            self.view.changed(placed.worker)

    def ended(self, placed: PlacedJob) -> None:
        """A request ended."""
        self._policy.ended(placed.job)
        self.view.bookings[placed.worker].release(placed.booking)
        self.view.changed(placed.worker)

    @property
    def num_in_flight(self) -> int:
        """Requests placed and not ended."""
        return sum(bookings.num_in_flight for bookings in self.view.bookings)

    def check(self) -> None:
        """Assert the invariants of the bookings."""
        for bookings in self.view.bookings:
            bookings.check()
