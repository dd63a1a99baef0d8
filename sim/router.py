"""Simulated routers. Each one knows the fleet by delayed reports and its own bookings, and uses a policy to choose.

`HeadracePolicy` is the real index and policy; the others are baselines. Each router has its own policy object. A policy
has only the information of a real router. The two oracles are exceptions: they get a report after every step without
delay, and their predictions do not expire, so their index is always correct.

Pure: the caller passes the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.protos.inference_pb2 import Belief
from headrace.router.placement import policy as placement_policy
from headrace.router.placement.answer_lengths import AnswerLengths
from headrace.router.placement.bookings import Booking
from headrace.router.placement.candidates import Places
from headrace.router.placement.policy import LONG_PROMPT_MS, RequestFacts, belief_message, is_long, predicted_wait_ms
from headrace.router.placement.predictions import Predictions
from headrace.router.placement.prefix_index import Depths
from headrace.router.placement.rates import Priors
from headrace.router.placement.transfers import BlockFacts, Transfers
from headrace.sim.baselines import ConsistentHashingPolicy, LeastLoadedPolicy, RandomPolicy, RoundRobinPolicy
from headrace.sim.reports import ReportedFleet
from headrace.sim.trace import Job
from headrace.sim.view import Choice, FleetShape, FleetView, Policy
from headrace.sim.worker import Report

_MAX_PREDICTED_BLOCKS = 500_000
_PREDICTION_TTL_S = 30.0


class _Indexed:
    """A policy with a router's prefix index: the entries that reports have made, which all routers know, and its own
    predictions."""

    def __init__(self, shape: FleetShape, rng: random.Random, prediction_ttl_s: float = _PREDICTION_TTL_S) -> None:
        self._predictions = Predictions(_MAX_PREDICTED_BLOCKS, prediction_ttl_s)
        self._shape = shape
        self._names = [str(worker) for worker in range(shape.num_workers)]
        self._rng = rng
        self._answer_lengths = AnswerLengths()

    def ended(self, job: Job) -> None:
        """Learn the length of an answer."""
        self._answer_lengths.ended("", job.num_output_tokens)

    def observe(self, worker: int, report: Report) -> None:
        """Confirm predictions."""
        noted = self._predictions.noted
        for block_hash in report.stored:
            if block_hash in noted:
                self._predictions.confirm(1 << worker, block_hash)

    def not_taken(self, choice: Choice) -> None:
        """Withdraw the prediction for the request's blocks."""
        if choice.prediction is not None:
            self._predictions.withdraw(choice.prediction)

    def _depths(self, job: Job, view: FleetView) -> Depths:
        """The number of the prompt's blocks that can be found at each worker. Workers have slots in their order."""
        return view.reported.index.depths(job.hashes, self._predictions)[: len(self._names)]

    def _chosen(self, job: Job, worker: int, cached_tokens: int, cached_blocks: int, now_s: float) -> Choice:
        prediction = self._predictions.add(1 << worker, job.hashes, cached_blocks, now_s)
        return Choice(worker, cached_tokens, cached_blocks, prediction)


class HeadracePolicy(_Indexed):
    """Decides as a router does, with its index, transfers and roles. `policy` is that of headrace.router.placement."""

    def __init__(
        self,
        shape: FleetShape,
        rng: random.Random,
        prediction_ttl_s: float = _PREDICTION_TTL_S,
        policy: placement_policy.Policy = placement_policy.place,
    ) -> None:
        super().__init__(shape, rng, prediction_ttl_s)
        self._policy = policy

    def choose(self, job: Job, view: FleetView, now_s: float) -> Choice:
        """See Policy."""
        return self._choose(job, view, now_s, None)

    def choose_next(self, job: Job, view: FleetView, now_s: float, source: int) -> Choice:
        """Choose a worker for the rest of an answer. `source` has computed the prompt and generated the first token."""
        return self._choose(job, view, now_s, source)

    def _choose(self, job: Job, view: FleetView, now_s: float, source: int | None) -> Choice:
        self._predictions.expire(now_s)
        matched = self._depths(job, view)
        priors = self._answer_lengths.priors("")
        workers = self._set_aside(job, view, matched, priors, source) if self._shape.num_prefill else None
        here = matched if workers is None else matched[workers]
        # The length of the answer is unknown.
        facts = RequestFacts(job.num_prompt_tokens + (source is not None), image_places=job.image_places)
        transfers = self._transfers(job, view, here, workers, source) if self._shape.tiers.are_any else None
        candidates = view.candidates(workers)
        placement = self._policy(facts, candidates, here, now_s, self._rng, priors=priors, transfers=transfers)
        assert placement is not None, "every worker takes requests"
        num_blocks = int(here[placement.number])
        choice = self._chosen(job, int(placement.worker_id), placement.predicted_cached_tokens, num_blocks, now_s)
        return choice._replace(placement=placement)

    def _set_aside(self, job: Job, view: FleetView, matched: Depths, priors: Priors, source: int | None) -> Places:
        """The workers for the next stage of a request, as in `Pools.for_next_stage`."""
        everybody = np.arange(len(self._names))
        if source is None and is_long(job.num_prompt_tokens, matched, view.candidates(), priors, LONG_PROMPT_MS):
            return everybody[: self._shape.num_prefill]
        return everybody[self._shape.num_prefill :]

    def _transfers(
        self, job: Job, view: FleetView, matched: Depths, workers: Places | None, source: int | None
    ) -> Transfers:
        """The tokens that each of these workers could fetch, as in `Members.transfers`. A token has one byte."""
        found = Transfers.none(len(matched))
        everybody = np.arange(len(self._names))
        slots = everybody if workers is None else np.concatenate((workers, np.setdiff1d(everybody, workers)))
        block = BlockFacts(view.block_size, view.block_size, bool(self._shape.tiers.peer_rate))
        numbers = np.arange(len(matched))
        addresses = [self._names[slot] for slot in slots]
        found.add(view.reported.index, job.hashes, matched, numbers, slots, addresses, block)
        if source is not None:
            found.offer(numbers, job.num_prompt_tokens, self._names[source])
        return found


class LongestPrefixPolicy(_Indexed):
    """Chooses the worker with the longest cached prefix, regardless of load. Ties go to the worker with the fewest
    requests."""

    def choose(self, job: Job, view: FleetView, now_s: float) -> Choice:
        """See Policy."""
        matched = self._depths(job, view)
        self._rng.shuffle(order := list(range(len(self._names))))
        worker = min(order, key=lambda worker: (-matched[worker], view.num_requests(worker)))
        blocks = int(matched[worker])
        return self._chosen(job, worker, min(blocks * view.block_size, job.num_prompt_tokens - 1), blocks, now_s)


def _exact(policy: type[_Indexed]) -> Callable[[FleetShape, random.Random], Policy]:
    def make(shape: FleetShape, rng: random.Random) -> Policy:
        made: Policy = policy(shape, rng, float("inf"))  # type: ignore[assignment]
        return made

    return make


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """A kind of policy. An exact one gets reports without delay and is the only router of the fleet."""

    make: Callable[[FleetShape, random.Random], Policy]
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
    """A job at its worker, with a booking that the owner must release."""

    job: Job
    worker: int
    booking: Booking
    choice: Choice


class SimulatedRouter:
    """One router: a view, a policy and bookings. `rank` is its number among `num_routers`."""

    def __init__(self, policy: Policy, reported: ReportedFleet, rank: int, num_routers: int) -> None:
        self.view = FleetView(reported)
        self.num_in_flight = 0
        """Number of requests that are placed and have not ended."""
        self._policy = policy
        self._answer_lengths = AnswerLengths()
        self.rank = rank
        self._num_routers = num_routers

    def place(self, job: Job, now_s: float, source: int | None = None) -> PlacedJob:
        """Choose a worker and book the job there, as Fleet.place does. `source` has computed its prompt, if any."""
        self.view.reported.advance(now_s)
        if source is None:
            choice = self._policy.choose(job, self.view, now_s)
        else:
            assert isinstance(self._policy, HeadracePolicy), "only this one has workers for prompts"
            choice = self._policy.choose_next(job, self.view, now_s, source)
        num_tokens = job.num_prompt_tokens - choice.cached_tokens
        bookings = self.view.bookings[choice.worker]
        places = job.image_places
        num_image_tokens = 0 if places is None else len(places) - int(np.searchsorted(places, choice.cached_tokens))
        num_blocks = len(job.hashes) + 1 - choice.cached_blocks
        booking = bookings.book(num_tokens, num_blocks, now_s, num_image_tokens)
        self.view.booked(choice.worker)
        self.num_in_flight += 1
        return PlacedJob(job, choice.worker, booking, choice)

    def has_room(self, now_s: float) -> bool:
        """Whether a worker takes another request, by what the router knows of it."""
        view = self.view
        view.reported.advance(now_s)
        return any(view.load(worker).has_room(own.num_pending) for worker, own in enumerate(view.bookings))

    def predicted_wait_s(self, num_ahead: int, now_s: float) -> float:
        """The predicted wait for room after `num_ahead` other requests, in seconds."""
        self.view.reported.advance(now_s)
        priors = self._answer_lengths.priors("")
        return predicted_wait_ms(num_ahead, self.view.candidates(), priors) / 1000

    def belief(self, placed: PlacedJob, *, may_be_given_back: bool) -> Belief:
        """The belief to send to the worker; see `PlacedRequest.belief`."""
        cached_tokens = placed.choice.cached_tokens
        placement = placed.choice.placement
        may_be_given_back = may_be_given_back and self._num_routers > 1 and placement is not None
        believed = placement.belief if may_be_given_back and placement is not None else None
        return belief_message(self.rank + 1, placed.booking, cached_tokens, believed)

    def observe(self, worker: int, report: Report) -> None:
        """Apply a report of a worker with new blocks, which the view already knows."""
        self._policy.observe(worker, report)

    def named(self, worker: int, placement_id: int) -> None:
        """Record that the reports of a worker include this placement of the router from now on."""
        self.view.bookings[worker].settle_named((placement_id,))

    def given_back(self, placed: PlacedJob, report: Report, now_s: float) -> None:
        """Release a request that the worker returned, and apply the load that it reported."""
        self.view.reported.advance(now_s)
        self._policy.not_taken(placed.choice)
        self._release(placed)
        for named in report.placed:
            if named.router == self.rank:
                self.named(placed.worker, named.placement_id)
        self.view.answered(placed.worker, report.load, report.version)

    def first_token(self, placed: PlacedJob) -> None:
        """Note that the first token of a request arrived."""
        self.view.bookings[placed.worker].settle(placed.booking)

    def moved(self, placed: PlacedJob) -> None:
        """Release the booking of a request that continues elsewhere."""
        self._release(placed)

    def ended(self, placed: PlacedJob) -> None:
        """Release the booking of a request that has ended."""
        self._policy.ended(placed.job)
        self._answer_lengths.ended("", placed.job.num_output_tokens)
        self._release(placed)

    def _release(self, placed: PlacedJob) -> None:
        self.view.bookings[placed.worker].release(placed.booking)
        self.num_in_flight -= 1

    def check(self) -> None:
        """Assert the invariants of the bookings."""
        assert self.num_in_flight == sum(bookings.num_in_flight for bookings in self.view.bookings)
        for bookings in self.view.bookings:
            bookings.check()
