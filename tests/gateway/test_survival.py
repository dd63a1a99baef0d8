"""Streams survive lost routers and workers; clients that are gone cost nothing; a stop is clean."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from headrace.gateway import exchange, upstream
from headrace.protos.status import Reason, StatusError

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as entered:
        yield entered


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(upstream, "MAX_BACKOFF_S", 0.2)


async def two_routers(stack: AsyncExitStack, kit: Any, bundle: bytes) -> tuple[Any, Any, Any]:
    """Two fake routers and a gateway in front of both."""
    first, second = kit.FakeRouter(bundle), kit.FakeRouter(bundle)
    first.address, first.server = await stack.enter_async_context(kit.serving_router(first))
    second.address, second.server = await stack.enter_async_context(kit.serving_router(second))
    return first, second, await stack.enter_async_context(kit.serving_gateway(first.address, second.address))


def break_behind(num_tokens: int, kit: Any, ending: Any) -> Any:
    """A script that sends some tokens and then ends in its own way; a second attempt goes on to the end."""

    async def script(router: Any, stream: Any, send: Any) -> None:
        if stream.request.attempt:
            await kit.speak(router, stream, send)
            return
        for position, token in enumerate(kit.tokens_of(router.answer)[:num_tokens]):
            await send([token], position, None)
        await ending(router)

    return script


async def text_of_stream(gateway: Any, **fields: Any) -> str:
    """The text of a streamed chat that ends well."""
    response = await gateway.http.post(CHAT, json={**BODY, "stream": True, **fields})
    *events, done = response.text.rstrip("\n").split("\n\n")
    assert done == "data: [DONE]", response.text
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


async def test_a_name_may_stand_for_several_routers(stack: AsyncExitStack, kit: Any, tiny_bundle: bytes) -> None:
    first, second = kit.FakeRouter(tiny_bundle), kit.FakeRouter(tiny_bundle)
    first.address, first.server = await stack.enter_async_context(kit.serving_router(first))
    second.address, second.server = await stack.enter_async_context(kit.serving_router(second))
    gateway = await stack.enter_async_context(kit.serving_gateway(f"ipv4:{first.address},{second.address}"))
    async with asyncio.timeout(20):
        while not (first.streams and second.streams):
            assert await text_of_stream(gateway) == first.answer

    async def die(router: Any) -> None:
        first.script = second.script = kit.speak
        asyncio.get_running_loop().create_task(router.server.stop(None))
        await asyncio.Event().wait()

    first.script = second.script = break_behind(5, kit, die)
    assert await text_of_stream(gateway) == first.answer
    assert await text_of_stream(gateway) == first.answer


async def test_a_router_that_dies_in_the_middle_is_replaced_by_the_next(
    stack: AsyncExitStack, kit: Any, tiny_bundle: bytes
) -> None:
    first, second, gateway = await two_routers(stack, kit, tiny_bundle)

    async def die(router: Any) -> None:
        asyncio.get_running_loop().create_task(router.server.stop(None))
        await asyncio.Event().wait()

    # Inside of the two bytes of ö: what was delivered is counted in tokens, not in text.
    num_delivered = "Hello, wörld".encode().index("ö".encode()) + 1
    first.script = break_behind(num_delivered, kit, die)
    assert await text_of_stream(gateway) == first.answer
    (resumed,) = second.streams
    assert list(resumed.request.resume_token_ids) == kit.tokens_of(first.answer)[:num_delivered]
    assert resumed.request.attempt == 1
    original = first.streams[0].request
    assert resumed.request.sampling == original.sampling
    assert (resumed.request.token_ids, resumed.request.request_id) == (original.token_ids, original.request_id)
    # From now on the one that works is asked first.
    assert await text_of_stream(gateway) == first.answer
    assert second.streams[1].request.attempt == 0


async def test_requests_go_to_the_routers_in_turn_and_past_a_dead_one(
    stack: AsyncExitStack, kit: Any, tiny_bundle: bytes
) -> None:
    first, second, gateway = await two_routers(stack, kit, tiny_bundle)
    async with asyncio.timeout(20):
        while not (first.streams and second.streams):  # the connections take a moment
            await text_of_stream(gateway)
    before = len(first.streams), len(second.streams)
    for _ in range(6):
        await text_of_stream(gateway)
    assert (len(first.streams) - before[0], len(second.streams) - before[1]) == (3, 3)
    await first.server.stop(None)
    for _ in range(3):
        await text_of_stream(gateway)
    assert len(second.streams) == before[1] + 6


@pytest.mark.parametrize("how", ["unavailable", "stream removed", "end without a finish", "gap", "draining"])
async def test_every_way_to_break_off_is_resumed(stack: AsyncExitStack, kit: Any, tiny_bundle: bytes, how: str) -> None:
    router = kit.FakeRouter(tiny_bundle)
    address, _ = await stack.enter_async_context(kit.serving_router(router))
    gateway = await stack.enter_async_context(kit.serving_gateway(address))

    async def script(own: Any, stream: Any, send: Any) -> None:
        if stream.request.attempt:
            await kit.speak(own, stream, send)
            return
        await send(kit.tokens_of(own.answer)[:3], 0, None)
        if how == "gap":
            await send(kit.tokens_of("xyz"), 4, None)
        elif how == "draining":
            raise StatusError(Reason.DRAINING, "going")
        elif how == "unavailable":
            raise _Abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        elif how == "stream removed":
            raise _Abort(grpc.StatusCode.UNKNOWN, "Stream removed")

    router.script = aborting(script)
    assert await text_of_stream(gateway) == router.answer
    assert [stream.request.attempt for stream in router.streams] == [0, 1]


class _Abort(Exception):
    """A bare status, as a transport makes it."""


def aborting(script: Any) -> Any:
    """The script, with `_Abort` as a status without details."""

    async def wrapped(router: Any, stream: Any, send: Any) -> None:
        try:
            await script(router, stream, send)
        except _Abort as error:
            code, message = error.args
            await router.context_of(stream).abort(code, message)

    return wrapped


async def test_several_answers_are_each_resumed(stack: AsyncExitStack, kit: Any, tiny_bundle: bytes) -> None:
    first, second, gateway = await two_routers(stack, kit, tiny_bundle)

    async def give_up(_: Any) -> None:
        raise StatusError(Reason.DRAINING, "going")

    first.script = second.script = break_behind(2, kit, give_up)
    answer = (await gateway.http.post(CHAT, json={**BODY, "n": 3})).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [first.answer] * 3
    assert answer["usage"]["completion_tokens"] == 3 * (len(first.answer.encode()) + 1)


async def test_a_final_error_is_not_tried_again(stack: AsyncExitStack, kit: Any, tiny_bundle: bytes) -> None:
    first, second, gateway = await two_routers(stack, kit, tiny_bundle)

    async def lose(router: Any, stream: Any, send: Any) -> None:
        raise StatusError(Reason.WORKER_LOST, "4 workers were lost over this request")

    first.script = lose
    assert (await gateway.http.post(CHAT, json=BODY)).status_code == 503
    assert (len(first.streams), len(second.streams)) == (1, 0)


async def test_attempts_are_bounded(stack: AsyncExitStack, kit: Any, tiny_bundle: bytes) -> None:
    first, second, gateway = await two_routers(stack, kit, tiny_bundle)

    async def refuse(router: Any, stream: Any, send: Any) -> None:
        raise StatusError(Reason.DRAINING, "going", retry_after_s=4)

    first.script = second.script = refuse
    response = await gateway.http.post(CHAT, json=BODY)
    assert (response.status_code, response.headers["retry-after"]) == (503, "4")
    assert len(first.streams) + len(second.streams) == upstream.MAX_FRUITLESS_ATTEMPTS


async def test_no_room_is_final_for_a_new_request_and_waited_out_in_the_middle_of_an_answer(
    stack: AsyncExitStack, kit: Any, tiny_bundle: bytes
) -> None:
    router = kit.FakeRouter(tiny_bundle)
    address, _ = await stack.enter_async_context(kit.serving_router(router))
    gateway = await stack.enter_async_context(kit.serving_gateway(address))

    async def full(own: Any, stream: Any, send: Any) -> None:
        raise StatusError(Reason.NO_CAPACITY, "no room")

    router.script = full
    assert (await gateway.http.post(CHAT, json=BODY)).status_code == 503
    assert len(router.streams) == 1

    async def full_once(own: Any, stream: Any, send: Any) -> None:
        if stream.request.attempt == 0:
            await send(kit.tokens_of(own.answer)[:2], 0, None)
            raise StatusError(Reason.DRAINING, "going")
        if stream.request.attempt == 1:
            raise StatusError(Reason.NO_CAPACITY, "no room")
        await kit.speak(own, stream, send)

    router.script = full_once
    assert await text_of_stream(gateway) == router.answer


async def test_a_router_that_restarts_is_found_again(stack: AsyncExitStack, kit: Any, tiny_bundle: bytes) -> None:
    router = kit.FakeRouter(tiny_bundle)
    address, server = await stack.enter_async_context(kit.serving_router(router))
    gateway = await stack.enter_async_context(kit.serving_gateway(address))
    assert await text_of_stream(gateway) == router.answer
    await server.stop(None)
    asking = asyncio.create_task(text_of_stream(gateway))
    await stack.enter_async_context(kit.serving_router(router, address))
    assert await asyncio.wait_for(asking, 15) == router.answer


async def test_a_worker_can_be_faced_directly(stack: AsyncExitStack, kit: Any, tiny_bundle: bytes) -> None:
    worker = kit.FakeRouter(tiny_bundle, is_worker=True)
    address, _ = await stack.enter_async_context(kit.serving_router(worker))
    gateway = await stack.enter_async_context(kit.serving_gateway(address))
    assert await text_of_stream(gateway) == worker.answer
    assert "headrace_requests_total" in (await gateway.http.get("/metrics")).text


async def endless(router: Any, stream: Any, send: Any) -> None:
    """A script that says one letter and then waits for ever."""
    await send([3 + 97], 0, None)
    await asyncio.Event().wait()


@pytest.fixture
async def pair(stack: AsyncExitStack, kit: Any, tiny_bundle: bytes) -> tuple[Any, Any]:
    router = kit.FakeRouter(tiny_bundle)
    address, _ = await stack.enter_async_context(kit.serving_router(router))
    return router, await stack.enter_async_context(kit.serving_gateway(address))


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_client_that_leaves_a_stream_cancels_its_generations(pair: Any, num_choices: int) -> None:
    router, gateway = pair
    router.script = endless
    async with gateway.http.stream("POST", CHAT, json={**BODY, "stream": True, "n": num_choices}) as response:
        seen = ""
        async for text in response.aiter_text():
            seen += text
            if seen.count('"content":"a"') == num_choices:
                break
    for stream in router.streams:
        await asyncio.wait_for(stream.cancelled.wait(), 5)
    assert len(router.streams) == num_choices


async def test_a_client_that_does_not_wait_for_a_whole_answer_cancels_it(pair: Any) -> None:
    router, gateway = pair
    router.script = endless
    asking = asyncio.create_task(gateway.http.post(CHAT, json=BODY))
    while not router.streams:
        await asyncio.sleep(0.001)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.wait_for(router.streams[0].cancelled.wait(), 5)
    text = (await gateway.http.get("/metrics")).text
    assert 'headrace_requests_total{endpoint="chat",outcome="cancelled"} 1.0' in text


async def test_an_idle_stream_gets_comments_also_before_its_first_token(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.02)
    router, gateway = pair
    go = asyncio.Event()

    async def after_a_while(own: Any, stream: Any, send: Any) -> None:
        await go.wait()
        raise StatusError(Reason.INTERNAL, "broken")

    router.script = after_a_while
    async with gateway.http.stream("POST", CHAT, json={**BODY, "stream": True}) as response:
        assert response.status_code == 200
        seen = ""
        async for text in response.aiter_text():
            seen += text
            if seen.count(": keep-alive\n\n") >= 2:
                go.set()
    *comments, error = seen.rstrip("\n").split("\n\n")
    assert set(comments) == {": keep-alive"}
    assert '"message":"broken"' in error


async def test_a_stop_lets_streams_end_with_an_error_that_says_so(pair: Any) -> None:
    router, gateway = pair
    router.script = endless
    asking = asyncio.create_task(gateway.http.post(CHAT, json=BODY))
    while not router.streams:
        await asyncio.sleep(0.001)
    async with gateway.http.stream("POST", CHAT, json={**BODY, "stream": True}) as response:
        seen = ""
        async for text in response.aiter_text():
            seen += text
            if '"content":"a"' in seen:
                gateway.edge.interrupt()
    error = json.loads(seen.rstrip("\n").split("\n\n")[-1].removeprefix("data: "))["error"]
    assert error["code"] == "draining"
    assert "[DONE]" not in seen
    whole = await asking
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "draining")
    for stream in router.streams:
        await asyncio.wait_for(stream.cancelled.wait(), 5)


async def test_more_streams_than_the_gateway_takes_are_refused(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, gateway = pair
    monkeypatch.setattr("headrace.gateway.generation.MAX_GENERATIONS", 2)
    response = await gateway.http.post(CHAT, json={**BODY, "n": 3})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert (await gateway.http.post(CHAT, json={**BODY, "n": 2})).status_code == 200
