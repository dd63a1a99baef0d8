"""Picks workers for requests that others send: a proxy whose endpoint picker asks this router.

A pick is a call that stays open as long as its request. The request is booked at the first worker. The worker's reports
include it soon after the proxy has sent it, but name no placement, because the request does not come from a router. So
the booking counts as load for `_SETTLE_S` at most, and until the proxy says that the answer has begun. If the proxy
says that another host serves the request, the booking moves there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable

from headrace.protos import router_pb2
from headrace.protos.status import Reason, StatusError
from headrace.router.dispatch.admission import Admission
from headrace.router.dispatch.metrics import RouterMetrics
from headrace.router.dispatch.refusals import too_late
from headrace.router.fleet.fleet import Fleet
from headrace.router.fleet.links import WorkerLink
from headrace.router.fleet.routed_request import PlacedRequest, RoutedRequest
from headrace.router.placement.prompt import Prompt

_MAX_PICKED = 8
_SETTLE_S = 1.0
_RETRY_S = 1.0
# Stands for a prompt whose tokens are not known: it is cached nowhere.
_UNKNOWN_PROMPT = (0,)


class Picking:
    """Picks of one router. For one event loop."""

    def __init__(self, fleet: Fleet, admission: Admission, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._admission = admission
        self._metrics = metrics

    async def answers(self, messages: AsyncIterator[router_pb2.PickRequest]) -> AsyncIterator[router_pb2.PickResponse]:
        """The answer to a call's first message. The booking is released when the call ends.

        Raises StatusError: NO_CAPACITY, QUEUE_FULL, and what `Fleet.resolve` raises.
        """
        first = await anext(messages, None)
        if first is None:
            return
        placed = await self._place(first)
        pick = _Pick(self._fleet, placed)
        settling = asyncio.get_running_loop().call_later(_SETTLE_S, pick.settle)
        try:
            yield router_pb2.PickResponse(workers=self._picked(placed))
            async for message in messages:
                if message.served_host:
                    pick.served_at(message.served_host)
        finally:
            settling.cancel()
            pick.release()

    async def _place(self, message: router_pb2.PickRequest) -> PlacedRequest:
        asked = message.request
        card, request = self._fleet.described(asked)
        routed = RoutedRequest(request, Prompt(asked.token_ids or _UNKNOWN_PROMPT))
        routed.num_described = _MAX_PICKED
        await routed.prepare(self._fleet.cards(card.name))
        bound_ms = routed.max_ttft_ms = 1000 * self._admission.max_wait_s(request)
        placed = self._fleet.place(routed, card, self._excluded(message.hosts))
        if placed is None:
            which = "of those that may serve the request " if message.hosts else ""
            problem = f"no worker {which}takes requests for model {card.name!r} at the moment"
            raise StatusError(Reason.NO_CAPACITY, problem, retry_after_s=_RETRY_S)
        cost = placed.placement.cost
        if cost is not None and (wait_ms := cost.queue_ms + cost.backlog_ms) > bound_ms:
            placed.link.release(placed.booking)
            self._fleet.not_taken(placed)
            raise too_late(wait_ms / 1000, bound_ms / 1000)
        self._metrics.placements[placed.placement.reason].inc()
        self._metrics.decision_seconds.observe(placed.decision_s)
        return placed

    def _excluded(self, hosts: Collection[str]) -> list[WorkerLink]:
        """The workers that are not on one of these hosts; none without hosts."""
        return [link for link in self._fleet.links() if hosts and host_of(link.address) not in hosts]

    def _picked(self, placed: PlacedRequest) -> Iterable[router_pb2.PickedWorker]:
        """The worker of the booking, then the others, cheapest first."""
        names = {link.address: link.worker_id for link in self._fleet.links()}
        cached = {weighed.worker_id: weighed.num_cached_tokens for weighed in placed.placement.weighed}
        first = placed.link.address
        cached.setdefault(first, placed.placement.predicted_cached_tokens)
        for address in (first, *(address for address in cached if address != first)):
            yield router_pb2.PickedWorker(
                worker_id=names.get(address, address), address=address, num_cached_tokens=cached[address]
            )


class _Pick:
    """The booking of one request. It moves if another worker serves the request."""

    def __init__(self, fleet: Fleet, placed: PlacedRequest) -> None:
        self._fleet = fleet
        self._placed = placed
        self._link, self._booking = placed.link, placed.booking

    def settle(self) -> None:
        """Stop counting the request as extra load, because the worker's reports include it by now."""
        self._link.settle(self._booking)

    def served_at(self, host: str) -> None:
        """Record that the answer has begun on this host. Moves the booking if it is on another host."""
        if host_of(self._link.address) != host:
            other = next(
                (link for link in self._fleet.links() if host_of(link.address) == host and link.is_ready), None
            )
            self._fleet.not_taken(self._placed)
            if other is not None:
                self._link.release(self._booking)
                self._link, self._booking = other, other.book(0, 0)
        self.settle()

    def release(self) -> None:
        """Release the booking, because the request has ended."""
        self._link.release(self._booking)


def host_of(address: str) -> str:
    """The host of HOST:PORT."""
    return address.rpartition(":")[0].strip("[]")
