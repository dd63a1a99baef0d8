"""Admission control: limits, refusals with a retry time, and a fair queue for room on a worker.

    arrival --> a worker of the model has room and no request waits: placed at once
            --> all workers are full: queued; placed when a report or an ended request shows room
            --> it would wait too long, its tenant has too many requests, the queue is full: refused

The router predicts only the wait in its own queue. A worker predicts the wait in its queue, because it knows the
requests ahead and the cached prefix. The router passes it the rest of the time that the request may wait.

A request whose answer has begun, or whose worker failed, is never refused or queued here: a client is reading its
answer. Decisions are synchronous; only the turn in the queue is awaited. A request in the background is placed at once
or refused, unless no worker serves its model yet: it never waits for room, where it would make others wait behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import structs

from headrace.common.fair_queue import Entry, FairQueue
from headrace.protos import inference_pb2, worker_pb2
from headrace.protos.priorities import BACKGROUND_PRIORITY
from headrace.protos.status import Reason, StatusError
from headrace.router.dispatch.holding import Holding, OnDemand
from headrace.router.dispatch.refusals import background_full, queue_full, tenant_full, too_late
from headrace.router.fleet.fleet import Fleet
from headrace.router.fleet.routed_request import PlacedRequest, RoutedRequest
from headrace.router.placement.policy import predicted_wait_ms
from headrace.router.placement.rates import Priors

log = logging.getLogger(__name__)

# How often a waiting request checks whether it has waited too long.
_LOOK_S = 0.5
_CAPACITY_RETRY_S = 1.0
# Minimum time between two log lines that there is no worker.
_TELL_AGAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Bounds; times in seconds. `max_ttft_s` is the longest that a request waits for others, here and at its worker;
    `capacity_wait_s` is the time after which a request is given back if no worker is ready at all."""

    max_ttft_s: float = 60.0
    max_waiting: int = 1024
    capacity_wait_s: float = 10.0
    max_in_flight_per_tenant: int | None = None
    tenant_weights: Mapping[str, float] = field(default_factory=dict)


class Waiting(NamedTuple):
    """Requests of one model that wait at a router: how many, the tokens of their prompts, and since when the first of
    them waits, in seconds."""

    num_requests: int = 0
    num_tokens: int = 0
    oldest_s: float = 0.0


NOBODY_WAITS = Waiting()


@dataclass(slots=True, eq=False)
class _Ticket:
    """A request that waits. Its turn is a PlacedRequest, or the StatusError that ends it."""

    request: RoutedRequest
    card: worker_pb2.ModelCard
    ends_at_s: float
    """When it has waited too long. Time without any worker is added."""
    deadline_s: float
    turn: asyncio.Future[PlacedRequest]
    alone_since_s: float | None = None
    """The time since when no worker of its model takes requests."""


class Admission:
    """Decides which requests of one router are placed now, which wait and which are refused. For one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        config: AdmissionConfig,
        holding: Holding | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._config = config
        self._holding = holding or Holding(OnDemand())
        self._clock = clock
        self._queues: dict[str, FairQueue[_Ticket]] = {}  # by model; none is empty
        self._waiting: dict[str, dict[_Ticket, float]] = {}  # the same with the time since when they wait, oldest first
        self._num_of_tenant: dict[str, int] = {}
        self._told_s = -math.inf
        fleet.rooms.add(self.dispatch)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return sum(len(queue) for queue in self._queues.values())

    def waiting(self, model: str) -> Waiting:
        """The requests for a model that wait for their turn."""
        tickets = self._waiting.get(model)
        if not tickets:
            return NOBODY_WAITS
        oldest_s = self._clock() - next(iter(tickets.values()))
        return Waiting(len(tickets), sum(ticket.request.num_tokens for ticket in tickets), oldest_s)

    def is_waited_for(self) -> list[str]:
        """The models for which requests wait."""
        return list(self._waiting)

    def check_room(self, num_held: int) -> None:
        """Raise StatusError (QUEUE_FULL) if no other request may wait. `num_held` further requests wait elsewhere in
        the router."""
        if self.num_waiting + num_held >= self._config.max_waiting:
            raise queue_full(self.num_waiting + num_held, self._holding.on_demand.cold_start_s)

    @property
    def capacity_wait_s(self) -> float:
        """The time after which a request is given back if no worker is ready at all."""
        return self._config.capacity_wait_s

    @property
    def max_waiting(self) -> int:
        """Maximum of `num_waiting`."""
        return self._config.max_waiting

    def max_wait_s(self, message: inference_pb2.GenerateRequest) -> float:
        """How long a request may wait for others, here and at its worker together, if its deadline is later."""
        own_s = message.max_wait_ms / 1000 if message.HasField("max_wait_ms") else math.inf
        return min(self._config.max_ttft_s, own_s)

    @contextlib.contextmanager
    def counted(self, message: inference_pb2.GenerateRequest) -> Iterator[None]:
        """Context manager: the request counts for its tenant until it exits. Raises StatusError (QUOTA) if the tenant
        has its maximum of requests. Requests in the background do not count."""
        if message.priority == BACKGROUND_PRIORITY:
            yield
            return
        tenant = message.tenant
        most = self._config.max_in_flight_per_tenant
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
        long; MODEL_CHANGED when none has the prompt's tokenizer.
        """
        bound_s = self.max_wait_s(message)
        if remaining_s is not None:
            bound_s = min(bound_s, remaining_s)
        request.max_ttft_ms = bound_s * 1000
        if request.is_background and self._fleet.is_served(card):
            placed = self._fleet.place(request, card, ())
            if placed is None:
                raise background_full()
            return placed
        if card.name not in self._queues and self._fleet.has_room(card):
            placed = self._fleet.place(request, card, ())
            if placed is not None:
                return placed
        queue, entry, ticket = self._queued(request, message, card, bound_s, remaining_s)
        tickets = self._waiting.setdefault(card.name, {})
        tickets[ticket] = self._clock()
        if ticket.alone_since_s is not None:
            self._holding.changes.tell(card.name)
        try:
            return await self._turn_of(ticket)
        except asyncio.CancelledError:
            # Its turn may have come at the same time.
            if ticket.turn.done() and not ticket.turn.cancelled() and ticket.turn.exception() is None:
                placed = ticket.turn.result()
                placed.link.release(placed.booking)
            raise
        finally:
            ticket.turn.cancel()
            queue.remove(entry)
            self._forget_if_empty(card.name)
            del tickets[ticket]
            if not tickets:
                self._waiting.pop(card.name, None)

    def dispatch(self, model: str) -> None:
        """A worker of this model may have room: place the requests that are next."""
        queue = self._queues.get(model)
        if queue is None:
            return
        while (entry := queue.first()) is not None and self._fleet.has_room(entry.item.card):
            ticket = entry.item
            if ticket.turn.done():  # its caller gave up, but its task has not run yet
                queue.remove(entry)
                continue
            ticket.request.max_ttft_ms = self._left_s(ticket, is_alone=False) * 1000
            try:
                placed = self._fleet.place(ticket.request, ticket.card, ())
            except StatusError as error:
                ticket.turn.set_exception(error)
                queue.remove(entry)
                continue
            if placed is None and ticket.request.is_background:
                ticket.turn.set_exception(background_full())
                queue.remove(entry)
                continue
            if placed is None:
                break
            ticket.turn.set_result(placed)
            queue.pop()
        self._forget_if_empty(model)

    def drain(self) -> None:
        """Send waiting requests elsewhere with DRAINING, because the router stops."""
        for queue in self._queues.values():
            while (entry := queue.first()) is not None:
                if not entry.item.turn.done():
                    problem = "the router is stopping; ask another one"
                    refusal = StatusError(Reason.DRAINING, problem, retry_after_s=_CAPACITY_RETRY_S)
                    entry.item.turn.set_exception(refusal)
                queue.remove(entry)
        self._queues.clear()

    def _queued(
        self,
        request: RoutedRequest,
        message: inference_pb2.GenerateRequest,
        card: worker_pb2.ModelCard,
        bound_s: float,
        remaining_s: float | None,
    ) -> tuple[FairQueue[_Ticket], Entry[_Ticket], _Ticket]:
        """Add a request to its model's queue. Raises StatusError (QUEUE_FULL)."""
        queue = self._queues.get(card.name)
        if queue is None:
            queue = FairQueue(self._config.tenant_weights)
        tenant = message.tenant
        priority = message.priority
        candidates = self._fleet.candidates(card)
        priors = self._priors(card)
        wait_s = predicted_wait_ms(queue.num_ahead(tenant, priority), candidates, priors) / 1000
        if candidates and wait_s > bound_s:
            raise too_late(wait_s, bound_s)
        if self.num_waiting >= self._config.max_waiting:
            self._make_room(queue, tenant, priority, wait_s)
        now_s = self._clock()
        deadline_s = math.inf if remaining_s is None else now_s + remaining_s
        ticket = _Ticket(request, card, now_s + bound_s, deadline_s, asyncio.get_running_loop().create_future())
        if not candidates:
            ticket.alone_since_s = now_s
            self._tell_of_absence(card.name)
        entry = queue.push(ticket, tenant=tenant, priority=priority, charge=request.num_expected_tokens(priors))
        self._queues[card.name] = queue
        return queue, entry, ticket

    def _make_room(self, queue: FairQueue[_Ticket], tenant: str, priority: int, wait_s: float) -> None:
        """Refuse a request that waits, for any model, in favour of a new one of `queue`. If the new one, which would
        wait for `wait_s`, should be refused instead, raises StatusError (QUEUE_FULL)."""
        others = [each for each in self._queues.values() if each is not queue]
        victim = queue.to_displace(tenant, priority, others)
        if victim is None:
            raise queue_full(self.num_waiting, wait_s)
        card = victim.item.card
        its_queue = self._queues[card.name]
        if not victim.item.turn.done():
            its_wait_s = self._wait_s(its_queue.num_ahead(victim.tenant, victim.priority), card)
            victim.item.turn.set_exception(queue_full(self.num_waiting, its_wait_s))
        its_queue.remove(victim)
        self._forget_if_empty(card.name)

    def _wait_s(self, num_ahead: int, card: worker_pb2.ModelCard) -> float:
        """The predicted wait in the queue of the card's model after `num_ahead` others."""
        return predicted_wait_ms(num_ahead, self._fleet.candidates(card), self._priors(card)) / 1000

    def _priors(self, card: worker_pb2.ModelCard) -> Priors:
        """The assumptions for a request. For a model that generates no answer, a request counts as an answer of one
        token."""
        priors = self._fleet.answer_lengths.priors(card.name)
        return structs.replace(priors, answer_tokens=1) if card.task else priors

    async def _turn_of(self, ticket: _Ticket) -> PlacedRequest:
        waits_since_s = self._clock()
        while not ticket.turn.done():
            await asyncio.wait({ticket.turn}, timeout=_LOOK_S)
            now_s = self._clock()
            if ticket.turn.done():
                break
            is_served = self._fleet.is_served(ticket.card)
            left_s = self._left_s(ticket, is_alone=not is_served)
            if not is_served:
                if ticket.card.name in self._holding.on_demand:
                    assert ticket.alone_since_s is not None, "it is alone"
                    if now_s - ticket.alone_since_s >= self._holding.on_demand.cold_start_s:
                        raise self._holding.not_started(ticket.card.name)
                elif now_s - waits_since_s >= self._config.capacity_wait_s:
                    raise self.no_capacity(ticket.card.name)
            elif left_s <= 0:
                waited_s = now_s - waits_since_s
                raise too_late(waited_s + self._wait_s(0, ticket.card), waited_s)
        return ticket.turn.result()

    def _left_s(self, ticket: _Ticket, *, is_alone: bool) -> float:
        """Seconds that a request may still wait for its turn. Time without any worker does not count against
        --max-ttft. So requests that waited for a restart are not refused afterwards."""
        now_s = self._clock()
        if is_alone and ticket.alone_since_s is None:
            ticket.alone_since_s = now_s
        elif not is_alone and ticket.alone_since_s is not None:
            ticket.ends_at_s += now_s - ticket.alone_since_s
            ticket.alone_since_s = None
        return min(ticket.ends_at_s, ticket.deadline_s) - now_s

    def no_capacity(self, model: str) -> StatusError:
        """The error if no worker takes requests. A gateway tries again while its client waits."""
        self._tell_of_absence(model)
        which = f"model {model!r}" if model else "the model"
        problem = f"no worker serves {which} at the moment; try again in a moment"
        return StatusError(Reason.NO_CAPACITY, problem, retry_after_s=_CAPACITY_RETRY_S)

    def _tell_of_absence(self, model: str) -> None:
        """Log that requests wait for a worker of a model, at limited intervals."""
        now_s = self._clock()
        if now_s - self._told_s < _TELL_AGAIN_S:
            return
        self._told_s = now_s
        if not self._fleet.links():
            log.warning("requests wait, but no worker is known: start one with --router, or name one with --worker")
        else:
            log.warning("requests for %s wait: none of its workers takes requests", model or "the only model")

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
    """Whether an earlier attempt of this request was accepted somewhere."""
    return message.attempt > 0 or bool(message.resume_token_ids)
