"""One request from arrival to its end: place, forward, and when a worker is lost, place again and resume.

next place -> attempt -> finish delivered: done
    ^            |
    |            +-- the worker was lost, refused, or sent what does not fit
    |            |   (tokens already delivered go along as resume)
    |            +-- it was busier than believed and gave the request back: place it again,
    +------------+   knowing what that worker has
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from headrace.protos.status import Reason, StatusError
from headrace.router.dispatch.admission import Admission
from headrace.router.dispatch.attempt import Attempting, End, Outcome
from headrace.router.dispatch.cold_start import ColdStarts
from headrace.router.dispatch.generation import Generation
from headrace.router.dispatch.metrics import RouterMetrics
from headrace.router.dispatch.placing import EndOfContextError, Placing
from headrace.router.dispatch.suspects import Suspects
from headrace.router.fleet.fleet import Fleet
from headrace.router.fleet.routed_request import PlacedRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ForwardingConfig:
    """`max_attempts` bounds the workers that one request may lose in a row without a token from any; see also
    `suspects`."""

    max_attempts: int = 4


class Forwarding:
    """Answers the requests of one router, each by one or more attempts at workers."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        cold_starts: ColdStarts,
        metrics: RouterMetrics,
        config: ForwardingConfig,
    ) -> None:
        self.config = config
        self._fleet = fleet
        self._admission = admission
        self._metrics = metrics
        self._suspects = Suspects(config.max_attempts)
        self._placing = Placing(fleet, admission, cold_starts, metrics)
        self._attempting = Attempting(fleet, self._suspects)

    async def run(self, generation: Generation) -> None:
        """Deliver the whole answer. Raises StatusError or UpstreamError when that is impossible.

        When this returns or raises, the booking is released and the call to the worker has ended.
        """
        generation.waits_until_s = time.monotonic() + self._admission.max_wait_s(generation.request)
        try:
            with self._admission.counted(generation.request):
                try:
                    await self._deliver(generation)
                except EndOfContextError as error:
                    await generation.close_at(error.card)
            self._suspects.answered(generation)
        finally:
            if generation.card is not None:
                self._fleet.answer_lengths.ended(generation.card.name, generation.ledger.num_answer_tokens)

    async def _deliver(self, generation: Generation) -> None:
        outcome: Outcome | None = None
        while generation.attempts.are_left:
            self._suspects.check(generation)
            if generation.card is not None and await generation.close(generation.card):
                return
            placed = await self._placing.next(generation)
            self._metrics.resumes.inc(outcome is not None and outcome.end is End.LOST)
            try:
                if await generation.close(placed.card):
                    return
                outcome = await self._attempting.run(generation, placed)
                if outcome is None:
                    return
                self._note(generation, placed, outcome)
            finally:
                placed.link.release(placed.booking)
        if generation.card is not None and await generation.close(generation.card):
            return
        self._suspects.check(generation)
        num_failed = generation.attempts.num_failed
        why = outcome.why if outcome is not None else ""
        log.warning("request %r is given up, %d workers failed it: %s", generation.request.request_id, num_failed, why)
        problem = f"{num_failed} attempts at this request failed, one after the other; try again"
        raise StatusError(Reason.WORKER_LOST, problem, retry_after_s=1.0)

    def _note(self, generation: Generation, placed: PlacedRequest, outcome: Outcome) -> None:
        """Record the end of an attempt. Raises UpstreamError if a worker has refused the request, and there is no other
        one to ask."""
        attempts = generation.attempts
        progressed = generation.has_progressed
        if outcome.end is End.GIVEN_BACK:
            generation.num_given_back += 1
            self._metrics.given_back.inc()
            self._fleet.not_taken(placed)
            return
        if outcome.end is End.PREFILLED:
            generation.num_moves += 1
            self._metrics.prefills.inc()
            attempts.moved(progressed=True)
            return
        if outcome.end is End.OUTGROWN:
            attempts.moved(progressed=progressed)
            return
        generation.failed[placed.link] = placed.link.incarnation
        generation.prefilled = None
        if outcome.end is End.REFUSED:
            attempts.refused()
            self._fleet.not_taken(placed)
            self._metrics.worker_refusals[outcome.refusal].inc()
        else:
            attempts.lost(progressed=progressed)
        if outcome.error is not None and not (attempts.are_left and self._placing.has_elsewhere(generation, placed)):
            raise outcome.error
        log.debug("request %r goes elsewhere: %s", generation.request.request_id, outcome.why)
