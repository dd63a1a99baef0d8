"""The gateway's telemetry of a request: spans, the access log, retries, and the worker's timings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from headrace.common.telemetry.tracing import start_tracing, stop_tracing
from headrace.gateway.edge.spans import ACCESS
from headrace.protos.inference_pb2 import FINISH_REASON_LENGTH, GenerateResponse
from tests.otlp import ReceivedSpan, Receiver, grpc_receiver
from tests.patience import patience

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
GENERATE = "headrace.v1.Inference/Generate"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Gets the spans of this process."""
    with grpc_receiver() as running:
        start_tracing("gateway", running.url)
        yield running
        stop_tracing(0.0)


@pytest.fixture(autouse=True)
def _reset(router: Any) -> Iterator[None]:
    yield
    router.reset()


async def sent(receiver: Receiver) -> list[ReceivedSpan]:
    """All spans in order of their start. No span may start afterwards."""
    await asyncio.to_thread(stop_tracing, 10.0)
    return sorted(receiver.spans, key=lambda span: span.start_ns)


async def metric(gateway: Any, series: str) -> float:
    """A sample of the gateway's own exposition; 0 if there is none."""
    lines = (await gateway.http.get("/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{series} "))


@pytest.mark.asyncio(loop_scope="module")
async def test_every_choice_is_an_attempt_of_the_one_request(receiver: Receiver, gateway: Any, router: Any) -> None:
    answer = await gateway.http.post(CHAT, json={**BODY, "n": 3, "temperature": 0.5})
    usage = answer.json()["usage"]
    spans = await sent(receiver)
    (root,) = [span for span in spans if span.kind == "SERVER"]
    assert root.name == f"POST {CHAT}"
    assert root.parent_id == ""
    attempts = [span for span in spans if span.kind == "CLIENT"]
    assert [(span.name, span.parent_id) for span in attempts] == [(GENERATE, root.span_id)] * 3
    assert root.attributes["gen_ai.request.choice.count"] == 3
    assert root.attributes["gen_ai.request.temperature"] == 0.5
    assert root.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert root.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert root.attributes["gen_ai.response.finish_reasons"] == ["stop"] * 3
    passed_on = {stream.metadata["traceparent"].split("-")[2] for stream in router.streams}
    assert passed_on == {span.span_id for span in attempts}


@pytest.mark.asyncio(loop_scope="module")
async def test_an_attempt_that_was_lost_is_a_failed_span_and_a_retry(
    receiver: Receiver, gateway: Any, router: Any, kit: Any
) -> None:
    async def script(router: Any, stream: Any, send: Any) -> None:
        if stream.request.attempt:
            await kit.speak(router, stream, send)
            return
        await send([kit.tokens_of(router.answer)[0]], 0, None)
        await router.context_of(stream).abort(grpc.StatusCode.UNAVAILABLE, "gone")

    router.script = script
    before = await metric(gateway, 'headrace_upstream_retries_total{reason="worker_lost"}')
    answer = await gateway.http.post(CHAT, json=BODY)
    assert answer.json()["choices"][0]["message"]["content"] == router.answer
    assert await metric(gateway, 'headrace_upstream_retries_total{reason="worker_lost"}') == before + 1
    attempts = [span for span in await sent(receiver) if span.kind == "CLIENT"]
    assert [span.failed for span in attempts] == [True, False]
    assert [span.attributes["headrace.num_resumed_tokens"] for span in attempts] == [0, 1]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_callers_fault_is_named_and_is_no_failure_of_ours(receiver: Receiver, gateway: Any) -> None:
    answer = await gateway.http.post(CHAT, json={**BODY, "temperature": 9})
    assert answer.status_code == 400
    (root,) = [span for span in await sent(receiver) if span.kind == "SERVER"]
    assert root.attributes["error.type"] == "invalid_field"
    assert root.attributes["http.response.status_code"] == 400
    assert not root.failed


@pytest.mark.asyncio(loop_scope="module")
async def test_without_tracing_the_callers_trace_context_goes_upstream_as_it_came(gateway: Any, router: Any) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await gateway.http.post(CHAT, json=BODY, headers={"traceparent": traceparent})
    assert router.streams[-1].metadata["traceparent"] == traceparent


@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_finish_says_of_its_times_is_observed(gateway: Any, router: Any, kit: Any) -> None:
    async def script(router: Any, stream: Any, send: Any) -> None:
        message = GenerateResponse(start_pos=0, token_ids=[kit.token_of(65)])
        message.finish.reason = FINISH_REASON_LENGTH
        message.finish.timings.queue_us = 1_000_000
        message.finish.timings.prefill_us = 2_000_000
        message.finish.timings.decode_us = 4_000_000
        await router.context_of(stream).write(message)

    router.script = script
    series = [f"headrace_{phase}_seconds_sum" for phase in ("queue", "prefill", "decode")]
    before = [await metric(gateway, name) for name in series]
    await gateway.http.post(CHAT, json=BODY)
    after = [await metric(gateway, name) for name in series]
    assert [new - old for new, old in zip(after, before, strict=True)] == pytest.approx([1.0, 2.0, 4.0])


@pytest.mark.asyncio(loop_scope="module")
async def test_the_access_log_has_a_line_for_each_request_without_its_query(
    gateway: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ACCESS, "disabled", False)
    caplog.set_level(logging.INFO, ACCESS.name)
    await gateway.http.post(f"{CHAT}?api_key=secret", json=BODY)
    await gateway.http.get("/v1/nothing%0Aforged")
    await gateway.http.get("/health/live")
    await gateway.http.get("/metrics")
    lines = [record.getMessage().rpartition(" ")[0].rpartition(" ")[0] for record in caplog.records]
    assert lines == [f"POST {CHAT} 200 ok", "GET /v1/nothing%0Aforged 404 not_found"]


@pytest.mark.asyncio(loop_scope="module")
async def test_probes_are_kept_out_of_the_time_that_answers_take(gateway: Any) -> None:
    chats = 'headrace_request_duration_seconds_count{endpoint="chat"}'
    before = await metric(gateway, chats)
    await gateway.http.get("/health/live")
    assert await metric(gateway, chats) == before
    assert await metric(gateway, 'headrace_request_duration_seconds_count{endpoint="health"}') >= 1


@pytest.mark.asyncio(loop_scope="module")
async def test_requests_in_flight_are_those_that_are_answered_and_not_the_scrape_that_counts_them(
    gateway: Any, router: Any
) -> None:
    in_flight = "headrace_requests_in_flight"
    async with asyncio.timeout(patience(10)):
        while await metric(gateway, in_flight) != 0:  # the test before may have left one on its way out
            await asyncio.sleep(0.01)
    go = asyncio.Event()

    async def wait(own: Any, stream: Any, send: Any) -> None:
        await go.wait()

    router.script = wait
    num_before = len(router.streams)
    asking = asyncio.create_task(gateway.http.post(CHAT, json=BODY))
    while len(router.streams) == num_before:
        await asyncio.sleep(0.005)
    assert await metric(gateway, in_flight) == 1
    asking.cancel()
    go.set()
