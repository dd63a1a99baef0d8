"""What traces and the access log are told of requests.

Attributes are named by OpenTelemetry's semantic conventions, those of generative AI among them; what these do not know
begins with `headrace.`. No text of a prompt or an answer is in any.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.protos.inference_pb2 import GenerateRequest
from headrace.protos.tracing import NO_SPAN, Span, SpanKind, current_span, serving_span

if TYPE_CHECKING:
    from headrace.gateway.endpoint import Endpoint
    from headrace.gateway.exchange import Exchange
    from headrace.gateway.generation import Plan

ATTEMPT_SPAN = "headrace.v1.Inference/Generate"
ACCESS = logging.getLogger("headrace.gateway.access")
# Probes and scrapes come every second or so, and say nothing.
_UNOBSERVED = frozenset({"health", "metrics"})
_MAX_PATH_BYTES = 200
_OPERATIONS = {"completions": "text_completion", "Complete": "text_completion"}
# Fields of the message of the same name, and what conventions call them.
_SAMPLING = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
}


def begin_request(exchange: Exchange, endpoint: Endpoint) -> Span:
    """The span of an HTTP request, the current one of this task."""
    if endpoint.name in _UNOBSERVED:
        return NO_SPAN
    method = exchange.scope["method"][:20]
    span = serving_span(f"{method} {endpoint.path}".rstrip(), exchange.caller.traceparent)
    if span.is_recording:
        span.set(
            {
                "http.request.method": method,
                "http.route": endpoint.path,
                "url.path": _path(exchange),
                "headrace.request_id": exchange.caller.request_id,
                "gen_ai.operation.name": _OPERATIONS.get(endpoint.name, endpoint.name),
            }
        )
    return span


def end_request(span: Span, exchange: Exchange, endpoint: Endpoint, outcome: str) -> None:
    """The request was answered; `outcome` is as in metrics."""
    if span.is_recording:
        span.set({"headrace.outcome": outcome, "http.response.status_code": exchange.status})
        if outcome == "cancelled":
            span.set({"headrace.cancelled": True})
        elif outcome != "ok":
            span.set({"error.type": outcome})
            if exchange.status >= 500:
                span.fail(outcome)
    span.end()
    if endpoint.name not in _UNOBSERVED and ACCESS.isEnabledFor(logging.INFO):
        took_s = time.monotonic() - exchange.caller.arrived_s
        ACCESS.info("%s %s %d %s %.3f s", exchange.scope["method"], _path(exchange), exchange.status, outcome, took_s)


def _path(exchange: Exchange) -> str:
    """As it was sent, percent signs and all, and without what stands behind a question mark: that may be a secret."""
    raw: bytes = exchange.scope.get("raw_path", b"")
    return raw[:_MAX_PATH_BYTES].decode("ascii", "replace")


def describe_plans(plans: Sequence[Plan]) -> None:
    """Tell the current span what is asked for."""
    span = current_span()
    if not span.is_recording or not plans:
        return
    first = plans[0].requests[0]
    sampling = first.sampling
    given = {name: getattr(sampling, field) for field, name in _SAMPLING.items() if sampling.HasField(field)}
    span.set(
        {
            "gen_ai.provider.name": "headrace",
            "gen_ai.request.model": first.model,
            "gen_ai.response.model": first.model,
            "gen_ai.request.choice.count": sum(len(plan.requests) for plan in plans),
            "gen_ai.usage.input_tokens": sum(len(plan.job.token_ids) for plan in plans),
            **given,
        }
    )


def begin_attempt(request: GenerateRequest, address: str) -> Span:
    """The span of a call upstream."""
    span = current_span().child(ATTEMPT_SPAN, kind=SpanKind.CLIENT)
    if span.is_recording:
        span.set(
            {
                "rpc.system": "grpc",
                "server.address": address,
                "headrace.attempt": request.attempt,
                "headrace.num_resumed_tokens": len(request.resume_token_ids),
            }
        )
    return span
