"""One request from arrival to its end: place, forward, and when a worker is lost, place again and resume.

    next place -> attempt -> finish delivered: done
        ^            |
        |            +-- the worker was lost, refused, or sent what does not fit
        +------------+   (tokens already delivered go along as resume)

Whatever the end, the booking is released and the call to the worker is over when `run` returns or raises.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import cast

import grpc

from headrace.protos import worker_pb2
from headrace.protos.sessions import Call
from headrace.protos.status import Reason, StatusError, error_of
from headrace.protos.tracing import Span, SpanKind, current_span
from headrace.router.admission import Admission, has_begun
from headrace.router.delivery import Delivery, FencedError
from headrace.router.fleet import Fleet, PlacedRequest, RoutedRequest
from headrace.router.links import WorkerLink
from headrace.router.metrics import RouterMetrics
from headrace.router.spans import describe_placement

log = logging.getLogger(__name__)

Metadata = Sequence[tuple[str, str | bytes]]
_DETAILS_KEY = "grpc-status-details-bin"
_RETRY_AFTER_S = 1.0
ATTEMPT_SPAN = "headrace.v1.Inference/Generate"
# What the transport says by itself when a connection or a server goes away under a call.
_TRANSPORT_MESSAGES = ("RST_STREAM", "Stream removed", "GOAWAY", "Socket closed", "Connection reset")


@dataclass(frozen=True, slots=True)
class ForwardingConfig:
    """`max_attempts` bounds the workers that one request may use up."""

    max_attempts: int = 4


class UpstreamError(Exception):
    """A worker's own error, to be passed on as it is."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(error.details())
        self.code = error.code()
        self.details = error.details() or ""
        self.trailing_metadata = tuple(cast("Metadata", tuple(error.trailing_metadata() or ())))


class Verdict(enum.Enum):
    """What a failed call to a worker means for its request."""

    LOST = enum.auto()  # the worker or the way to it failed: go elsewhere, and suspect it
    LOST_BEHIND = enum.auto()  # it says that something behind it failed: go elsewhere
    DRAINING = enum.auto()  # it takes no requests: go elsewhere
    FULL = enum.auto()  # it has no room: go elsewhere if there is an elsewhere
    FINAL = enum.auto()  # the answer to this request, wherever it is asked


def verdict_of(error: grpc.aio.AioRpcError) -> Verdict:
    """Read a failed call. An error that carries our details was made by a worker, one without by the transport."""
    code = error.code()
    if any(key == _DETAILS_KEY for key, _ in cast("Metadata", tuple(error.trailing_metadata() or ()))):
        reason = error_of(error).reason
        by_reason = {
            Reason.WORKER_LOST: Verdict.LOST_BEHIND,
            Reason.DRAINING: Verdict.DRAINING,
            Reason.QUEUE_FULL: Verdict.FULL,
            Reason.NO_CAPACITY: Verdict.FULL,
        }
        return by_reason.get(reason, Verdict.FINAL)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return Verdict.LOST
    if code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) and any(
        words in (error.details() or "") for words in _TRANSPORT_MESSAGES
    ):
        return Verdict.LOST
    return Verdict.FINAL


class _AttemptFailedError(Exception):
    """This worker will not end the request; another one may. `passed_on` is its own error, for want of another."""

    def __init__(self, why: str, passed_on: UpstreamError | None = None) -> None:
        super().__init__(why)
        self.passed_on = passed_on


class _Call:
    """A running call to a worker, which its link may abandon."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.abandoned_because: str | None = None

    def abandon(self, why: str) -> None:
        """End the call; the reader learns why."""
        self.abandoned_because = why
        self._call.cancel()


class Forwarding:
    """One request on its way. `write` hands a message to the client, `remaining_s` tells its deadline (None: none)."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        metrics: RouterMetrics,
        config: ForwardingConfig,
        raw: bytes,
        metadata: Metadata,
        write: Callable[[bytes], Awaitable[None]],
        remaining_s: Callable[[], float | None],
    ) -> None:
        """Raises StatusError if `raw` is no GenerateRequest."""
        self._fleet = fleet
        self._admission = admission
        self._metrics = metrics
        self._config = config
        self._metadata = metadata
        self._write = write
        self._remaining_s = remaining_s
        self._delivery = Delivery(raw)
        self._card: worker_pb2.ModelCard | None = None  # of the worker whose tokens were delivered
        self._failed: dict[WorkerLink, int] = {}  # workers that failed -> their incarnation at that time

    async def run(self) -> None:
        """Deliver the whole answer. Raises StatusError or UpstreamError when that is impossible."""
        try:
            with self._admission.counted(self._delivery.request):
                await self._deliver()
        finally:
            if self._card is not None:
                self._fleet.answer_lengths.ended(self._card.name, len(self._delivery.token_ids))

    async def _deliver(self) -> None:
        why = ""
        for attempt in range(self._config.max_attempts):
            if attempt:
                self._metrics.resumes.inc()
                log.info("request %r goes elsewhere: %s", self._delivery.request.request_id, why)
            if self._card is not None and await self._close(self._card):
                return
            placed = await self._next_place()
            try:
                if await self._close(placed.card):
                    return
                await self._attempt(placed)
                return
            except _AttemptFailedError as failure:
                self._failed[placed.link] = placed.link.incarnation
                if failure.passed_on is not None and not self._has_elsewhere(placed):
                    raise failure.passed_on from None
                why = str(failure)
            finally:
                placed.link.release(placed.booking)
        if self._card is not None and await self._close(self._card):
            return
        raise StatusError(
            Reason.WORKER_LOST,
            f"{self._config.max_attempts} workers were lost over this request; the last one: {why}",
            retry_after_s=_RETRY_AFTER_S,
        )

    async def _close(self, card: worker_pb2.ModelCard) -> bool:
        """Deliver the finish from here if the tokens delivered already end the answer; whether they do."""
        message = self._delivery.closing_message(card)
        if message is None:
            return False
        self._delivery.accept(message)
        await self._write(message)
        return True

    # -- placing ----------------------------------------------------------------------------------------------------

    async def _next_place(self) -> PlacedRequest:
        """Book a worker, if need be when one has room or comes back. Raises StatusError when none does in time."""
        arrived_s = time.monotonic()
        with current_span().child("place") as span:
            placed = await self._await_place()
            describe_placement(span, placed)
        self._metrics.queue_seconds.observe(time.monotonic() - arrived_s)
        self._metrics.decision_seconds.observe(placed.decision_s)
        self._metrics.placements[placed.placement.reason].inc()
        log.debug("placed on %s: %s", placed.link.worker_id, placed.placement.reason.value)
        return placed

    async def _await_place(self) -> PlacedRequest:
        wait_until_s = time.monotonic() + self._admission.capacity_wait_s
        delivery = self._delivery
        is_new = not self._failed and not has_begun(delivery.request)
        request = RoutedRequest(delivery.request, delivery.prompt, len(delivery.token_ids))
        while True:
            card = self._card or self._fleet.resolve(delivery.request.model)
            if card is not None and is_new:
                return await self._admission.place(request, delivery.request, card, self._remaining_s())
            placed = None if card is None else self._place_again(request, card)
            if placed is not None:
                return placed
            left_s = wait_until_s - time.monotonic()
            if left_s <= 0:
                raise self._admission.no_capacity(delivery.request.model)
            await self._fleet.changed(left_s)

    def _place_again(self, request: RoutedRequest, card: worker_pb2.ModelCard) -> PlacedRequest | None:
        """Decide now. A worker that failed is asked again only if it came back since and there is no other."""
        same_weights = self._card is not None
        placed = self._fleet.place(request, card, self._failed.keys(), same_weights=same_weights)
        if placed is None and self._failed:
            still_failed = {link for link, incarnation in self._failed.items() if link.incarnation == incarnation}
            placed = self._fleet.place(request, card, still_failed, same_weights=same_weights)
        return placed

    def _has_elsewhere(self, placed: PlacedRequest) -> bool:
        return any(
            link.is_ready and link not in self._failed and link.card is not None and link.card.name == placed.card.name
            for link in self._fleet.links()
        )

    # -- one attempt ------------------------------------------------------------------------------------------------

    async def _attempt(self, placed: PlacedRequest) -> None:
        """Forward until the finish is delivered. Raises _AttemptFailedError or UpstreamError."""
        with current_span().child(ATTEMPT_SPAN, kind=SpanKind.CLIENT) as span:
            if span.is_recording:
                resumed = len(self._delivery.token_ids)
                span.set({"headrace.worker": placed.link.worker_id, "headrace.num_resumed_tokens": resumed})
            await self._try(placed, span)

    async def _try(self, placed: PlacedRequest, span: Span) -> None:
        raw = self._delivery.next_attempt()
        call = placed.link.generate(raw, timeout=self._remaining_s(), metadata=span.onto(self._metadata))
        running = _Call(call)
        try:
            with placed.link.running(running):
                await self._pass_on(placed, call)
        except grpc.aio.AioRpcError as error:
            if not self._delivery.is_finished:  # what comes after the finish no longer matters
                raise self._judge(placed.link, error) from None
        except asyncio.CancelledError:
            if running.abandoned_because is None or _is_cancelled_from_outside():
                raise
            if not self._delivery.is_finished:
                raise _AttemptFailedError(running.abandoned_because) from None
        except FencedError as error:
            log.error("worker %s is fenced: %s", placed.link.worker_id, error)
            raise _AttemptFailedError(f"worker {placed.link.worker_id} is fenced: {error}") from None
        finally:
            call.cancel()

    async def _pass_on(self, placed: PlacedRequest, call: Call) -> None:
        delivery, read, write = self._delivery, call.read, self._write
        delivery.max_tokens = placed.card.max_context_tokens
        while (message := await read()) is not grpc.aio.EOF:
            assert isinstance(message, bytes)
            delivery.accept(message)
            if self._card is None:
                self._card = placed.card
            placed.link.settle(placed.booking)
            await write(message)
        if not delivery.is_finished:
            raise _AttemptFailedError(f"worker {placed.link.worker_id} ended the stream without a finish")

    def _judge(self, link: WorkerLink, error: grpc.aio.AioRpcError) -> Exception:
        verdict = verdict_of(error)
        why = f"worker {link.worker_id}: {error.code().name}: {error.details()}"
        if verdict is Verdict.FINAL:
            return UpstreamError(error)
        if verdict is Verdict.FULL:
            return _AttemptFailedError(why, passed_on=UpstreamError(error))
        if verdict is Verdict.LOST:
            link.suspect(f"a call failed: {error.code().name}: {error.details()}")
        elif verdict is Verdict.DRAINING:
            link.draining()
        return _AttemptFailedError(why)


def _is_cancelled_from_outside() -> bool:
    """Whether somebody cancelled this task, besides a call being abandoned under it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
