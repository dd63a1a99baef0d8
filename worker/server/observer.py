"""Metrics, spans and log lines of each request. Called once or twice per request."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from headrace.common.telemetry.logs import NO_REQUEST, request_id_of, request_id_var
from headrace.common.telemetry.span import Span
from headrace.common.telemetry.tracing import serving_span, traceparent_of
from headrace.protos.inference_pb2 import GenerateRequest
from headrace.protos.status import Reason, StatusError
from headrace.worker.request.request import Request, StepNote

if TYPE_CHECKING:
    from headrace.worker.server.metrics import RequestMetrics

log = logging.getLogger(__name__)

GENERATE_SPAN = "headrace.v1.Inference/Generate"


class RequestObserver:
    """Observes the requests of a worker. `metrics` is None if they are not served."""

    def __init__(self, metrics: RequestMetrics | None = None) -> None:
        self._metrics = metrics

    def arrived(self, message: GenerateRequest, metadata: Iterable[tuple[str, str | bytes]] | None) -> Span:
        """Begin the span of a call. Log records of this task carry its request id from now on."""
        request_id = request_id_of(metadata) or message.request_id or NO_REQUEST
        request_id_var.set(request_id)
        span = serving_span(GENERATE_SPAN, traceparent_of(metadata))
        if span.is_recording:
            span.set(
                {
                    "rpc.system": "grpc",
                    "headrace.request_id": request_id,
                    "headrace.attempt": message.attempt,
                    "gen_ai.request.model": message.model,
                }
            )
        return span

    def refused(self, span: Span, error: StatusError) -> None:
        """Count a request that was refused with `error`, and end its span."""
        if error.reason is Reason.GIVEN_BACK:  # its router places it again, so this is not a refusal
            span.set({"headrace.given_back": True})
            span.end()
            return
        if self._metrics is not None:
            self._metrics.refused(error.reason)
        log.debug("refused: %s", error.message)
        span.fail(error.reason.name.lower(), error.message)
        span.end()

    def image_refused(self, label: str) -> None:
        """Count a request that was refused because of an image. `label` is one word for the reason."""
        if self._metrics is not None:
            self._metrics.image_refused(label)

    def broken_off(self, span: Span, error: BaseException) -> None:
        """End the span of a call that was cancelled, or whose handler failed, before the engine had the request."""
        span.__exit__(type(error), error, None)

    def ended(self, span: Span, request: Request, error: StatusError | None, *, is_whole: bool) -> None:
        """Record that the request has ended. Without `is_whole` and without an error, its caller has disconnected."""
        now_s = time.monotonic()
        if self._metrics is not None:
            self._metrics.ended(request, now_s)
        if error is not None:
            span.fail(error.reason.name.lower(), error.message)
            log.warning("failed after %d tokens: %s", request.num_generated_tokens, error.message)
        elif log.isEnabledFor(logging.DEBUG):
            log.debug(
                "%s after %.3f s: %d prompt tokens, %d of them cached, %d generated",
                "ended" if is_whole else "cancelled",
                now_s - request.arrival_s,
                request.num_prompt_tokens,
                request.num_cached_tokens,
                request.num_generated_tokens,
            )
        trace_request(span, request, now_s)
        span.end()


def trace_request(span: Span, request: Request, now_s: float) -> None:
    """Add to the span of a request that has ended how long it waited, was computed and answered, from the times that
    the engine has recorded, with the engine's steps as events. `now_s` is on the monotonic clock."""
    if not span.is_recording:
        return
    ended_s = request.ended_s or now_s
    span.set(
        {
            "headrace.num_prompt_tokens": request.num_prompt_tokens,
            "headrace.num_cached_tokens": request.num_cached_tokens,
            "headrace.num_generated_tokens": request.num_generated_tokens,
            "headrace.num_resumed_tokens": len(request.resume_token_ids),
            "headrace.num_preemptions": request.num_preemptions,
        }
    )
    queue = span.child("queue", start_s=request.arrival_s)
    queue.end(end_s=request.scheduled_s or ended_s)
    if request.images:
        span.set({"headrace.num_images": len(request.images)})
    if request.images_ready_s:
        encoding = span.child("images", start_s=request.images_ready_s - request.image_wait_s)
        encoding.end(end_s=request.images_ready_s)
    if not request.scheduled_s:
        return
    first_token_s = request.first_token_s or ended_s
    # The step that gave the first token began in the prefill phase.
    steps = request.steps or []
    _phase(span, "prefill", request.scheduled_s, first_token_s, [s for s in steps if s.start_s < first_token_s])
    if request.first_token_s:
        _phase(span, "decode", first_token_s, ended_s, [s for s in steps if s.start_s >= first_token_s])


def _phase(span: Span, name: str, start_s: float, end_s: float, steps: Sequence[StepNote]) -> None:
    phase = span.child(name, {"headrace.num_noted_steps": len(steps)}, start_s=start_s)
    for step in steps:
        phase.event(
            "engine.step",
            {
                "headrace.step.duration_ms": 1000 * step.duration_s,
                "headrace.step.num_tokens": step.num_tokens,
                "headrace.step.num_batch_tokens": step.num_batch_tokens,
                "headrace.step.num_batch_requests": step.num_batch_requests,
            },
            at_s=step.start_s,
        )
    phase.end(end_s=end_s)
