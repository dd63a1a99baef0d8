"""Finds the next worker of a request: its first one, after a turn in the queue if necessary, or one to continue at."""

from __future__ import annotations

import logging
import time

from headrace.common.telemetry.tracing import current_span
from headrace.protos import worker_pb2
from headrace.protos.answer_bounds import check_context
from headrace.protos.cache_eviction import longest_context_of
from headrace.protos.model_identity import model_identity
from headrace.protos.status import Reason, StatusError
from headrace.router.dispatch.admission import Admission
from headrace.router.dispatch.cold_start import ColdStarts
from headrace.router.dispatch.generation import Generation
from headrace.router.dispatch.metrics import RouterMetrics
from headrace.router.dispatch.refusals import model_changed
from headrace.router.fleet.fleet import Fleet
from headrace.router.fleet.known_models import card_outgrown
from headrace.router.fleet.routed_request import PlacedRequest, RoutedRequest

log = logging.getLogger(__name__)

# Number of candidates that a span describes, cheapest first; a fleet may have hundreds.
_MAX_DESCRIBED = 16


class EndOfContextError(Exception):
    """The answer has reached the end of the longest context of all workers, that of `card`."""

    def __init__(self, card: worker_pb2.ModelCard) -> None:
        super().__init__()
        self.card = card


class Placing:
    """Chooses the worker for each attempt of a router's requests, and waits for room if every worker is full."""

    def __init__(self, fleet: Fleet, admission: Admission, cold_starts: ColdStarts, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._admission = admission
        self._cold_starts = cold_starts
        self._metrics = metrics

    async def next(self, generation: Generation) -> PlacedRequest:
        """Book a worker, after waiting for room or for a worker's return if necessary. The caller releases the booking.

        Raises StatusError if no worker is found in time, and EndOfContextError.
        """
        arrived_s = time.monotonic()
        with current_span().child("place") as span:
            request = generation.routed(_MAX_DESCRIBED if span.is_recording else 0)
            placed = await self._place(generation, request, arrived_s + self._admission.capacity_wait_s)
            placed.describe(span)
        self._metrics.queue_seconds.observe(time.monotonic() - arrived_s)
        self._metrics.decision_seconds.observe(placed.decision_s)
        self._metrics.placements[placed.placement.reason].inc()
        log.debug("placed on %s: %s", placed.link.worker_id, placed.placement.reason.value)
        return placed

    async def _place(self, generation: Generation, request: RoutedRequest, until_s: float) -> PlacedRequest:
        """Try again after each change of the fleet, until `until_s`."""
        while True:
            card = generation.card or self._resolved(generation)
            if card is None and generation.is_new and self._cold_starts.is_awaited(generation.request.model):
                card = await self._cold_starts.card_of(generation.request.model)
            if card is not None:
                _check_context(generation, card)
                self._fleet.adapters.choose(request, card)
                await request.prepare(self._fleet.cards(card.name))
                if generation.is_new:
                    remaining_s = generation.remaining_s()
                    placed = await self._admission.place(request, generation.request, card, remaining_s)
                    generation.waits_until_s = time.monotonic() + request.max_ttft_ms / 1000
                    return placed
                again = self._place_again(generation, request, card)
                if again is not None:
                    return again
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                if card is not None and self._is_changed(card, request):
                    raise model_changed("no worker with the model files that began it is left")
                raise self._admission.no_capacity(generation.request.model)
            await self._fleet.changed(left_s)

    def _resolved(self, generation: Generation) -> worker_pb2.ModelCard | None:
        """The card of the requested model, or None while it is unknown. Raises StatusError.

        If an answer has begun, it had a worker. If none is known, this router may have just started.
        """
        try:
            return self._cold_starts.resolve(generation.request.model)
        except StatusError as error:
            if generation.is_new or error.reason is not Reason.MODEL_NOT_FOUND:
                raise
            return None

    def _place_again(
        self, generation: Generation, request: RoutedRequest, card: worker_pb2.ModelCard
    ) -> PlacedRequest | None:
        """Place a request that has lost or left its worker. None if no worker takes it now. A worker that failed is
        used again only if it has come back and there is no other.

        Raises StatusError (MODEL_CHANGED) if no worker may continue the answer, and EndOfContextError.
        """
        has_tokens = bool(generation.ledger.token_ids)
        failed = generation.failed
        if has_tokens and not generation.identity and self._fleet.has_several_identities(card.name):
            raise model_changed("its workers have different model files, and the request does not name its own")
        placed = self._fleet.place(request, card, failed.keys())
        if placed is None and failed:
            still_failed = {link for link, incarnation in failed.items() if link.incarnation == incarnation}
            placed = self._fleet.place(request, card, still_failed)
        if placed is None and has_tokens:
            outgrown = card_outgrown(request, card.name, self._fleet.links(), time.monotonic())
            if outgrown is not None:
                raise EndOfContextError(outgrown)
        return placed

    def _is_changed(self, card: worker_pb2.ModelCard, request: RoutedRequest) -> bool:
        """Whether the model is served only with other files than those of the begun answer, and no worker with its
        files may come back. As long as one may come back, the answer waits, as for the restart of a single worker."""
        identity = request.model_identity
        if not identity or self._fleet.may_come_back(identity) or not self._fleet.is_served(card):
            return False
        ready = [(link, link.card) for link in self._fleet.links() if link.is_ready and link.card is not None]
        return all(model_identity(its, link.adapters.sha256(request.adapter)) != identity for link, its in ready)

    def has_elsewhere(self, generation: Generation, placed: PlacedRequest) -> bool:
        """Whether a worker that has not failed the request could take it instead."""
        identity = generation.identity
        adapter = generation.request.adapter
        return any(
            link.is_ready
            and link not in generation.failed
            and link.card is not None
            and link.card.name == placed.card.name
            and placed.request.fits(link.card)
            and identity in ("", model_identity(link.card, link.adapters.sha256(adapter)))
            for link in self._fleet.links()
        )


def _check_context(generation: Generation, card: worker_pb2.ModelCard) -> None:
    """Raise StatusError (CONTEXT_TOO_LONG) if a new request does not fit the model, whose card has just become
    known."""
    if generation.longest_context:
        return
    longest = longest_context_of(card, generation.request.sampling)
    if not generation.ledger.token_ids:
        num_tokens = generation.prompt.num_tokens
        check_context(num_tokens, 0, card.max_context_tokens, encodes=bool(card.task), longest=longest)
    generation.longest_context = longest
