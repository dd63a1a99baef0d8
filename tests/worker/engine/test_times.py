"""When a request passed its stations, and what metrics and spans are made of that."""

from __future__ import annotations

import itertools

import pytest
from prometheus_client import CollectorRegistry

from headrace.common.telemetry.logs import request_id_var
from headrace.common.telemetry.tracing import start_tracing, stop_tracing
from headrace.protos.inference_pb2 import GenerateRequest
from headrace.protos.status import Reason, StatusError
from headrace.worker.engine.engine import MAX_NOTED_STEPS
from headrace.worker.request.request import Request
from headrace.worker.server.metrics import RequestMetrics
from headrace.worker.server.observer import RequestObserver
from tests.otlp import Receiver, grpc_receiver
from tests.worker.conftest import EngineUnderTest, make_engine

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def traced(engine: EngineUnderTest, prompt: list[int], max_tokens: int = 8) -> Request:
    """A request whose steps are noted, in the engine."""
    request = engine.request(prompt, max_tokens=max_tokens)
    engine.scheduler.cancel(request)
    again = Request("traced", prompt, request.sampling, 1, arrival_s=request.arrival_s, steps=[])
    engine.tokens[again] = []
    engine.scheduler.add(again)
    return again


def ticking(engine: EngineUnderTest) -> None:
    """Make the scheduler's clock count its readings."""
    ticks = itertools.count(1)
    engine.scheduler.clock = lambda: float(next(ticks))


def values(registry: CollectorRegistry) -> dict[str, float]:
    """The counts and sums of all histograms, and the counters."""
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {sample.name: sample.value for sample in samples if not sample.name.endswith(("_bucket", "_created"))}


def test_the_clock_is_not_read_for_the_tokens_of_an_answer() -> None:
    engine = make_engine()
    ticking(engine)
    request = engine.request(list(range(10)), max_tokens=50)
    engine.run()
    assert (request.scheduled_s, request.first_token_s, request.ended_s) == (1.0, 2.0, 3.0)


def test_a_preempted_request_keeps_the_times_of_its_first_run() -> None:
    engine = make_engine(num_blocks=12)
    ticking(engine)
    requests = [engine.request(list(range(start, start + 10)), max_tokens=20) for start in (0, 100, 200)]
    engine.run()
    assert any(request.num_preemptions for request in requests)
    for request in requests:
        assert 0 < request.scheduled_s < request.first_token_s < request.ended_s


def test_only_traced_requests_note_their_steps() -> None:
    engine = make_engine(max_num_batched_tokens=16)
    plain = engine.request(list(range(500, 540)), max_tokens=6)
    request = traced(engine, list(range(40)), max_tokens=6)
    assert engine.scheduler.num_traced == 1
    engine.run()
    assert engine.scheduler.num_traced == 0
    assert plain.steps is None
    assert request.steps is not None
    assert sum(step.num_tokens for step in request.steps) == 40 + 5
    assert all(step.num_tokens <= step.num_batch_tokens for step in request.steps)
    assert max(step.num_batch_requests for step in request.steps) == 2


def test_the_steps_that_are_noted_are_bounded() -> None:
    engine = make_engine()
    request = traced(engine, [1, 2, 3], max_tokens=MAX_NOTED_STEPS + 20)
    engine.run()
    assert request.steps is not None
    assert len(request.steps) == MAX_NOTED_STEPS


def test_a_traced_request_that_is_cancelled_is_traced_no_more() -> None:
    engine = make_engine()
    request = traced(engine, [1, 2, 3])
    engine.step()
    engine.scheduler.cancel(request)
    assert engine.scheduler.num_traced == 0


def ended(**times: float) -> Request:
    """A request with ten generated tokens and these times of its stages."""
    engine = make_engine()
    request = engine.request([1, 2, 3], max_tokens=10)
    engine.run()
    request.arrival_s = 100.0
    for name in ("scheduled_s", "first_token_s", "ended_s"):
        setattr(request, name, times.get(name, 0.0))
    return request


def test_an_answer_is_observed_phase_by_phase() -> None:
    registry = CollectorRegistry()
    RequestMetrics(registry).ended(ended(scheduled_s=101.0, first_token_s=103.0, ended_s=112.0), 120.0)
    found = values(registry)
    assert found["headrace_worker_queue_seconds_sum"] == 1.0
    assert found["headrace_worker_prefill_seconds_sum"] == 2.0
    assert found["headrace_worker_decode_seconds_sum"] == 9.0
    assert found["headrace_worker_time_per_output_token_seconds_sum"] == 1.0


def test_a_request_that_went_early_is_observed_as_far_as_it_came() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry)
    metrics.ended(ended(), 120.0)
    metrics.ended(ended(scheduled_s=101.0), 120.0)
    metrics.ended(ended(scheduled_s=101.0, first_token_s=103.0), 110.0)
    found = values(registry)
    assert found["headrace_worker_queue_seconds_count"] == 2
    assert found["headrace_worker_prefill_seconds_count"] == 1
    assert found["headrace_worker_decode_seconds_sum"] == 7.0


def test_a_refusal_is_counted_by_its_reason_and_ends_its_span_as_failed() -> None:
    registry = CollectorRegistry()
    observer = RequestObserver(RequestMetrics(registry))
    with grpc_receiver() as receiver:
        start_tracing("worker", receiver.url)
        span = observer.arrived(GenerateRequest(request_id="r"), (("traceparent", TRACEPARENT),))
        observer.refused(span, StatusError(Reason.QUEUE_FULL, "as many as it takes"))
        stop_tracing(10.0)
        (found,) = receiver.spans
    assert values(registry)["headrace_worker_refusals_total"] == 1
    assert found.failed
    assert (found.attributes["error.type"], found.attributes["headrace.request_id"]) == ("queue_full", "r")
    assert request_id_var.get() == "r"
    request_id_var.set("-")


def observed(receiver: Receiver, request: Request, *, is_whole: bool, error: StatusError | None = None) -> list[str]:
    """The names of a request's spans, in order of their start."""
    observer = RequestObserver()
    start_tracing("worker", receiver.url)
    span = observer.arrived(GenerateRequest(), ())
    observer.ended(span, request, error, is_whole=is_whole)
    stop_tracing(10.0)
    request_id_var.set("-")
    return [span.name for span in sorted(receiver.spans, key=lambda span: span.start_ns)]


@pytest.mark.parametrize(
    ("times", "phases"),
    [
        ({}, ["queue"]),
        ({"scheduled_s": 101.0}, ["queue", "prefill"]),
        ({"scheduled_s": 101.0, "first_token_s": 103.0}, ["queue", "prefill", "decode"]),
        ({"scheduled_s": 101.0, "first_token_s": 103.0, "ended_s": 112.0}, ["queue", "prefill", "decode"]),
    ],
)
def test_a_request_leaves_a_span_for_each_phase_that_it_reached(times: dict[str, float], phases: list[str]) -> None:
    with grpc_receiver() as receiver:
        names = observed(receiver, ended(**times), is_whole="ended_s" in times)
    assert names == [*phases, "headrace.v1.Inference/Generate"]


def test_a_request_that_failed_leaves_a_failed_span() -> None:
    with grpc_receiver() as receiver:
        observed(receiver, ended(), is_whole=True, error=StatusError(Reason.INTERNAL, "a step failed"))
        (root,) = [span for span in receiver.spans if span.kind == "SERVER"]
    assert root.failed
    assert root.attributes["error.type"] == "internal"
