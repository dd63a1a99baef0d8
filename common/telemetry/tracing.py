"""Traces of requests through gateway, router and worker: the interface that all code uses.

    with serving_span("headrace.v1.Inference/Generate", traceparent, {...}):
        with current_span().child("place") as span:
            span.set({"headrace.placement.reason": "prefix"})

Without an endpoint for spans, tracing is off: every span is `NO_SPAN`, OpenTelemetry is not imported, and the caller's
traceparent is passed on unchanged. Processes share a trace through `traceparent` in the metadata of calls (W3C Trace
Context). `current_span` finds the current span of a task, also in tasks that it starts.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
from collections.abc import Iterable
from typing import Protocol

from headrace.common.telemetry.span import NO_SPAN, TRACEPARENT_KEY, Attributes, Span

log = logging.getLogger(__name__)

FLUSH_TRACES_S = 1.0
"""How long a stopping process waits until its last spans are sent."""
EXTRA = "headrace[otel]"
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class TracingUnavailableError(Exception):
    """Tracing was requested and is not possible. The message has the remedy."""


class Tracer(Protocol):
    """Makes spans; see `otel`."""

    def serving_span(self, name: str, traceparent: str, attributes: Attributes | None) -> Span:
        """A span of kind SERVER, below the one that the traceparent names or the root of a new trace."""
        ...

    def flush(self) -> None:
        """Send the spans that have ended. This may take long."""
        ...


_tracer: Tracer | None = None
_current: contextvars.ContextVar[Span] = contextvars.ContextVar("span", default=NO_SPAN)


def serving_span(name: str, traceparent: str, attributes: Attributes | None = None) -> Span:
    """The span of a new request. It is the current span of this task from now on."""
    if _tracer is None:
        return NO_SPAN
    span = _tracer.serving_span(name, traceparent, attributes)
    _current.set(span)
    return span


def current_span() -> Span:
    """The span of the request that the running task works for."""
    return NO_SPAN if _tracer is None else _current.get()


def traceparent_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """The trace context in the metadata of a call; empty for none."""
    for key, value in metadata or ():
        if key == TRACEPARENT_KEY and isinstance(value, str):
            return value
    return ""


def start_tracing(role: str, endpoint: str | None) -> None:
    """Send the spans of this process to an OTLP receiver: the one given, or the one that OpenTelemetry's environment
    variables name; without either, tracing stays off.

    Raises TracingUnavailableError if an endpoint was given and OpenTelemetry is not installed. Variables may be set
    for a whole host, so with them alone it is only a warning.
    """
    global _tracer
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    named = any(os.environ.get(name) for name in _ENDPOINT_VARIABLES)
    if disabled or not (endpoint or named) or os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return
    try:
        from headrace.common.telemetry.otel import OtelTracer
    except ImportError as error:
        problem = f"traces need OpenTelemetry, which is not installed ({error}): pip install '{EXTRA}'"
        if endpoint:
            raise TracingUnavailableError(problem) from None
        log.warning("no traces are sent: %s", problem)
        return
    try:
        _tracer = OtelTracer(role, endpoint)
    except ValueError as error:
        raise TracingUnavailableError(str(error)) from None


def stop_tracing(timeout_s: float) -> None:
    """Send the spans that have ended, within a time limit, and stop tracing."""
    global _tracer
    tracer, _tracer = _tracer, None
    if tracer is None:
        return
    flushing = threading.Thread(target=tracer.flush, name="flush-traces", daemon=True)
    flushing.start()
    flushing.join(timeout_s)
