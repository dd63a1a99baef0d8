"""Before the first token a failure is an HTTP status; after it, a failed choice does not affect the others.
Deadlines."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from headrace.gateway.edge import exchange
from headrace.protos import text_pb2, text_pb2_grpc
from headrace.protos.status import Reason, StatusError
from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}
FULL = StatusError(Reason.QUEUE_FULL, "full", retry_after_s=3.0)


@pytest.fixture(autouse=True)
def _reset(router: Any) -> Iterator[None]:
    yield
    router.reset()


def events_of(text: str) -> list[Any]:
    """The values of a stream's events, without its end."""
    events = [event.removeprefix("data: ") for event in text.rstrip("\n").split("\n\n") if event.startswith("data: ")]
    return [json.loads(event) for event in events if event != "[DONE]"]


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_refusal_that_comes_late_is_a_status(
    gateway: Any, router: Any, monkeypatch: pytest.MonkeyPatch, num_choices: int
) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.001)
    go = asyncio.Event()

    async def refuse(own: Any, stream: Any, send: Any) -> None:
        await go.wait()
        raise FULL

    router.script = refuse
    asking = asyncio.create_task(gateway.http.post(CHAT, json={**BODY, "stream": True, "n": num_choices}))
    while len(router.streams) < num_choices:
        await asyncio.sleep(0.005)
    for _ in range(20):  # many times the pause after which a stream that has begun gets a comment
        await asyncio.sleep(0.002)
    go.set()
    response = await asking
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert 3000 <= int(response.headers["retry-after-ms"]) <= 4500


def failing(router: Any, kit: Any, seeds: set[int], behind: int) -> Any:
    """A script in which choices with these seeds fail after some tokens, and the others wait for that."""
    num_failed = asyncio.Semaphore(0)

    async def script(own: Any, stream: Any, send: Any) -> None:
        if stream.request.sampling.seed not in seeds:
            for _ in seeds:
                await num_failed.acquire()
            await kit.speak(own, stream, send)
            return
        for position, token in enumerate(kit.tokens_of(own.answer)[:behind]):
            await send([token], position, None)
        for _ in range(3):
            num_failed.release()
        raise StatusError(Reason.INTERNAL, "broken") if behind else FULL

    return script


@pytest.mark.parametrize("behind", [0, 3])
@pytest.mark.parametrize(("path", "body"), [(CHAT, BODY), (COMPLETIONS, {"model": "tiny", "prompt": "hi"})])
async def test_a_choice_that_fails_does_not_end_the_others(
    gateway: Any, router: Any, kit: Any, path: str, body: dict[str, Any], behind: int
) -> None:
    asked = {**body, "max_tokens": 40, "n": 3, "seed": 7}
    router.script = failing(router, kit, {8}, behind)
    response = await gateway.http.post(path, json=asked)
    assert response.status_code == 200, response.text
    answer = response.json()
    texts = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in answer["choices"]]
    assert texts == [router.answer, router.answer[:behind], router.answer]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "error", "stop"]
    assert answer["choices"][1]["error"]["code"] == ("internal_error" if behind else "queue_full")
    assert "error" not in answer["choices"][0]
    num_whole = len(router.answer.encode()) + 1
    assert answer["usage"]["completion_tokens"] == 2 * num_whole + behind

    router.script = failing(router, kit, {8}, behind)
    streamed = await gateway.http.post(path, json={**asked, "stream": True})
    assert streamed.status_code == 200
    assert streamed.text.endswith("data: [DONE]\n\n")
    choices = [choice for event in events_of(streamed.text) for choice in event["choices"]]
    ended = {choice["index"]: choice for choice in choices if choice["finish_reason"]}
    assert [ended[index]["finish_reason"] for index in range(3)] == ["stop", "error", "stop"]
    assert ended[1]["error"]["message"] == ("broken" if behind else "full")


async def test_when_all_choices_fail_so_does_the_request(gateway: Any, router: Any, kit: Any) -> None:
    for stream in (False, True):
        router.script = failing(router, kit, {7, 8, 9}, 0)
        response = await gateway.http.post(CHAT, json={**BODY, "n": 3, "seed": 7, "stream": stream})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    router.script = failing(router, kit, {7, 8, 9}, 2)
    response = await gateway.http.post(CHAT, json={**BODY, "n": 3, "seed": 7, "stream": True})
    assert events_of(response.text)[-1]["error"]["code"] == "internal_error"
    assert "[DONE]" not in response.text


async def test_the_best_of_several_choices_is_none_that_failed(gateway: Any, router: Any, kit: Any) -> None:
    router.script = failing(router, kit, {7}, 1)
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 40, "best_of": 3, "n": 2, "seed": 7}
    answer = (await gateway.http.post(COMPLETIONS, json=body)).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]


async def until_done(own: Any, stream: Any, send: Any) -> None:
    """A script that never answers, and keeps how much time the call had."""
    own.remaining_s = own.context_of(stream).time_remaining()
    await asyncio.Event().wait()


async def test_the_time_that_a_client_gives_reaches_the_router_and_ends_the_request(gateway: Any, router: Any) -> None:
    router.script = until_done
    began_s, given_s = time.monotonic(), round(patience(0.7), 3)  # the router must get to know it
    response = await gateway.http.post(CHAT, json=BODY, headers={"x-request-timeout": str(given_s)})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert time.monotonic() - began_s >= given_s
    assert 0 < router.remaining_s <= given_s
    page = (await gateway.http.get("/metrics")).text
    assert 'headrace_requests_total{endpoint="chat",outcome="client_deadline"} 1.0' in page


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "1_0", "1e400", "0x10"])
async def test_a_time_that_is_none_is_refused(gateway: Any, value: str) -> None:
    response = await gateway.http.post(CHAT, json=BODY, headers={"x-request-timeout": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-request-timeout"


async def test_the_deadline_of_a_grpc_call_reaches_the_router(gateway: Any, router: Any) -> None:
    router.script = until_done
    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        request = text_pb2.ChatRequest(messages=[text_pb2.ChatMessage(role="user", content="hi")])
        given_s = patience(1.5)
        call = text_pb2_grpc.TextStub(channel).Chat(request, timeout=given_s)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    # gRPC rounds up what it sends of a deadline.
    assert 0 < router.remaining_s <= given_s + 0.1
