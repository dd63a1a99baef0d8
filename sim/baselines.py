"""Baseline policies for comparison. They ignore which blocks workers have. Pure."""

from __future__ import annotations

import bisect
import random
from hashlib import sha256

from headrace.sim.trace import Job
from headrace.sim.view import Choice, FleetShape, FleetView
from headrace.sim.worker import Report

# Points per worker on the ring of the consistent hash.
_RING_POINTS = 100


class _Blind:
    """A policy that ignores blocks."""

    def observe(self, worker: int, report: Report) -> None:
        """Do nothing: reports are ignored."""

    def ended(self, job: Job) -> None:
        """Do nothing: ends of answers are ignored."""

    def not_taken(self, choice: Choice) -> None:
        """Do nothing: returned requests are ignored."""


class RandomPolicy(_Blind):
    """Chooses a worker at random, without regard to load and cache."""

    def __init__(self, shape: FleetShape, rng: random.Random) -> None:
        self._num_workers = shape.num_workers
        self._rng = rng

    def choose(self, job: Job, view: FleetView, now_s: float) -> Choice:
        """See Policy."""
        return Choice(self._rng.randrange(self._num_workers))


class RoundRobinPolicy(_Blind):
    """Chooses the workers in turn. Each router starts at a random one."""

    def __init__(self, shape: FleetShape, rng: random.Random) -> None:
        self._num_workers = shape.num_workers
        self._next = rng.randrange(shape.num_workers)

    def choose(self, job: Job, view: FleetView, now_s: float) -> Choice:
        """See Policy."""
        worker, self._next = self._next, (self._next + 1) % self._num_workers
        return Choice(worker)


class LeastLoadedPolicy(_Blind):
    """Chooses the worker with the fewest known requests, including the router's own bookings. Ties are broken at
    random."""

    def __init__(self, shape: FleetShape, rng: random.Random) -> None:
        self._num_workers = shape.num_workers
        self._rng = rng

    def choose(self, job: Job, view: FleetView, now_s: float) -> Choice:
        """See Policy."""
        counts = [view.num_requests(worker) for worker in range(self._num_workers)]
        least = min(counts)
        return Choice(self._rng.choice([worker for worker, count in enumerate(counts) if count == least]))


class ConsistentHashingPolicy(_Blind):
    """Consistent hashing of the prompt's first segment (Karger et al. 1997), like a load balancer that hashes a session
    or the beginning of the prompt."""

    def __init__(self, shape: FleetShape, rng: random.Random) -> None:
        self._ring = sorted(
            (_ring_point(f"worker {worker} {point}"), worker)
            for worker in range(shape.num_workers)
            for point in range(_RING_POINTS)
        )

    def choose(self, job: Job, view: FleetView, now_s: float) -> Choice:
        """See Policy."""
        position = bisect.bisect(self._ring, (_ring_point(f"prompt {job.segments[0][0]}"), -1))
        return Choice(self._ring[position % len(self._ring)][1])


def _ring_point(name: str) -> int:
    return int.from_bytes(sha256(name.encode()).digest()[:8], "little")
