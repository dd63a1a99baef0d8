"""A receiver of traces that acts as an OTLP collector over gRPC and HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.http_server import body_of, http_server, respond


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came over the wire; ids in hex, times in nanoseconds."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(entry) for entry in value.array_value.values]
    return getattr(value, kind)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


@dataclass
class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Stores the received spans. `url` is its address."""

    url: str = ""
    _spans: list[ReceivedSpan] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def spans(self) -> list[ReceivedSpan]:
        """All spans received so far."""
        with self._lock:
            return list(self._spans)

    def of_trace(self, trace_id: str) -> list[ReceivedSpan]:
        """The spans of one trace."""
        return [span for span in self.spans if span.trace_id == trace_id]

    def Export(self, request: Any, context: Any) -> Any:
        self.take(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def take(self, request: Any) -> None:
        """Store the spans of one export."""
        for resource_spans in request.resource_spans:
            service = _attributes(resource_spans.resource.attributes)["service.name"]
            for scope in resource_spans.scope_spans:
                found = [self._received(service, span) for span in scope.spans]
                with self._lock:
                    self._spans += found

    def _received(self, service: str, span: Any) -> ReceivedSpan:
        return ReceivedSpan(
            service,
            span.name,
            trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
            _attributes(span.attributes),
            [(event.name, _attributes(event.attributes)) for event in span.events],
        )


@contextmanager
def grpc_receiver() -> Iterator[Receiver]:
    """A receiver that speaks OTLP over gRPC."""
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    receiver.url = f"http://127.0.0.1:{port}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()


@contextmanager
def http_receiver() -> Iterator[Receiver]:
    """A receiver that speaks OTLP over HTTP, with protobuf bodies."""
    receiver = Receiver()

    def take(handler: BaseHTTPRequestHandler) -> None:
        found = handler.path == "/v1/traces"
        if found:
            receiver.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body_of(handler)))
        respond(handler, 200 if found else 404)

    with http_server(post=take) as receiver.url:
        yield receiver
