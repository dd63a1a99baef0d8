"""Streams survive lost routers and workers, disconnected clients cost nothing, and a stop is clean."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from headrace.common.retries import MAX_FAILED
from headrace.gateway.edge import exchange
from headrace.gateway.edge.settings import EdgeControls, EdgeSettings
from headrace.gateway.upstream import address, routers
from headrace.protos.status import Reason, StatusError
from tests.patience import patience

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40}


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as entered:
        yield entered


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(routers, "MAX_BACKOFF_S", 0.2)


async def two_routers(stack: AsyncExitStack, kit: Any, bundle: bytes) -> tuple[Any, Any, Any]:
    """Two fake routers and a gateway in front of both."""
    first, second = kit.FakeRouter(bundle), kit.FakeRouter(bundle)
    first.address, first.server = await stack.enter_async_context(kit.serving_router(first))
    second.address, second.server = await stack.enter_async_context(kit.serving_router(second))
    return first, second, await stack.enter_async_context(kit.serving_gateway(first.address, second.address))


def break_behind(num_tokens: int, kit: Any, ending: Any) -> Any:
    """A script that sends some tokens and then fails in its own way. The second attempt completes the answer."""

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
    async with asyncio.timeout(patience(20)):
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
    received: list[int] = []
    is_delivered = asyncio.Event()
    dead: list[Any] = []

    async def die(router: Any) -> None:
        dead.append(router)
        first.script = second.script = kit.speak
        # A server that stops takes with it what it has not sent yet.
        await is_delivered.wait()
        asyncio.get_running_loop().create_task(router.server.stop(None))
        await asyncio.Event().wait()

    # Inside of the two bytes of ö: what was delivered is counted in tokens, not in text.
    num_delivered = "Hello, wörld".encode().index("ö".encode()) + 1
    # Either may be connected first, and is asked then.
    first.script = second.script = break_behind(num_delivered, kit, die)
    text = ""
    body = {**BODY, "stream": True, "return_token_ids": True}
    async with asyncio.timeout(patience(20)), gateway.http.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["delta"].get("content", "")
                received += choice.get("token_ids", ())
                if len(received) == num_delivered:
                    is_delivered.set()
    assert text == first.answer
    assert received == [*kit.tokens_of(first.answer), kit.EOS]
    alive = second if dead == [first] else first
    (begun,), (resumed,) = dead[0].streams, alive.streams
    assert list(resumed.request.resume_token_ids) == received[:num_delivered]
    assert resumed.request.attempt == 1
    assert resumed.request.model_identity == f"identity of {first.answer}"
    assert resumed.request.sampling == begun.request.sampling
    assert resumed.request.token_ids == begun.request.token_ids
    assert resumed.request.request_id == begun.request.request_id
    # From now on the one that works is asked first.
    assert await text_of_stream(gateway) == first.answer
    assert alive.streams[1].request.attempt == 0


async def test_requests_go_to_the_routers_in_turn_and_past_a_dead_one(
    stack: AsyncExitStack, kit: Any, tiny_bundle: bytes
) -> None:
    first, second, gateway = await two_routers(stack, kit, tiny_bundle)
    async with asyncio.timeout(patience(20)):
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


@pytest.mark.parametrize(("num_delivered", "max_tokens"), [(None, 100), (7, 7)])
async def test_an_answer_that_lacks_only_its_finish_is_ended_without_anybody(
    stack: AsyncExitStack, kit: Any, tiny_bundle: bytes, num_delivered: int | None, max_tokens: int
) -> None:
    router = kit.FakeRouter(tiny_bundle)
    address, _ = await stack.enter_async_context(kit.serving_router(router))
    gateway = await stack.enter_async_context(kit.serving_gateway(address))

    async def script(own: Any, stream: Any, send: Any) -> None:
        await send([*kit.tokens_of(own.answer), kit.EOS][:num_delivered], 0, None)
        raise _Abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    router.script = aborting(script)
    expected = router.answer if num_delivered is None else "Hello, "
    assert await text_of_stream(gateway, max_tokens=max_tokens) == expected
    assert len(router.streams) == 1


async def test_without_sessions_each_request_is_an_rpc_that_survives_as_well(
    stack: AsyncExitStack, kit: Any, tiny_bundle: bytes
) -> None:
    router = kit.FakeRouter(tiny_bundle)
    address, _ = await stack.enter_async_context(kit.serving_router(router))
    gateway = await stack.enter_async_context(kit.serving_gateway(address, plain_grpc=True))
    response = await gateway.http.post(CHAT, json={**BODY, "n": 3})
    assert [choice["message"]["content"] for choice in response.json()["choices"]] == [router.answer] * 3

    async def broken(_: Any) -> None:
        raise _Abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    router.script = aborting(break_behind(3, kit, broken))
    assert await text_of_stream(gateway) == router.answer
    assert (len(router.streams), router.num_sessions) == (5, 0)


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


@pytest.mark.parametrize("plain_grpc", [False, True])
@pytest.mark.parametrize("headers", [{}, {"x-request-timeout": "60"}])
async def test_an_answer_that_takes_longer_than_an_attempt_may_is_resumed(
    stack: AsyncExitStack,
    kit: Any,
    tiny_bundle: bytes,
    monkeypatch: pytest.MonkeyPatch,
    headers: dict[str, str],
    plain_grpc: bool,
) -> None:
    monkeypatch.setattr(routers, "ATTEMPT_TIMEOUT_S", 0.3)
    router = kit.FakeRouter(tiny_bundle)
    address, _ = await stack.enter_async_context(kit.serving_router(router))
    gateway = await stack.enter_async_context(kit.serving_gateway(address, plain_grpc=plain_grpc))

    longer = lambda _: monkeypatch.setattr(routers, "ATTEMPT_TIMEOUT_S", 20.0)  # noqa: E731
    monkeypatch.setattr(gateway.upstream, "_on_retry", longer)

    async def go_on_for_ever(_: Any) -> None:
        await asyncio.Event().wait()

    router.script = break_behind(3, kit, go_on_for_ever)
    response = await gateway.http.post(CHAT, json=BODY, headers=headers)
    assert response.json()["choices"][0]["message"]["content"] == router.answer
    resumed = router.streams[-1].request
    assert (resumed.attempt, list(resumed.resume_token_ids)) == (1, kit.tokens_of(router.answer)[:3])
    assert gateway.upstream.addresses() == [(address, True)]
    router.script = kit.speak
    assert await text_of_stream(gateway) == router.answer


async def test_an_answer_of_many_attempts_ends_with_the_time_limit_of_its_request(
    stack: AsyncExitStack, kit: Any, tiny_bundle: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routers, "ATTEMPT_TIMEOUT_S", 0.2)
    router = kit.FakeRouter(tiny_bundle)
    address, _ = await stack.enter_async_context(kit.serving_router(router))
    gateway = await stack.enter_async_context(kit.serving_gateway(address))

    async def hang(router: Any, stream: Any, send: Any) -> None:
        await asyncio.Event().wait()

    router.script = hang
    response = await gateway.http.post(CHAT, json=BODY, headers={"x-request-timeout": "0.7"})
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "deadline_exceeded"
    assert len(router.streams) >= 3


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


async def test_a_model_that_one_router_lacks_is_asked_for_at_the_other(
    stack: AsyncExitStack, kit: Any, tiny_bundle: bytes
) -> None:
    """A router may have been restarted with other workers, or not see all of them."""
    first, second, gateway = await two_routers(stack, kit, tiny_bundle)

    async def lack(router: Any, stream: Any, send: Any) -> None:
        raise StatusError(Reason.MODEL_NOT_FOUND, "no such model", field="model")

    first.script = lack
    async with asyncio.timeout(patience(20)):
        while not (first.streams and second.streams):  # the connections take a moment
            assert await text_of_stream(gateway) == second.answer
    for _ in range(4):
        assert await text_of_stream(gateway) == second.answer
    assert len(first.streams) >= 3, "it is not avoided for its other models"
    second.script = lack
    assert (await gateway.http.post(CHAT, json=BODY)).status_code == 404


async def test_the_tokenizer_of_a_model_that_one_router_lacks_comes_from_the_other(
    stack: AsyncExitStack, kit: Any, tiny_bundle: bytes
) -> None:
    routers = [kit.FakeRouter(tiny_bundle), kit.FakeRouter(tiny_bundle)]
    routers[1].lacks_tokenizer = True
    addresses = [(await stack.enter_async_context(kit.serving_router(one)))[0] for one in routers]
    for order in (addresses, addresses[::-1]):
        gateway = await stack.enter_async_context(kit.serving_gateway(*order))
        assert [model.name for model in await gateway.models.listed()] == ["tiny"]


@pytest.mark.parametrize("kind", ["generation", "tokenizer", "list"])
async def test_the_other_router_is_asked_while_only_one_is_connected(
    stack: AsyncExitStack, kit: Any, tiny_bundle: bytes, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, gateway = await two_routers(stack, kit, tiny_bundle)

    async def lack(router: Any, stream: Any, send: Any) -> None:
        raise StatusError(Reason.MODEL_NOT_FOUND, "no such model", field="model")

    monkeypatch.setattr(address.Address, "is_connected", property(lambda self: self.address == first.address))
    if kind == "generation":
        first.script = lack
        assert await text_of_stream(gateway) == second.answer
    elif kind == "tokenizer":
        first.lacks_tokenizer = True
        assert await gateway.upstream.get_tokenizer(hashlib.sha256(tiny_bundle).hexdigest()) == tiny_bundle
    else:
        first.cards = []
        assert [card.name for card in await gateway.upstream.list_models()] == ["tiny"]


async def test_a_router_that_knows_no_workers_yet_does_not_empty_the_list_of_models(
    stack: AsyncExitStack, kit: Any, tiny_bundle: bytes
) -> None:
    first, second, gateway = await two_routers(stack, kit, tiny_bundle)
    first.cards = []
    before = first.num_lists
    async with asyncio.timeout(patience(20)):
        while first.num_lists < before + 2:  # the connections take a moment
            await gateway.models.refresh()
            assert gateway.models.ready
            assert (await gateway.http.get("/health")).status_code == 200
            assert [card.name for card in gateway.models.cards] == ["tiny"]
    second.cards = []
    await gateway.models.refresh()
    assert not gateway.models.ready


async def test_attempts_are_bounded(stack: AsyncExitStack, kit: Any, tiny_bundle: bytes) -> None:
    first, second, gateway = await two_routers(stack, kit, tiny_bundle)

    async def refuse(router: Any, stream: Any, send: Any) -> None:
        raise StatusError(Reason.DRAINING, "going", retry_after_s=4)

    first.script = second.script = refuse
    response = await gateway.http.post(CHAT, json=BODY)
    assert response.status_code == 503
    assert 4 <= int(response.headers["retry-after"]) <= 6
    assert len(first.streams) + len(second.streams) == routers.MAX_IN_VAIN


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_requests_wait_for_a_worker_that_is_away_as_long_as_their_clients_do(
    pair: Any, kit: Any, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    monkeypatch.setattr(routers, "MAX_BACKOFF_S", 0.01)
    router, gateway = pair
    num_refusals = 2 * MAX_FAILED

    async def away(own: Any, stream: Any, send: Any) -> None:
        if len(router.streams) == 1 and num_tokens:
            for position, token in enumerate(kit.tokens_of(own.answer)[:num_tokens]):
                await send([token], position, None)
            raise _Abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if len(router.streams) <= num_refusals:
            raise StatusError(Reason.NO_CAPACITY, "nobody serves the model")
        await kit.speak(own, stream, send)

    router.script = aborting(away)
    assert await text_of_stream(gateway) == router.answer
    assert len(router.streams) == num_refusals + 1
    # Routers take requests with a later attempt in without looking whether there is room.
    assert bool(router.streams[-1].request.attempt) == bool(num_tokens)


async def test_an_operator_may_bound_how_long_new_requests_wait(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    router, gateway = pair
    monkeypatch.setattr(routers, "MAX_BACKOFF_S", 0.01)
    monkeypatch.setattr(gateway.upstream, "_worker_wait_s", 1.0)

    async def away(own: Any, stream: Any, send: Any) -> None:
        raise StatusError(Reason.NO_CAPACITY, "nobody serves the model; try again in a moment")

    router.script = away
    response = await gateway.http.post(CHAT, json={**BODY, "stream": True})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_capacity")
    assert len(router.streams) > 1


async def test_an_answer_that_has_begun_is_not_refused_for_want_of_room(
    pair: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routers, "MAX_BACKOFF_S", 0.01)
    router, gateway = pair

    async def full_for_long(own: Any, stream: Any, send: Any) -> None:
        attempt = stream.request.attempt
        if attempt == 0:
            await send(kit.tokens_of(own.answer)[:2], 0, None)
        if attempt < 2 * MAX_FAILED:
            raise StatusError(Reason.QUEUE_FULL if attempt % 2 else Reason.DRAINING, "not now")
        await kit.speak(own, stream, send)

    router.script = full_for_long
    assert await text_of_stream(gateway) == router.answer
    assert len(router.streams) == 2 * MAX_FAILED + 1

    async def full(own: Any, stream: Any, send: Any) -> None:
        raise StatusError(Reason.QUEUE_FULL, "full")

    router.streams.clear()
    router.script = full
    assert (await gateway.http.post(CHAT, json=BODY)).status_code == 429
    assert len(router.streams) == 1, "a new request is refused at once"


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_lone_router_may_be_away_for_any_number_of_attempts(
    stack: AsyncExitStack, kit: Any, tiny_bundle: bytes, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    monkeypatch.setattr(routers, "MAX_BACKOFF_S", 0.01)
    router = kit.FakeRouter(tiny_bundle)
    address, server = await stack.enter_async_context(kit.serving_router(router))
    gateway = await stack.enter_async_context(kit.serving_gateway(address))
    retried: list[Reason] = []
    monkeypatch.setattr(gateway.upstream, "_on_retry", retried.append)

    async def hang(_: Any) -> None:
        await asyncio.Event().wait()

    if has_begun:
        router.script = break_behind(3, kit, hang)
        asking = asyncio.create_task(text_of_stream(gateway))
        while not router.streams:
            await asyncio.sleep(0.005)
    await server.stop(None)
    if not has_begun:
        asking = asyncio.create_task(text_of_stream(gateway))
    async with asyncio.timeout(patience(15)):
        while len(retried) < 2 * MAX_FAILED:
            await asyncio.sleep(0.01)
    assert not asking.done()
    router.script = kit.speak
    await stack.enter_async_context(kit.serving_router(router, address))
    assert await asyncio.wait_for(asking, patience(15)) == router.answer


async def test_a_router_that_restarts_is_found_again(stack: AsyncExitStack, kit: Any, tiny_bundle: bytes) -> None:
    router = kit.FakeRouter(tiny_bundle)
    address, server = await stack.enter_async_context(kit.serving_router(router))
    gateway = await stack.enter_async_context(kit.serving_gateway(address))
    assert await text_of_stream(gateway) == router.answer
    await server.stop(None)
    asking = asyncio.create_task(text_of_stream(gateway))
    await stack.enter_async_context(kit.serving_router(router, address))
    assert await asyncio.wait_for(asking, patience(15)) == router.answer


async def test_a_worker_can_be_faced_directly(stack: AsyncExitStack, kit: Any, tiny_bundle: bytes) -> None:
    worker = kit.FakeRouter(tiny_bundle, is_worker=True)
    address, _ = await stack.enter_async_context(kit.serving_router(worker))
    gateway = await stack.enter_async_context(kit.serving_gateway(address))
    assert await text_of_stream(gateway) == worker.answer
    assert "headrace_requests_total" in (await gateway.http.get("/metrics")).text


async def endless(router: Any, stream: Any, send: Any) -> None:
    """A script that sends one letter and then blocks."""
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
        await asyncio.wait_for(stream.cancelled.wait(), patience(5))
    assert len(router.streams) == num_choices


async def test_a_client_that_does_not_wait_for_a_whole_answer_cancels_it(pair: Any) -> None:
    router, gateway = pair
    router.script = endless
    asking = asyncio.create_task(gateway.http.post(CHAT, json=BODY))
    while not router.streams:
        await asyncio.sleep(0.001)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await asyncio.wait_for(router.streams[0].cancelled.wait(), patience(5))
    text = (await gateway.http.get("/metrics")).text
    assert 'headrace_requests_total{endpoint="chat",outcome="cancelled"} 1.0' in text


@pytest.mark.parametrize("begins", ["by a token", "by itself"])
async def test_an_idle_stream_gets_comments_once_it_has_begun(
    stack: AsyncExitStack, kit: Any, tiny_bundle: bytes, monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.02)
    router = kit.FakeRouter(tiny_bundle)
    address, _ = await stack.enter_async_context(kit.serving_router(router))
    controls = EdgeControls(EdgeSettings(early_headers=0.05 if begins == "by itself" else None))
    gateway = await stack.enter_async_context(kit.serving_gateway(address, controls=controls))
    go = asyncio.Event()

    async def after_a_while(own: Any, stream: Any, send: Any) -> None:
        if begins == "by a token":
            await send([kit.token_of(0xC3)], 0, None)  # half a character: nothing to show yet
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
    *events, error = seen.rstrip("\n").split("\n\n")
    assert {event for event in events if not event.startswith("data: ")} == {": keep-alive"}
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
        await asyncio.wait_for(stream.cancelled.wait(), patience(5))


async def test_more_streams_than_the_gateway_takes_are_refused(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, gateway = pair
    monkeypatch.setattr("headrace.gateway.chat.generation.MAX_GENERATIONS", 2)
    response = await gateway.http.post(CHAT, json={**BODY, "n": 3})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert (await gateway.http.post(CHAT, json={**BODY, "n": 2})).status_code == 200
