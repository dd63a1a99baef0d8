"""Spans are sent by OTLP if that is configured, and not at all otherwise."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from headrace.common.telemetry import tracing
from headrace.common.telemetry.span import NO_SPAN, Attributes, Span, SpanKind
from headrace.common.telemetry.tracing import (
    TracingUnavailableError,
    current_span,
    serving_span,
    start_tracing,
    stop_tracing,
    traceparent_of,
)
from headrace.protos.status import Reason, StatusError
from tests import collector
from tests.otlp import ReceivedSpan, Receiver, grpc_receiver, http_receiver
from tests.patience import patience, until

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


@pytest.fixture(autouse=True)
def no_tracing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    yield
    stop_tracing(0.0)


def named(receiver: Receiver, name: str) -> ReceivedSpan:
    (span,) = [span for span in receiver.spans if span.name == name]
    return span


def test_while_tracing_is_off_every_span_is_the_one_that_records_nothing() -> None:
    start_tracing("gateway", None)
    with serving_span("request", TRACEPARENT) as span, span.child("work") as child:
        assert span is child is current_span() is NO_SPAN
    metadata = (("x-request-id", "r"), ("traceparent", TRACEPARENT))
    assert NO_SPAN.onto(metadata) == metadata


@pytest.mark.parametrize(
    ("protocol", "serve"), [("grpc", grpc_receiver), ("http/protobuf", http_receiver)], ids=["grpc", "http"]
)
def test_spans_arrive_by_either_protocol(
    protocol: str, serve: Callable[[], AbstractContextManager[Receiver]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with serve() as receiver:
        start_tracing("router", receiver.url)
        with serving_span("request", TRACEPARENT, {"number": 1}) as span:
            with span.child("call", kind=SpanKind.CLIENT) as call:
                passed_on = dict(call.onto((("x-request-id", "r"), ("traceparent", TRACEPARENT))))
            span.add("tokens", 2)
            span.add("tokens", 3)
            span.append("reasons", "stop")
            span.append("reasons", "length")
            span.event("first token", {"late": False})
        stop_tracing(10.0)
        request, call_span = named(receiver, "request"), named(receiver, "call")
    assert (request.trace_id, request.parent_id, request.kind) == (TRACE_ID, PARENT_ID, "SERVER")
    assert (call_span.trace_id, call_span.parent_id, call_span.kind) == (TRACE_ID, request.span_id, "CLIENT")
    assert passed_on == {"x-request-id": "r", "traceparent": f"00-{TRACE_ID}-{call_span.span_id}-01"}
    assert request.service == "headrace-router"
    assert request.attributes == {"number": 1, "tokens": 5, "reasons": ["stop", "length"]}
    assert request.events == [("first token", {"late": False})]
    assert not request.failed


@pytest.mark.skipif(not collector.is_there(), reason=collector.MISSING)
def test_a_collector_of_another_maker_takes_spans_by_either_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with grpc_receiver() as receiver, collector.collector(receiver, tmp_path) as between:
        for protocol, url in (("grpc", between.grpc_url), ("http/protobuf", between.http_url)):
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
            start_tracing("router", url)
            with serving_span(protocol, TRACEPARENT, {"number": 1}) as span:
                span.append("reasons", "stop")
                span.event("first token", {"late": False})
            stop_tracing(patience(10.0))
            until(lambda protocol=protocol: [one for one in receiver.spans if one.name == protocol] != [], protocol)  # type: ignore[misc]
            sent_on = named(receiver, protocol)
            assert (sent_on.service, sent_on.trace_id, sent_on.parent_id) == ("headrace-router", TRACE_ID, PARENT_ID)
            assert (sent_on.kind, sent_on.failed) == ("SERVER", False)
            assert sent_on.attributes == {"number": 1, "reasons": ["stop"]}
            assert sent_on.events == [("first token", {"late": False})]
            assert sent_on.start_ns < sent_on.end_ns


def test_the_environment_alone_turns_tracing_on_and_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    with grpc_receiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        start_tracing("gateway", None)
        serving_span("request", "").end()
        stop_tracing(10.0)
        assert named(receiver, "request").service == "mine"


def test_a_disabled_sdk_stays_off_and_a_caller_that_does_not_sample_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    start_tracing("gateway", "http://127.0.0.1:1")
    assert serving_span("request", "") is NO_SPAN
    monkeypatch.delenv("OTEL_SDK_DISABLED")
    with grpc_receiver() as receiver:
        start_tracing("gateway", receiver.url)
        with serving_span("request", TRACEPARENT[:-1] + "0") as span:
            assert not span.is_recording
            assert span.traceparent.startswith(f"00-{TRACE_ID}-")
            assert span.traceparent.endswith("-00")
        stop_tracing(10.0)
        assert not receiver.spans


def test_spans_say_what_failed_and_do_not_call_a_cancelled_request_failed() -> None:
    with grpc_receiver() as receiver:
        start_tracing("worker", receiver.url)
        root = serving_span("request", "")
        with pytest.raises(StatusError), root.child("refused"):
            raise StatusError(Reason.QUEUE_FULL, "as many as it takes")
        with pytest.raises(asyncio.CancelledError), root.child("cancelled"):
            raise asyncio.CancelledError
        root.end()
        root.add("late", 1)
        root.end()
        stop_tracing(10.0)
        refused, cancelled = named(receiver, "refused"), named(receiver, "cancelled")
    assert refused.failed
    assert refused.attributes["error.type"] == "queue_full"
    assert not cancelled.failed
    assert cancelled.attributes == {"headrace.cancelled": True}


def test_times_of_the_monotonic_clock_become_times_of_day() -> None:
    now_s, now_ns = time.monotonic(), time.time_ns()
    with grpc_receiver() as receiver:
        start_tracing("worker", receiver.url)
        root = serving_span("request", "")
        root.child("queue", start_s=now_s - 2.0).end(end_s=now_s - 1.0)
        root.end()
        stop_tracing(10.0)
        queue = named(receiver, "queue")
    assert abs(queue.start_ns - (now_ns - 2_000_000_000)) < 100_000_000
    assert abs(queue.end_ns - queue.start_ns - 1_000_000_000) < 100_000_000


class StuckTracer:
    """A tracer whose receiver does not respond."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.answered = threading.Event()

    def serving_span(self, name: str, traceparent: str, attributes: Attributes | None) -> Span:
        return NO_SPAN

    def flush(self) -> None:
        self.asked.set()
        self.answered.wait()


def test_stopping_does_not_wait_for_a_receiver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = StuckTracer()
    monkeypatch.setattr(tracing, "_tracer", stuck)
    stop_tracing(0.05)
    assert stuck.asked.wait(patience(10))
    assert not stuck.answered.is_set()
    assert tracing._tracer is None
    stuck.answered.set()


def test_what_cannot_be_sent_to_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TracingUnavailableError, match="write http://HOST:4317"):
        start_tracing("worker", "collector:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(TracingUnavailableError, match="grpc and http/protobuf"):
        start_tracing("worker", "http://127.0.0.1:4317")


def test_the_trace_context_is_found_in_metadata() -> None:
    assert traceparent_of((("x-request-id", "r"), ("traceparent", TRACEPARENT))) == TRACEPARENT
    assert traceparent_of(None) == ""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(60), check=False
    )


def test_a_process_that_sends_no_traces_imports_nothing_of_opentelemetry() -> None:
    program = """
import sys
import headrace.gateway.__main__, headrace.router.__main__, headrace.worker.__main__
from headrace.common.telemetry.tracing import serving_span, start_tracing, stop_tracing
start_tracing("gateway", None)
with serving_span("request", ""):
    pass
stop_tracing(1.0)
print([name for name in sys.modules if name.split(".")[0] == "opentelemetry"])
"""
    done = run(program)
    assert done.stdout == "[]\n", done.stderr


# What an environment without the extra looks like: importing it fails.
WITHOUT_EXTRA = "import sys; sys.modules['opentelemetry'] = None; "


def test_without_the_extra_a_flag_is_refused_and_the_environment_is_a_warning() -> None:
    program = WITHOUT_EXTRA + (
        "import runpy; sys.argv = ['router', '--listen', '127.0.0.1:0', '--otlp-endpoint', 'http://127.0.0.1:1'];"
        "runpy.run_module('headrace.router', run_name='__main__')"
    )
    done = run(program)
    assert done.returncode == 2
    assert done.stderr.startswith("error: traces need OpenTelemetry")
    assert "pip install 'headrace[otel]'" in done.stderr
    program = WITHOUT_EXTRA + (
        "import os; os.environ['OTEL_EXPORTER_OTLP_ENDPOINT'] = 'http://127.0.0.1:1';"
        "from headrace.common.telemetry.logs import configure_logging; configure_logging('info');"
        "from headrace.common.telemetry.tracing import start_tracing; start_tracing('router', None)"
    )
    done = run(program)
    assert done.returncode == 0
    assert "no traces are sent" in done.stderr
