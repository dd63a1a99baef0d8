"""Spans and the access log of HTTP requests.

Attributes have the names of OpenTelemetry's semantic conventions, including those of generative AI; others begin with
`headrace.`. No attribute contains text of a prompt or an answer.
"""

from __future__ import annotations

import logging
import time

from headrace.common.telemetry.span import NO_SPAN, Span
from headrace.common.telemetry.tracing import serving_span
from headrace.gateway.edge.endpoint import Endpoint
from headrace.gateway.edge.exchange import Exchange

ACCESS = logging.getLogger("headrace.gateway.access")
# Probes and scrapes arrive about every second and are not traced.
_MAX_PATH_BYTES = 200
_OPERATIONS = {"completions": "text_completion", "Complete": "text_completion"}


def begin_request(exchange: Exchange, endpoint: Endpoint) -> Span:
    """The span of an HTTP request, the current one of this task."""
    if endpoint.is_probe:
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
    if not endpoint.is_probe and ACCESS.isEnabledFor(logging.INFO):
        took_s = time.monotonic() - exchange.caller.arrived_s
        ACCESS.info("%s %s %d %s %.3f s", exchange.scope["method"], _path(exchange), exchange.status, outcome, took_s)


def _path(exchange: Exchange) -> str:
    """The path as it was sent, percent-encoded, and without the query, which may contain a secret."""
    raw: bytes = exchange.scope.get("raw_path", b"")
    return raw[:_MAX_PATH_BYTES].decode("ascii", "replace")
