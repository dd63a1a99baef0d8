"""One request from arrival to its end: place, forward, and when a worker is lost, place again and resume.

    next place -> attempt -> finish delivered: done
        ^            |
        |            +-- the worker was lost, refused, or sent what does not fit
        |            |   (tokens already delivered go along as resume)
        |            +-- it was busier than believed and gave the request back: place it again,
        +------------+   knowing what that worker has

When `run` returns or raises, the booking is released and the call to the worker has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass

import grpc

from headrace.common.telemetry.span import Span, SpanKind
from headrace.common.telemetry.tracing import current_span
from headrace.common.transport.sessions import Call
from headrace.common.transport.wire_request import WireRequest
from headrace.protos import worker_pb2
from headrace.protos.answer_bounds import check_context
from headrace.protos.cache_eviction import longest_context_of
from headrace.protos.model_identity import model_identity
from headrace.protos.status import Reason, StatusError, detail_of
from headrace.router.dispatch.admission import Admission, has_begun
from headrace.router.dispatch.attempts import (
    AttemptFailedError,
    EndOfContextError,
    GivenBackError,
    Metadata,
    OutgrownError,
    PrefilledError,
    RunningCall,
    UpstreamError,
)
from headrace.router.dispatch.delivery import Delivery, FencedError
from headrace.router.dispatch.metrics import RouterMetrics
from headrace.router.dispatch.refusals import model_changed
from headrace.router.dispatch.suspects import Suspects
from headrace.router.dispatch.verdicts import Verdict, verdict_of, was_reached
from headrace.router.fleet.fleet import Fleet
from headrace.router.fleet.known_models import card_outgrown
from headrace.router.fleet.links import WorkerLink
from headrace.router.fleet.routed_request import PlacedRequest, Prefilled, RoutedRequest
from headrace.router.placement.policy import MAX_GIVEN_BACK

log = logging.getLogger(__name__)

_MOST_WAIT_MS = (1 << 32) - 1  # the maximum of the field's type
_MAX_FAILED = 32  # workers that one request may lose, or be refused by, in total
MAX_MOVES = 4  # of one answer from workers that are reserved for prompts
ATTEMPT_SPAN = "headrace.v1.Inference/Generate"
# Number of candidates that a span describes, cheapest first; a fleet may have hundreds.
_MAX_DESCRIBED = 16


@dataclass(frozen=True, slots=True)
class ForwardingConfig:
    """`max_attempts` bounds the workers that one request may lose in a row without a token from any; see also
    `suspects`."""

    max_attempts: int = 4


class Forwarding:
    """One request. `write` sends the client a message, `remaining_s` is the time to its deadline or None."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        metrics: RouterMetrics,
        config: ForwardingConfig,
        suspects: Suspects,
        wire: WireRequest,
        metadata: Metadata,
        write: Callable[[bytes], Awaitable[None]],
        remaining_s: Callable[[], float | None],
    ) -> None:
        """Raises StatusError if `wire` is no GenerateRequest."""
        self._fleet = fleet
        self._admission = admission
        self._metrics = metrics
        self._config = config
        self._suspects = suspects
        self._metadata = metadata
        self._write = write
        self._remaining_s = remaining_s
        self._delivery = Delivery(wire)
        self._waits_until_s = time.monotonic() + admission.max_wait_s(self._delivery.request)
        self._card: worker_pb2.ModelCard | None = None  # of the worker whose tokens were delivered
        self._adapter_sha256 = ""  # of the adapter that generated them
        self._longest = 0  # the longest context of the answer: of a worker that has begun it, or may begin it
        self._num_given_back = 0
        self._num_moves = 0
        self._prefilled: Prefilled | None = None
        self._failed: dict[WorkerLink, int] = {}  # workers that failed -> their incarnation at that time

    async def run(self) -> None:
        """Deliver the whole answer. Raises StatusError or UpstreamError when that is impossible."""
        try:
            with self._admission.counted(self._delivery.request):
                try:
                    await self._deliver()
                except EndOfContextError as error:
                    await self._write_closing(error.card)
            self._suspects.answered(self._delivery)
        finally:
            if self._card is not None:
                self._fleet.answer_lengths.ended(self._card.name, len(self._delivery.token_ids))

    async def _deliver(self) -> None:
        why, was_lost, num_failed, num_vain = "", False, 0, 0
        while num_vain < self._config.max_attempts and num_failed < _MAX_FAILED:
            num_before = self._delivery.num_delivered
            self._suspects.check(self._delivery)
            if self._card is not None and await self._close(self._card):
                return
            placed = await self._next_place()
            self._metrics.resumes.inc(was_lost)
            was_lost = False
            try:
                if await self._close(placed.card):
                    return
                await self._attempt(placed)
                return
            except GivenBackError:
                self._num_given_back += 1
                self._metrics.given_back.inc()
                self._delivery.given_back()
                self._fleet.not_taken(placed)
            except PrefilledError:
                self._metrics.prefills.inc()
                self._num_moves += 1
                num_vain = 0
            except OutgrownError:
                num_vain = num_vain + 1 if self._delivery.num_delivered == num_before else 0
            except AttemptFailedError as failure:
                self._failed[placed.link], self._prefilled = placed.link.incarnation, None
                why, was_lost = str(failure), not failure.refusal
                num_failed += 1
                if failure.refusal:
                    self._fleet.not_taken(placed)
                    self._metrics.worker_refusals[failure.refusal].inc()
                else:
                    num_vain = num_vain + 1 if self._delivery.num_delivered == num_before else 1
                if failure.passed_on and (num_failed == _MAX_FAILED or not self._has_elsewhere(placed)):
                    raise failure.passed_on from None
                log.debug("request %r goes elsewhere: %s", self._delivery.request.request_id, why)
            finally:
                placed.link.release(placed.booking)
        if self._card is not None and await self._close(self._card):
            return
        self._suspects.check(self._delivery)
        log.warning(
            "request %r is given up, %d workers failed it: %s", self._delivery.request.request_id, num_failed, why
        )
        problem = f"{num_failed} attempts at this request failed, one after the other; try again"
        raise StatusError(Reason.WORKER_LOST, problem, retry_after_s=1.0)

    async def _close(self, card: worker_pb2.ModelCard) -> bool:
        """Deliver the finish if the delivered tokens are a complete answer. Returns whether they are. The answer may
        continue at a worker with a longer context than that of the card."""
        if longest_context_of(card, self._delivery.request.sampling) < self._longest:
            shorter, card = card, worker_pb2.ModelCard()
            card.CopyFrom(shorter)
            card.max_context_tokens = self._longest
        return await self._write_closing(card)

    async def _write_closing(self, card: worker_pb2.ModelCard) -> bool:
        message = self._delivery.closing_message(card)
        if message is None:
            return False
        self._delivery.accept(message)
        await self._write(message)
        return True

    @property
    def _identity(self) -> str:
        """The identity of the model that generated the delivered tokens, if known; empty before the first token. Its
        worker sends it with the answer, because the reported adapters may have changed before the request arrived."""
        found = self._delivery.model_identity
        return found or ("" if self._card is None else model_identity(self._card, self._adapter_sha256))

    # -- placing ----------------------------------------------------------------------------------------------------

    async def _next_place(self) -> PlacedRequest:
        """Book a worker, after waiting for room or for a worker's return if necessary. Raises StatusError if no worker
        is found in time."""
        arrived_s = time.monotonic()
        with current_span().child("place") as span:
            placed = await self._await_place(_MAX_DESCRIBED if span.is_recording else 0)
            placed.describe(span)
        self._metrics.queue_seconds.observe(time.monotonic() - arrived_s)
        self._metrics.decision_seconds.observe(placed.decision_s)
        self._metrics.placements[placed.placement.reason].inc()
        log.debug("placed on %s: %s", placed.link.worker_id, placed.placement.reason.value)
        return placed

    async def _await_place(self, num_described: int) -> PlacedRequest:
        wait_until_s = time.monotonic() + self._admission.capacity_wait_s
        delivery = self._delivery
        # A returned request does not queue again.
        is_new = not (self._failed or self._num_given_back or delivery.token_ids or has_begun(delivery.request))
        identity = self._identity
        request = RoutedRequest(delivery.request, delivery.prompt, delivery.token_ids, identity)
        request.num_described, request.prefilled = num_described, self._prefilled
        while True:
            card = self._card or self._resolved(is_new)
            if card is not None:
                self._check_context(card)
                self._fleet.adapters.choose(request, card)
                await request.prepare(self._fleet.cards(card.name))
            if card is not None and is_new:
                placed = await self._admission.place(request, delivery.request, card, self._remaining_s())
                self._waits_until_s = time.monotonic() + request.max_ttft_ms / 1000
                return placed
            if (
                card is not None
                and not identity
                and delivery.token_ids
                and self._fleet.has_several_identities(card.name)
            ):
                raise model_changed("its workers have different model files, and the request does not name its own")
            again = None if card is None else self._place_again(request, card)
            if again is not None:
                return again
            if card is not None and delivery.token_ids:
                outgrown = card_outgrown(request, card.name, self._fleet.links(), time.monotonic())
                if outgrown is not None:
                    raise EndOfContextError(outgrown)
            left_s = wait_until_s - time.monotonic()
            if left_s <= 0:
                if card is not None and self._is_changed(card, request):
                    raise model_changed("no worker with the model files that began it is left")
                raise self._admission.no_capacity(delivery.request.model)
            await self._fleet.changed(left_s)

    def _check_context(self, card: worker_pb2.ModelCard) -> None:
        """Raise StatusError (CONTEXT_TOO_LONG) if a new request does not fit the model, whose card has just become
        known."""
        if self._longest:
            return
        longest = longest_context_of(card, self._delivery.request.sampling)
        if not self._delivery.token_ids:
            num_tokens = self._delivery.prompt.num_tokens
            check_context(num_tokens, 0, card.max_context_tokens, encodes=bool(card.task), longest=longest)
        self._longest = longest

    def _is_changed(self, card: worker_pb2.ModelCard, request: RoutedRequest) -> bool:
        """Whether the model is served only with other files than those of the begun answer, and no worker with its
        files may come back. As long as one may come back, the answer waits, as for the restart of a single worker."""
        identity = request.model_identity
        if not identity or self._fleet.may_come_back(identity) or not self._fleet.is_served(card):
            return False
        ready = [(link, link.card) for link in self._fleet.links() if link.is_ready and link.card is not None]
        return all(model_identity(its, link.adapters.sha256(request.adapter)) != identity for link, its in ready)

    def _resolved(self, is_new: bool) -> worker_pb2.ModelCard | None:
        """The card of the requested model, or None while it is unknown. Raises StatusError.

        If an answer has begun, it had a worker. If none is known, this router may have just started.
        """
        try:
            return self._fleet.resolve(self._delivery.request.model)
        except StatusError as error:
            if is_new or error.reason is not Reason.MODEL_NOT_FOUND:
                raise
            return None

    def _place_again(self, request: RoutedRequest, card: worker_pb2.ModelCard) -> PlacedRequest | None:
        """Place the request again. A worker that failed is used again only if it has come back and there is no
        other."""
        placed = self._fleet.place(request, card, self._failed.keys())
        if placed is None and self._failed:
            still_failed = {link for link, incarnation in self._failed.items() if link.incarnation == incarnation}
            placed = self._fleet.place(request, card, still_failed)
        return placed

    def _has_elsewhere(self, placed: PlacedRequest) -> bool:
        identity = self._identity
        return any(
            link.is_ready
            and link not in self._failed
            and link.card is not None
            and link.card.name == placed.card.name
            and placed.request.fits(link.card)
            and identity in ("", model_identity(link.card, link.adapters.sha256(self._delivery.request.adapter)))
            for link in self._fleet.links()
        )

    # -- one attempt ------------------------------------------------------------------------------------------------

    async def _attempt(self, placed: PlacedRequest) -> None:
        """Forward until the finish is delivered. Raises AttemptFailedError or UpstreamError."""
        with current_span().child(ATTEMPT_SPAN, kind=SpanKind.CLIENT) as span:
            if span.is_recording:
                resumed = len(self._delivery.token_ids)
                span.set({"headrace.worker": placed.link.worker_id, "headrace.num_resumed_tokens": resumed})
            await self._try(placed, span)

    async def _try(self, placed: PlacedRequest, span: Span) -> None:
        may_be_given_back = self._num_given_back < MAX_GIVEN_BACK
        belief = placed.belief(may_be_given_back=may_be_given_back)
        wire = self._delivery.next_attempt(self._max_wait_ms(), belief, placed.placement.source)
        call = placed.link.generate(wire, timeout=self._remaining_s(), metadata=span.onto(self._metadata))
        running = RunningCall(call)
        link, life = placed.link, placed.link.incarnation
        with link.running(running), self._suspects.running(life, self._delivery):
            try:
                await self._pass_on(placed, call)
            except grpc.aio.AioRpcError as error:
                if not self._delivery.is_finished:  # messages after the finish no longer matter
                    raise self._judge(link, life, error) from None
            except asyncio.CancelledError:
                if running.abandoned_because is None or _is_cancelled_from_outside():
                    raise
                if not self._delivery.is_finished:
                    self._lost_worker(link, life, has_died=False)
                    raise AttemptFailedError(running.abandoned_because) from None
            except FencedError as error:
                log.error("worker %s is fenced: %s", link.worker_id, error)
                if not self._delivery.is_finished:
                    raise AttemptFailedError(f"worker {link.worker_id} is fenced: {error}") from None
            finally:
                call.cancel()

    def _max_wait_ms(self) -> int:
        """The rest of the time that the request may wait for others."""
        left_s = max(self._waits_until_s - time.monotonic(), 0.0)
        return min(round(1000 * left_s), _MOST_WAIT_MS)

    async def _pass_on(self, placed: PlacedRequest, call: Call) -> None:
        delivery, read, write = self._delivery, call.read, self._write
        longest = delivery.max_tokens = longest_context_of(placed.card, delivery.request.sampling)
        self._longest = max(self._longest, longest)
        num_before, is_shorter, is_outgrown = len(delivery.token_ids), longest < self._longest, False
        may_move = placed.card.role == worker_pb2.ROLE_PREFILL and self._num_moves < MAX_MOVES
        while (message := await read()) is not grpc.aio.EOF:
            assert isinstance(message, bytes)
            if is_shorter:
                message, is_outgrown = delivery.without_early_end(message, self._longest)
            delivery.accept(message)
            if self._card is None:
                self._card, self._adapter_sha256 = placed.card, placed.request.adapter_sha256
            if placed.booking.is_pending:
                placed.link.settle(placed.booking)
            await write(message)
            if is_outgrown:
                self._prefilled = Prefilled.at(placed, delivery.prompt.num_tokens + len(delivery.token_ids))
                raise OutgrownError
            if may_move and not delivery.is_finished:
                num_more = len(delivery.token_ids) - num_before
                if self._fleet.continues_elsewhere(placed, num_more, self._failed):
                    self._prefilled = Prefilled.at(placed, delivery.prompt.num_tokens)
                    raise PrefilledError
        if not delivery.is_finished:
            raise AttemptFailedError(f"worker {placed.link.worker_id} ended the stream without a finish")

    def _lost_worker(self, link: WorkerLink, life: Hashable, *, has_died: bool) -> None:
        load = link.reported.load
        num_reported = load.num_running + load.num_waiting + load.num_arrived
        self._suspects.lost(life, self._delivery, num_reported, has_died=has_died)

    def _judge(self, link: WorkerLink, life: Hashable, error: grpc.aio.AioRpcError) -> Exception:
        verdict = verdict_of(error)
        why = f"worker {link.worker_id}: {error.code().name}: {error.details()}"
        if verdict is Verdict.FINAL:
            return UpstreamError(error)
        if verdict is Verdict.FULL:
            return AttemptFailedError(why, "full", UpstreamError(error))
        if verdict is Verdict.GIVEN_BACK:
            message = detail_of(error, worker_pb2.GivenBack)
            if message is not None:
                link.given_back(message)
            # A worker that may not return the request any more refuses it.
            is_allowed = self._num_given_back < MAX_GIVEN_BACK
            return GivenBackError(why) if is_allowed else AttemptFailedError(why, "full")
        if verdict is Verdict.LOST:
            if was_reached(error):
                self._lost_worker(link, life, has_died=True)
            link.suspect(f"a call failed: {error.code().name}: {error.details()}")
        elif verdict is Verdict.DRAINING:
            link.draining()
            return AttemptFailedError(why, "draining")
        return AttemptFailedError(why)


def _is_cancelled_from_outside() -> bool:
    """Whether this task was cancelled, apart from an abandoned call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
