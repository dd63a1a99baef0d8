"""Taking requests in: limits, refusals that say when to come back, and waiting in a fair order for room on a worker.

    arrival --> a worker of the model has room, and nobody waits: placed at once
            --> all are at their bound: waits its turn; placed when a report or an ended request shows room
            --> the first token would come too late, the tenant has too many, the queue is full: refused

A request whose answer has begun, and one that a worker has failed, is never refused or queued here: somebody is reading
its answer. Decisions are synchronous; what is awaited is only the turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from headrace.protos import inference_pb2, worker_pb2
from headrace.protos.status import Reason, StatusError
from headrace.router.fair_queue import Entry, FairQueue
from headrace.router.fleet import Fleet, PlacedRequest, RoutedRequest
from headrace.router.policy import predicted_wait_ms
from headrace.router.refusals import queue_full, tenant_full, too_late

# How often a request that waits looks whether it has waited too long, besides when it is its turn.
_LOOK_S = 0.5
_CAPACITY_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Bounds; times in seconds. `max_ttft_s` is the longest predicted time to a first token that is taken in,
    `capacity_wait_s` how long a request waits while no worker is ready at all."""

    max_ttft_s: float = 60.0
    max_waiting: int = 1024
    capacity_wait_s: float = 10.0
    max_in_flight_per_tenant: int | None = None
    tenant_weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    """A request that waits. Its turn is a PlacedRequest, or the StatusError that ends it."""

    request: RoutedRequest
    card: worker_pb2.ModelCard
    ends_at_s: float
    turn: asyncio.Future[PlacedRequest]


class Admission:
    """The door of one router. One event loop."""

    def __init__(self, fleet: Fleet, config: AdmissionConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet = fleet
        self._config = config
        self._clock = clock
        self._queues: dict[str, FairQueue[_Ticket]] = {}  # by model; none is empty
        self._num_of_tenant: dict[str, int] = {}
        fleet.on_room = self.dispatch

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return sum(len(queue) for queue in self._queues.values())

    @property
    def capacity_wait_s(self) -> float:
        """How long a request waits while no worker is ready at all."""
        return self._config.capacity_wait_s

    @property
    def max_waiting(self) -> int:
        """Bound of `num_waiting`."""
        return self._config.max_waiting

    @contextlib.contextmanager
    def counted(self, message: inference_pb2.GenerateRequest) -> Iterator[None]:
        """While inside, the request counts for its tenant. Raises StatusError (QUOTA) if the tenant has its fill."""
        tenant, most = message.tenant, self._config.max_in_flight_per_tenant
        number = self._num_of_tenant.get(tenant, 0)
        if most is not None and number >= most and not has_begun(message):
            raise tenant_full(tenant, number)
        self._num_of_tenant[tenant] = number + 1
        try:
            yield
        finally:
            self._num_of_tenant[tenant] -= 1
            if not self._num_of_tenant[tenant]:
                del self._num_of_tenant[tenant]

    async def place(
        self,
        request: RoutedRequest,
        message: inference_pb2.GenerateRequest,
        card: worker_pb2.ModelCard,
        remaining_s: float | None,
    ) -> PlacedRequest:
        """Book a worker for a new request, now or when it is its turn.

        `remaining_s` is the time to the request's deadline. Raises StatusError: QUEUE_FULL when the first token would
        come later than the request or the router allows, or too many wait; NO_CAPACITY when no worker is ready for too
        long.
        """
        bound_s = self._config.max_ttft_s if remaining_s is None else min(self._config.max_ttft_s, remaining_s)
        request.max_ttft_ms = bound_s * 1000
        if card.name not in self._queues and self._fleet.has_room(card):
            placed = self._fleet.place(request, card, (), same_weights=False)
            if placed is not None:
                return placed
        queue, entry, ticket = self._queued(request, message, card, bound_s)
        try:
            return await self._turn_of(ticket)
        except asyncio.CancelledError:
            # Its turn may have come in the same moment.
            if ticket.turn.done() and not ticket.turn.cancelled() and ticket.turn.exception() is None:
                placed = ticket.turn.result()
                placed.link.release(placed.booking)
            raise
        finally:
            ticket.turn.cancel()
            queue.remove(entry)
            self._forget_if_empty(card.name)

    def dispatch(self) -> None:
        """There may be room: place those whose turn it is."""
        for model in list(self._queues):
            queue = self._queues[model]
            while (ticket := queue.first()) is not None and self._fleet.has_room(ticket.card):
                if not ticket.turn.done():
                    ticket.request.max_ttft_ms = (ticket.ends_at_s - self._clock()) * 1000
                    try:
                        placed = self._fleet.place(ticket.request, ticket.card, (), same_weights=False)
                    except StatusError as error:
                        ticket.turn.set_exception(error)
                    else:
                        if placed is None:
                            break
                        ticket.turn.set_result(placed)
                queue.pop()
            self._forget_if_empty(model)

    def drain(self) -> None:
        """The router stops: those that wait are sent elsewhere, with DRAINING."""
        for queue in self._queues.values():
            while (ticket := queue.first()) is not None:
                if not ticket.turn.done():
                    problem = "the router is stopping; ask another one"
                    ticket.turn.set_exception(StatusError(Reason.DRAINING, problem, retry_after_s=_CAPACITY_RETRY_S))
                queue.pop()
        self._queues.clear()

    def _queued(
        self,
        request: RoutedRequest,
        message: inference_pb2.GenerateRequest,
        card: worker_pb2.ModelCard,
        bound_s: float,
    ) -> tuple[FairQueue[_Ticket], Entry, _Ticket]:
        """Put a request into its model's queue. Raises StatusError (QUEUE_FULL)."""
        queue = self._queues.get(card.name)
        if queue is None:
            queue = FairQueue(self._config.tenant_weights)
        tenant, priority = message.tenant, message.priority
        candidates = self._fleet.candidates(card)
        priors = self._fleet.answer_lengths.priors(card.name)
        wait_s = predicted_wait_ms(queue.num_ahead(tenant, priority), candidates, priors) / 1000
        if candidates and wait_s > bound_s:
            raise too_late(wait_s, bound_s)
        if self.num_waiting >= self._config.max_waiting:
            self._make_room(queue, tenant, priority, wait_s)
        ticket = _Ticket(request, card, self._clock() + bound_s, asyncio.get_running_loop().create_future())
        entry = queue.push(ticket, tenant=tenant, priority=priority, charge=request.num_expected_tokens(priors))
        self._queues[card.name] = queue
        return queue, entry, ticket

    def _make_room(self, queue: FairQueue[_Ticket], tenant: str, priority: int, wait_s: float) -> None:
        full = queue_full(self.num_waiting, wait_s)
        victim = queue.to_displace(tenant, priority)
        if victim is None:
            raise full
        ticket = queue.item_of(victim)
        if not ticket.turn.done():
            ticket.turn.set_exception(full)
        queue.remove(victim)

    async def _turn_of(self, ticket: _Ticket) -> PlacedRequest:
        waits_since_s = self._clock()
        while not ticket.turn.done():
            await asyncio.wait({ticket.turn}, timeout=_LOOK_S)
            now_s = self._clock()
            if ticket.turn.done():
                break
            candidates = self._fleet.candidates(ticket.card)
            if not candidates:
                if now_s - waits_since_s >= self._config.capacity_wait_s:
                    raise self.no_capacity(ticket.card.name)
            elif now_s >= ticket.ends_at_s:
                waited_s = now_s - waits_since_s
                priors = self._fleet.answer_lengths.priors(ticket.card.name)
                raise too_late(waited_s + predicted_wait_ms(0, candidates, priors) / 1000, waited_s)
        return ticket.turn.result()

    def no_capacity(self, model: str) -> StatusError:
        """The refusal for want of any worker that takes requests."""
        if not self._fleet.links():
            what = "this router knows no worker: start one with --router, or name one with --worker"
        elif self._fleet.num_ready == 0:
            what = "no worker takes requests at the moment"
        else:
            what = f"no worker takes requests for model {model!r} at the moment"
        return StatusError(Reason.NO_CAPACITY, what, retry_after_s=_CAPACITY_RETRY_S)

    def _forget_if_empty(self, model: str) -> None:
        queue = self._queues.get(model)
        if queue is not None and not len(queue):
            del self._queues[model]

    def check(self) -> None:
        """Assert the invariants. For tests."""
        assert self.num_waiting <= self._config.max_waiting
        assert all(len(queue) for queue in self._queues.values())
        assert all(number > 0 for number in self._num_of_tenant.values())
        for queue in self._queues.values():
            queue.check()


def has_begun(message: inference_pb2.GenerateRequest) -> bool:
    """Whether an earlier attempt of this request was taken in somewhere."""
    return message.attempt > 0 or bool(message.resume_token_ids)
