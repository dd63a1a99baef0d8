"""Spans by OpenTelemetry, sent by OTLP. The only module that imports it, itself imported only when tracing is on.

All environment variables of the SDK work (`OTEL_EXPORTER_OTLP_*`, `OTEL_SERVICE_NAME`,
`OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER`, `OTEL_BSP_*`). The protocol is gRPC unless
`OTEL_EXPORTER_OTLP_PROTOCOL` is `http/protobuf`.
"""

from __future__ import annotations

import os
import time
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headrace.common.telemetry.span import TRACEPARENT_KEY, Attributes, Span, SpanKind
from headrace.common.version import headrace_version

_KINDS = {
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
}
_PROPAGATOR = TraceContextTextMapPropagator()


class OtelTracer:
    """Makes the spans of one process with OpenTelemetry, and exports them in the background."""

    def __init__(self, role: str, endpoint: str | None) -> None:
        """`role` names the service unless the environment does. Raises ValueError for an unknown protocol or an invalid
        endpoint."""
        attributes = {"service.namespace": "headrace", "service.version": headrace_version()}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            attributes["service.name"] = f"headrace-{role}"
        # Not at exit: that would wait for a receiver that does not answer. See stop_tracing.
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint)))
        self._tracer = self._provider.get_tracer("headrace", headrace_version())

    def serving_span(self, name: str, traceparent: str, attributes: Attributes | None) -> Span:
        """See Tracer."""
        context = _PROPAGATOR.extract({TRACEPARENT_KEY: traceparent} if traceparent else {})
        span = self._tracer.start_span(name, context, trace.SpanKind.SERVER, attributes)
        return OtelSpan(self._tracer, span)

    def flush(self) -> None:
        """See Tracer."""
        self._provider.force_flush()


def _exporter(endpoint: str | None) -> SpanExporter:
    named = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = named or "grpc"
    if endpoint is not None and urlsplit(endpoint).scheme not in ("http", "https"):
        raise ValueError(f"--otlp-endpoint {endpoint!r} is not a URL: write http://HOST:4317")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        # The specification demands this for an endpoint of all signals.
        return HttpExporter(endpoint=None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces")
    raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: headrace speaks grpc and http/protobuf")


def _unix_ns(monotonic_s: float | None) -> int | None:
    """Unix time in nanoseconds of a moment on the monotonic clock."""
    if monotonic_s is None:
        return None
    return time.time_ns() - time.monotonic_ns() + int(monotonic_s * 1e9)


class OtelSpan(Span):
    """A span that is recorded, unless the trace's sampler drops it. Attributes after its end are ignored: a background
    answer may outlive its request."""

    __slots__ = ("_lists", "_span", "_sums", "_tracer")

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._sums: dict[str, int] = {}
        self._lists: dict[str, list[str]] = {}

    @property
    def is_recording(self) -> bool:
        """See Span."""
        return self._span.is_recording()

    @property
    def traceparent(self) -> str:
        """See Span."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def child(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        start_s: float | None = None,
    ) -> Span:
        """See Span."""
        above = trace.set_span_in_context(self._span)
        span = self._tracer.start_span(name, above, _KINDS[kind], attributes, start_time=_unix_ns(start_s))
        return OtelSpan(self._tracer, span)

    def set(self, attributes: Attributes) -> None:
        """See Span."""
        if self.is_recording:
            self._span.set_attributes(attributes)

    def add(self, name: str, number: int) -> None:
        """See Span."""
        total = self._sums[name] = self._sums.get(name, 0) + number
        self.set({name: total})

    def append(self, name: str, text: str) -> None:
        """See Span."""
        texts = self._lists.setdefault(name, [])
        texts.append(text)
        self.set({name: texts})

    def event(self, name: str, attributes: Attributes | None = None, *, at_s: float | None = None) -> None:
        """See Span."""
        if self.is_recording:
            self._span.add_event(name, attributes, _unix_ns(at_s))

    def fail(self, error_type: str, message: str = "") -> None:
        """See Span."""
        if self.is_recording:
            self._span.set_attribute("error.type", error_type)
            self._span.set_status(trace.StatusCode.ERROR, message or None)

    def end(self, *, end_s: float | None = None) -> None:
        """See Span."""
        if self.is_recording:
            self._span.end(_unix_ns(end_s))
