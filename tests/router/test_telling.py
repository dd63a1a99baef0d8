"""The router's telemetry of a request: spans, log lines, time in its queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from headrace.common.telemetry.logs import request_id_var
from headrace.common.telemetry.tracing import start_tracing, stop_tracing
from headrace.protos.status import Reason, StatusError
from tests.otlp import ReceivedSpan, Receiver, grpc_receiver
from tests.router.conftest import StartRouter, StartWorker, collected
from tests.router.fake_worker import answer, until

PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15]
GENERATE = "headrace.v1.Inference/Generate"
CALLER = "b7ad6b7169203331"
METADATA = [("x-request-id", "req-1"), ("traceparent", f"00-0af7651916cd43dd8448eb211c80319c-{CALLER}-01")]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Gets the spans of this process."""
    with grpc_receiver() as running:
        start_tracing("router", running.url)
        yield running
        stop_tracing(0.0)


async def sent(receiver: Receiver) -> list[ReceivedSpan]:
    """All spans in order of their start. No span may start afterwards."""
    await asyncio.to_thread(stop_tracing, 10.0)
    return sorted(receiver.spans, key=lambda span: span.start_ns)


async def test_a_resumed_request_is_one_trace_with_a_placement_and_an_attempt_for_each_worker(
    receiver: Receiver, start_router: StartRouter, start_worker: StartWorker
) -> None:
    workers = [await start_worker(name) for name in "ab"]
    router = await start_router(*workers)
    for worker in workers:
        worker.budget = 3
    call = router.call(PROMPT, 8, metadata=METADATA)
    reading = asyncio.create_task(collected(call))
    await until(lambda: any(worker.is_stuck for worker in workers))
    first = next(worker for worker in workers if worker.is_stuck)
    (second,) = [worker for worker in workers if worker is not first]
    second.budget = None
    await first.kill()
    tokens, _ = await reading
    assert tokens == answer(PROMPT, 8)
    await router.until_idle()
    spans = await sent(receiver)
    (root,) = [span for span in spans if span.kind == "SERVER"]
    assert root.parent_id == CALLER
    assert [span.name for span in spans] == [GENERATE, "place", GENERATE, "place", GENERATE]
    assert {span.parent_id for span in spans if span is not root} == {root.span_id}
    attempts = [span for span in spans if span.kind == "CLIENT"]
    assert [span.attributes["headrace.worker"] for span in attempts] == [first.name, second.name]
    assert [span.attributes["headrace.num_resumed_tokens"] for span in attempts] == [0, 3]
    assert [span.failed for span in attempts] == [True, False]
    assert not root.failed
    # Each worker was given its own attempt as the parent.
    given = [str(worker.metadata[0]["traceparent"]).split("-")[2] for worker in (first, second)]
    assert given == [span.span_id for span in attempts]
    place = next(span for span in spans if span.name == "place")
    assert place.attributes["headrace.placement.num_candidates"] == 2
    assert [name for name, _ in place.events] == ["candidate", "candidate"]
    totals = [event["headrace.cost.total_ms"] for _, event in place.events]
    assert totals == sorted(totals)


async def test_a_refusal_is_a_failed_span_with_its_reason(
    receiver: Receiver, start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    worker.error = StatusError(Reason.CONTEXT_TOO_LONG, "too long")
    router = await start_router(worker)
    with pytest.raises(Exception, match="too long"):
        await router.generate(PROMPT, metadata=METADATA)
    await router.until_idle()
    (root,) = [span for span in await sent(receiver) if span.kind == "SERVER"]
    assert root.failed
    assert root.attributes["error.type"] == "invalid_argument"
    assert root.attributes["headrace.request_id"] == "req-1"


async def test_a_caller_that_goes_leaves_spans_that_are_cancelled_and_not_failed(
    receiver: Receiver, start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    worker.budget = 2
    router = await start_router(worker)
    call = router.call(PROMPT, metadata=METADATA)
    await until(lambda: worker.is_stuck)
    call.cancel()
    await router.until_idle()
    (attempt,) = [span for span in await sent(receiver) if span.kind == "CLIENT"]
    assert attempt.attributes["headrace.cancelled"] is True
    assert not attempt.failed


async def test_log_lines_of_a_request_have_its_id(
    start_router: StartRouter, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    router = await start_router(await start_worker())
    seen: list[tuple[str, str]] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append((request_id_var.get(), record.getMessage()))

    handler = Noting()
    caplog.set_level(logging.DEBUG, "headrace.router")
    logging.getLogger("headrace.router").addHandler(handler)
    try:
        await router.generate(PROMPT, metadata=METADATA)
    finally:
        logging.getLogger("headrace.router").removeHandler(handler)
    assert ("req-1", "placed on w: only") in seen


async def test_the_time_until_a_placement_is_observed_once_a_placement(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(await start_worker())
    for _ in range(3):
        await router.generate(PROMPT)
    count = router.metrics.registry.get_sample_value("headrace_router_queue_seconds_count")
    assert count == 3
