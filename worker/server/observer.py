"""Metrics, spans and log lines of each request. Called once or twice per request."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from headrace.common.telemetry.logs import NO_REQUEST, request_id_of, request_id_var
from headrace.common.telemetry.span import Span
from headrace.common.telemetry.tracing import serving_span, traceparent_of
from headrace.protos.inference_pb2 import GenerateRequest
from headrace.protos.status import Reason, StatusError
from headrace.worker.request.request import Request
from headrace.worker.server.spans import trace_request

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
        """A request was refused with `error`: count it, and end its span."""
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
        """An image of a request was refused, for the reason that the word names."""
        if self._metrics is not None:
            self._metrics.image_refused(label)

    def broken_off(self, span: Span, error: BaseException) -> None:
        """The call was cancelled, or its handler failed, before the engine had the request."""
        span.__exit__(type(error), error, None)

    def ended(self, span: Span, request: Request, error: StatusError | None, *, is_whole: bool) -> None:
        """The request has ended. Without `is_whole` and without an error, its caller has disconnected."""
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
