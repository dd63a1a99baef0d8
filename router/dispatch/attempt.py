"""One attempt at a request: forwards it to its worker, and the answer to its client."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Hashable, Sequence
from typing import NamedTuple, cast

import grpc

from headrace.common.ledger import FencedError
from headrace.common.retries import AT_WORKERS, Verdict, verdict_of
from headrace.common.telemetry.span import Span, SpanKind
from headrace.common.telemetry.tracing import current_span
from headrace.common.transport.sessions import Call
from headrace.protos import worker_pb2
from headrace.protos.status import detail_of
from headrace.router.dispatch.generation import Generation
from headrace.router.dispatch.suspects import Suspects
from headrace.router.fleet.fleet import Fleet
from headrace.router.fleet.links import WorkerLink
from headrace.router.fleet.routed_request import PlacedRequest, Prefilled
from headrace.router.placement.policy import MAX_GIVEN_BACK

log = logging.getLogger(__name__)

_MOST_WAIT_MS = (1 << 32) - 1  # the maximum of the field's type
MAX_MOVES = 4  # of one answer from workers that are reserved for prompts
ATTEMPT_SPAN = "headrace.v1.Inference/Generate"


class UpstreamError(Exception):
    """A worker's own error, which is passed on unchanged."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(error.details())
        self.code = error.code()
        self.details = error.details() or ""
        metadata = cast("Sequence[tuple[str, str | bytes]]", tuple(error.trailing_metadata() or ()))
        self.trailing_metadata = tuple(metadata)


class End(enum.Enum):
    """The way in which an attempt ended without a finish, if the answer can continue."""

    LOST = enum.auto()  # the worker will not finish it
    REFUSED = enum.auto()  # the worker is full or draining
    GIVEN_BACK = enum.auto()  # the worker has more work than was believed when the request was placed there
    PREFILLED = enum.auto()  # the worker has computed the prompt, and is reserved for prompts
    OUTGROWN = enum.auto()  # the answer has reached the end of the worker's context, and others have longer ones


class Outcome(NamedTuple):
    """The end of an attempt without a finish. `refusal` says why the worker refused the request, `full` or `draining`.
    `error` is the worker's own error, for the case that there is no other worker."""

    end: End
    why: str = ""
    refusal: str = ""
    error: UpstreamError | None = None


class _RunningCall:
    """A running call to a worker, which its link may abandon."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.abandoned_because: str | None = None

    def abandon(self, why: str) -> None:
        """End the call. The reader gets the reason."""
        self.abandoned_because = why
        self._call.cancel()


class Attempting:
    """Makes attempts to answer requests at workers, and reports what each attempt ends with."""

    def __init__(self, fleet: Fleet, suspects: Suspects) -> None:
        self._fleet = fleet
        self._suspects = suspects

    async def run(self, generation: Generation, placed: PlacedRequest) -> Outcome | None:
        """Forward the request to the worker where it was placed, and the answer to the client.

        Returns None when the finish is delivered, otherwise how the attempt ended. The call to the worker has ended
        then. Raises UpstreamError if every worker would answer the same.
        """
        ledger = generation.ledger
        with current_span().child(ATTEMPT_SPAN, kind=SpanKind.CLIENT) as span:
            if span.is_recording:
                resumed = len(ledger.token_ids)
                span.set({"headrace.worker": placed.link.worker_id, "headrace.num_resumed_tokens": resumed})
            outcome = await self._forward(generation, placed, span)
            if ledger.is_finished:  # what comes after the finish no longer matters
                return None
            if outcome is not None and outcome.end in (End.LOST, End.REFUSED, End.GIVEN_BACK):
                span.fail(outcome.refusal or outcome.end.name.lower(), outcome.why)
            return outcome

    async def _forward(self, generation: Generation, placed: PlacedRequest, span: Span) -> Outcome | None:
        link = placed.link
        life = placed.link.incarnation
        belief = placed.belief(may_be_given_back=generation.num_given_back < MAX_GIVEN_BACK)
        left_ms = round(1000 * max(generation.waits_until_s - time.monotonic(), 0.0))
        wire = generation.next_attempt(min(left_ms, _MOST_WAIT_MS), belief, placed.placement.source)
        call = link.generate(wire, timeout=generation.remaining_s(), metadata=span.onto(generation.metadata))
        running = _RunningCall(call)
        with link.running(running), self._suspects.running(life, generation):
            try:
                return await self._pass_on(generation, placed, call)
            except grpc.aio.AioRpcError as error:
                return None if generation.ledger.is_finished else self._judged(generation, link, life, error)
            except asyncio.CancelledError:
                if running.abandoned_because is None or _is_cancelled_from_outside():
                    raise
                if not generation.ledger.is_finished:
                    self._note_loss(generation, link, life, has_died=False)
                return Outcome(End.LOST, running.abandoned_because)
            except FencedError as error:
                log.error("worker %s is fenced: %s", link.worker_id, error)
                return Outcome(End.LOST, f"worker {link.worker_id} is fenced: {error}")
            finally:
                call.cancel()

    async def _pass_on(self, generation: Generation, placed: PlacedRequest, call: Call) -> Outcome | None:
        """Pass on the messages of a call."""
        ledger = generation.ledger
        read = call.read
        num_before = len(ledger.token_ids)
        may_outgrow = generation.begin_at(placed.card)
        may_move = placed.card.role == worker_pb2.ROLE_PREFILL and generation.num_moves < MAX_MOVES
        while (raw := await read()) is not grpc.aio.EOF:
            assert isinstance(raw, bytes)
            message, is_outgrown = generation.record(raw, placed.card, may_outgrow=may_outgrow)
            if placed.booking.is_pending:
                placed.link.settle(placed.booking)
            await generation.send(message)
            if is_outgrown:
                generation.prefilled = Prefilled.at(placed, ledger.num_prompt_tokens + len(ledger.token_ids))
                return Outcome(End.OUTGROWN)
            if may_move and not ledger.is_finished:
                num_more = len(ledger.token_ids) - num_before
                if self._fleet.continues_elsewhere(placed, num_more, generation.failed):
                    generation.prefilled = Prefilled.at(placed, ledger.num_prompt_tokens)
                    return Outcome(End.PREFILLED)
        return Outcome(End.LOST, f"worker {placed.link.worker_id} ended the stream without a finish")

    def _judged(self, generation: Generation, link: WorkerLink, life: Hashable, error: grpc.aio.AioRpcError) -> Outcome:
        """The outcome that follows from the failure of a call. Raises UpstreamError if the failure is final."""
        verdict = verdict_of(error, AT_WORKERS)
        why = f"worker {link.worker_id}: {error.code().name}: {error.details()}"
        if verdict is Verdict.FULL:
            return Outcome(End.REFUSED, why, "full", UpstreamError(error))
        if verdict is Verdict.GIVEN_BACK:
            message = detail_of(error, worker_pb2.GivenBack)
            if message is not None:
                link.given_back(message)
            # A worker that may not return the request any more refuses it.
            is_allowed = generation.num_given_back < MAX_GIVEN_BACK
            return Outcome(End.GIVEN_BACK, why) if is_allowed else Outcome(End.REFUSED, why, "full")
        if verdict is Verdict.DRAINING:
            link.draining()
            return Outcome(End.REFUSED, why, "draining")
        if verdict is Verdict.LOST:
            if _was_reached(error):
                self._note_loss(generation, link, life, has_died=True)
            link.suspect(f"a call failed: {error.code().name}: {error.details()}")
        elif verdict is not Verdict.LOST_BEHIND:
            raise UpstreamError(error)
        return Outcome(End.LOST, why)

    def _note_loss(self, generation: Generation, link: WorkerLink, life: Hashable, *, has_died: bool) -> None:
        load = link.reported.load
        num_reported = load.num_running + load.num_waiting + load.num_arrived
        self._suspects.lost(life, generation, num_reported, has_died=has_died)


def _was_reached(error: grpc.aio.AioRpcError) -> bool:
    """Whether a lost worker may have received the call. It has not if the connection could not be made."""
    return "ailed to connect" not in (error.details() or "")


def _is_cancelled_from_outside() -> bool:
    """Whether this task was cancelled, apart from an abandoned call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
