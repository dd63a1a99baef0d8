"""Stores of responses: limits of memory, and gateways that share a real Redis."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.stores.api_keys import ApiKey, sha256_of, write_keys
from headrace.gateway.edge.settings import EdgeControls, EdgeSettings
from headrace.gateway.responses import background as response_runs
from headrace.gateway.responses import redis_store
from headrace.gateway.responses import store as response_store
from headrace.gateway.responses.answers import response_head
from headrace.gateway.responses.redis_store import RedisStore
from headrace.gateway.responses.response import MessageItem, OutputText, Response
from headrace.gateway.responses.store import (
    MAX_RESPONSE_BYTES,
    MemoryStore,
    StoredResponse,
    StoreError,
    TooLargeError,
    packed,
    unpacked,
)
from headrace.gateway.responses.types import ResponsesRequest
from headrace.protos.inference_pb2 import SamplingParams
from headrace.protos.router_pb2 import REDIS_STATE_OK, REDIS_STATE_UNWRITABLE
from tests.patience import patience
from tests.redis_server import RedisServer

RESPONSES = "/v1/responses"
BODY = {"model": "tiny", "input": "hi"}


def response(text: str = "", *tools: dict[str, Any]) -> Response:
    """A response to these tools, with this text."""
    head = response_head(ResponsesRequest(input="hi", tools=[*tools]), "resp_1", "tiny", SamplingParams())
    if text:
        content = [OutputText(text=text, logprobs=[])]
        head.output.append(MessageItem(id="msg_1", status="completed", content=content))
    return head


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


# --- memory ---------------------------------------------------------------------------------------------------------


async def test_a_value_is_kept_replaced_and_deleted() -> None:
    store = MemoryStore()
    assert await store.get("a") is None
    await store.put("a", b"1")
    await store.put("a", b"22")
    assert await store.get("a") == b"22"
    assert await store.delete("a")
    assert not await store.delete("a")
    assert (len(store), store.num_bytes) == (0, 0)


async def test_a_value_stays_when_the_one_for_its_place_is_too_large() -> None:
    store = MemoryStore(max_bytes=100, tenant_bytes=10)
    await store.put("a", b"old", owner="one")
    with pytest.raises(TooLargeError):
        await store.put("a", bytes(11), owner="one")
    assert not await store.swap("a", b"another", bytes(11), owner="one")
    with pytest.raises(TooLargeError):
        await store.swap("a", b"old", bytes(11), owner="one")
    assert (await store.get("a"), store.num_bytes) == (b"old", 3)


async def test_a_value_ends_with_its_time() -> None:
    clock = Clock()
    store = MemoryStore(ttl_s=10, clock=clock)
    await store.put("a", b"1")
    await store.put("b", b"1", ttl_s=5)
    clock.now_s = 5
    assert (await store.get("a"), await store.get("b")) == (b"1", None)
    clock.now_s = 10
    assert not await store.delete("a")
    assert store.num_bytes == 0


async def test_the_oldest_values_give_way() -> None:
    store = MemoryStore(max_values=2, max_bytes=10)
    for key in "abc":
        await store.put(key, b"1")
    assert await store.get("a") is None
    await store.put("d", b"1" * 10)
    assert [await store.get(key) for key in "bcd"] == [None, None, b"1" * 10]
    with pytest.raises(StoreError, match="too large"):
        await store.put("e", b"1" * 11)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 12), st.booleans())))
async def test_bounds_hold_whatever_is_put(steps: list[tuple[str, int, bool]]) -> None:
    store = MemoryStore(max_values=3, max_bytes=20)
    for key, size, deletes in steps:
        if deletes:
            await store.delete(key)
            assert await store.get(key) is None
        else:
            await store.put(key, bytes(size))
            assert await store.get(key) == bytes(size)
        kept = [value for one in "abcd" if (value := await store.get(one)) is not None]
        assert (len(store), store.num_bytes) == (len(kept), sum(map(len, kept)))
        assert len(store) <= 3
        assert store.num_bytes <= 20


@pytest.mark.parametrize("num_items", [1, 100_000])
async def test_a_response_is_packed_and_unpacked(num_items: int) -> None:
    items = [{"id": f"msg_{i}"} for i in range(num_items)]
    stored = StoredResponse("o", response("é"), items, [b"event"])
    value = await unpacked(await packed(stored), StoredResponse)
    assert (value.owner, value.response, value.items, value.events) == ("o", stored.response, stored.items, [b"event"])


async def test_integers_of_any_size_are_kept() -> None:
    stored = StoredResponse(
        "o", response("x", {"type": "web_search", "maximum": 10**30}), [{"const": -(10**30)}], [b"event"]
    )
    assert await unpacked(await packed(stored), StoredResponse) == stored


async def test_a_response_that_is_too_large_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = StoredResponse("", response(), [{"text": "x"}])
    monkeypatch.setattr(response_store, "MAX_RESPONSE_BYTES", len(await packed(stored)) - 1)
    with pytest.raises(StoreError, match="too large"):
        await packed(stored)


async def test_a_conversation_that_compresses_well_is_not_kept_at_any_length() -> None:
    turn = {"text": "a" * (MAX_RESPONSE_BYTES - 1024)}
    assert len(await packed(StoredResponse("owner", response(), [turn]))) < MAX_RESPONSE_BYTES // 100
    with pytest.raises(StoreError, match="too large"):
        await packed(StoredResponse("owner", response(), [turn] * 5))


# --- Redis ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield made
    made.kill()


@pytest_asyncio.fixture
async def pair(kit: Any, tiny_bundle: bytes, server: RedisServer) -> AsyncIterator[Any]:
    """A fake router, and two gateways that share a store."""
    fake = kit.FakeRouter(tiny_bundle)
    async with AsyncExitStack() as stack:
        address, _ = await stack.enter_async_context(kit.serving_router(fake))
        fake.gateways = []
        for _ in range(2):
            serving = kit.serving_gateway(address, flags={"response_redis_url": server.url})
            fake.gateways.append(await stack.enter_async_context(serving))
        yield fake


async def test_any_gateway_goes_on_from_a_response(pair: Any, server: RedisServer) -> None:
    one, other = (gateway.http for gateway in pair.gateways)
    first = (await one.post(RESPONSES, json=BODY)).json()
    assert (await other.get(f"{RESPONSES}/{first['id']}")).json() == first
    second = (await other.post(RESPONSES, json={**BODY, "previous_response_id": first["id"]})).json()
    items = (await one.get(f"{RESPONSES}/{second['id']}/input_items")).json()
    assert len(items["data"]) == 3
    left_ms = server.client().pttl(f"headrace:response:{first['id']}")
    assert 0 < left_ms <= 24 * 3600 * 1000
    assert (await other.delete(f"{RESPONSES}/{first['id']}")).json()["deleted"]
    assert (await one.get(f"{RESPONSES}/{first['id']}")).status_code == 404


def holding(pair: Any) -> asyncio.Event:
    """Generations write nothing until the event is set."""
    event = asyncio.Event()

    async def script(router: Any, stream: Any, send: Any) -> None:
        await event.wait()
        await router.speak(router, stream, send)

    pair.speak, pair.script = pair.script, script
    return event


async def test_any_gateway_follows_a_run_to_its_end(pair: Any) -> None:
    one, other = (gateway.http for gateway in pair.gateways)
    gate = holding(pair)
    async with one.stream("POST", RESPONSES, json={**BODY, "background": True, "stream": True}) as response:
        response_id = await begun(pair, one)
        following = asyncio.create_task(other.get(f"{RESPONSES}/{response_id}", params={"stream": "true"}))
        gate.set()
        seen = "".join([chunk async for chunk in response.aiter_text()])
    assert "response.completed" in seen
    assert (await following).text == seen


async def begun(pair: Any, http: Any) -> str:
    """The id of the response that runs on this gateway."""
    async with asyncio.timeout(patience(10)):
        while True:
            for gateway in pair.gateways:
                if gateway.http is http and pair.streams:
                    return f"resp_{pair.streams[0].request.request_id}"
            await asyncio.sleep(0.01)


async def test_any_gateway_cancels_a_run(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_runs, "HEARTBEAT_S", 0.05)
    one, other = (gateway.http for gateway in pair.gateways)
    holding(pair)
    made = (await one.post(RESPONSES, json={**BODY, "background": True})).json()
    assert (await other.get(f"{RESPONSES}/{made['id']}")).json()["status"] == "in_progress"
    assert (await other.post(f"{RESPONSES}/{made['id']}/cancel")).json()["status"] == "cancelled"
    assert (await one.get(f"{RESPONSES}/{made['id']}")).json()["status"] == "cancelled"


async def test_a_run_whose_gateway_is_gone_has_failed(pair: Any, server: RedisServer) -> None:
    one, other = (gateway.http for gateway in pair.gateways)
    holding(pair)
    made = (await one.post(RESPONSES, json={**BODY, "background": True})).json()
    run = pair.gateways[0].protocols["responses"].runs.get(made["id"])
    # As a gateway that was killed leaves it: not ended in the store, and no sign of life any more.
    left = await packed(run.stored)
    await pair.gateways[0].protocols["responses"].drain(0)
    server.client().set(f"headrace:response:{made['id']}", left)
    server.client().delete(f"headrace:response:{made['id']}:alive")
    run.stored.response.status = "in_progress"
    failed = (await other.get(f"{RESPONSES}/{made['id']}")).json()
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")


async def test_the_stream_of_a_run_whose_gateway_is_gone_ends_as_failed(pair: Any, server: RedisServer) -> None:
    one, other = (gateway.http for gateway in pair.gateways)
    holding(pair)
    runs = pair.gateways[0].protocols["responses"].runs
    async with one.stream("POST", RESPONSES, json={**BODY, "background": True, "stream": True}):
        response_id = await begun(pair, one)
        left = await packed(runs.get(response_id).stored)
        await pair.gateways[0].protocols["responses"].drain(0)
    server.client().set(f"headrace:response:{response_id}", left)
    server.client().delete(f"headrace:response:{response_id}:alive")
    for after, number in ((None, 0), (1, 2)):
        params = {"stream": "true", **({} if after is None else {"starting_after": str(after)})}
        text = (await other.get(f"{RESPONSES}/{response_id}", params=params)).text
        assert text.startswith("event: response.failed\n")
        event = json.loads(text.partition("data: ")[2])
        assert (event["sequence_number"], event["response"]["status"]) == (number, "failed")


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_a_tenant_displaces_its_own_responses_only(kind: str, server: RedisServer) -> None:
    store = MemoryStore(tenant_bytes=100) if kind == "memory" else RedisStore(server.url, tenant_bytes=100)
    server.client().flushall()
    await store.put("other", b"o" * 90, owner="b")
    await store.put("mark", b"1" * 200)  # without an owner: what runs in the background leaves for a moment
    for number in range(5):
        await store.put(f"r{number}", b"x" * 40, owner="a")
    found = [await store.get(f"r{number}") is not None for number in range(5)]
    assert found == [False, False, False, True, True]
    assert await store.get("other") == b"o" * 90
    assert await store.get("mark") is not None
    # Written again, a response counts once; deleted, not at all.
    for _ in range(3):
        await store.put("r4", b"y" * 60, owner="a")
    assert (await store.get("r3"), await store.get("r4")) == (b"x" * 40, b"y" * 60)
    assert await store.delete("r4", "a")
    assert not await store.delete("r4", "a")
    await store.put("r5", b"z" * 60, owner="a")
    assert (await store.get("r3"), await store.get("r5")) == (b"x" * 40, b"z" * 60)
    with pytest.raises(StoreError, match="too large"):
        await store.put("r6", b"z" * 101, owner="a")
    await store.close()


async def test_responses_that_have_ended_count_no_more(server: RedisServer) -> None:
    server.client().flushall()
    store = RedisStore(server.url, tenant_bytes=100)
    await store.put("short", b"x" * 60, 0.001, owner="a")
    async with asyncio.timeout(patience(10)):
        while await store.get("short") is not None:
            await asyncio.sleep(0.001)
    await store.put("one", b"x" * 50, owner="a")
    await store.put("two", b"x" * 50, owner="a")
    assert await store.get("one") is not None
    await store.close()


def test_responses_are_not_kept_where_leases_are(tmp_path: Path) -> None:
    for leases, responses in (("redis://h/0", "redis://:secret@h:6379/1"), ("unix:///r.sock", "unix:///r.sock?db=2")):
        argv = ["--router", "127.0.0.1:1", "--port", "0", "--redis", leases, "--response-redis", responses]
        done = subprocess.run([sys.executable, "-m", "headrace.gateway", *argv], capture_output=True, text=True)
        assert done.returncode == 2
        assert "a Redis of its own" in done.stderr
        assert "secret" not in done.stderr


async def test_a_full_redis_takes_no_response_and_keeps_what_it_has(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--maxmemory-policy", "noeviction").start()
    store = RedisStore(server.url)
    try:
        await store.put("a", b"1" * 100, owner="t")
        server.client().config_set("maxmemory", 1)
        for key in ("a", "b"):
            with pytest.raises(StoreError, match="maxmemory"):
                await store.put(key, b"2" * 200, owner="t")
        assert (await store.get("a"), await store.get("b")) == (b"1" * 100, None)
        assert server.client().hgetall("headrace:responses:t:size") == {b"a": b"100", b"total": b"100"}
        assert server.client().zrange("headrace:responses:t", 0, -1) == [b"a"]
        assert await store.delete("a", owner="t")
    finally:
        await store.close()
        server.kill()


async def test_without_redis_answers_go_on_and_say_that_they_are_not_kept(
    kit: Any, tiny_bundle: bytes, tmp_path: Path
) -> None:
    gone = RedisServer(tmp_path)
    fake = kit.FakeRouter(tiny_bundle)
    flags = {"response_redis_url": gone.url}
    async with kit.serving_router(fake) as (address, _), kit.serving_gateway(address, flags=flags) as gateway:
        answer = (await gateway.http.post(RESPONSES, json=BODY)).json()
        assert (answer["status"], answer["store"]) == ("completed", False)
        streamed = (await gateway.http.post(RESPONSES, json={**BODY, "stream": True})).text
        assert '"store":false' in streamed.rpartition("event: ")[2]
        for refused in (
            await gateway.http.get(f"{RESPONSES}/{answer['id']}"),
            await gateway.http.post(RESPONSES, json={**BODY, "previous_response_id": answer["id"]}),
            await gateway.http.post(RESPONSES, json={**BODY, "background": True}),
        ):
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1


async def test_health_has_the_state_of_the_redis_of_the_responses(
    kit: Any, tiny_bundle: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "LOOK_S", 0.05)
    server = RedisServer(tmp_path, "--maxmemory", "1", "--maxmemory-policy", "noeviction").start()
    flags = {"response_redis_url": server.url}
    router = kit.FakeRouter(tiny_bundle)
    async with kit.serving_router(router) as (address, _), kit.serving_gateway(address, flags=flags) as gateway:
        watching = asyncio.create_task(gateway.protocols["responses"].run())

        async def until_redis_is(word: str) -> None:
            async with asyncio.timeout(patience(20)):
                while (await gateway.http.get("/health")).json() != {"status": "ready", "redis": {"responses": word}}:
                    await asyncio.sleep(0.02)

        try:
            await until_redis_is("unwritable")
            answer = await gateway.http.post(RESPONSES, json=BODY)
            assert (answer.status_code, answer.json()["store"]) == (200, False)
            server.client().config_set("maxmemory", 0)
            await until_redis_is("ok")
            assert (await gateway.http.post(RESPONSES, json=BODY)).json()["store"] is True
            server.client().replicaof("127.0.0.1", str(server.port))
            await until_redis_is("unwritable")
            server.kill()
            await until_redis_is("unreachable")
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            server.kill()


async def test_a_redis_with_room_for_a_few_bytes_only_is_not_ok(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--maxmemory-policy", "noeviction").start()
    store = RedisStore(server.url)
    try:
        used = int(server.client().info("memory")["used_memory"])
        server.client().config_set("maxmemory", used + 30_000)
        assert server.client().set("small", "1")
        with pytest.raises(StoreError, match="maxmemory"):
            await store.put("large", bytes(50_000), owner="one")
        assert await store._state() == REDIS_STATE_UNWRITABLE
        server.client().config_set("maxmemory", 0)
        assert await store._state() == REDIS_STATE_OK
    finally:
        await store.close()
        server.kill()


# --- owners ---------------------------------------------------------------------------------------------------------


async def test_a_response_is_only_for_the_tenant_of_its_key(kit: Any, tiny_bundle: bytes, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys", [api_key("one"), api_key("other"), api_key("second", tenant="one")])
    controls = EdgeControls(EdgeSettings(api_keys=tmp_path / "keys"))
    await controls.start()
    fake = kit.FakeRouter(tiny_bundle)
    one, other, second = ({"x-api-key": name} for name in ("one", "other", "second"))
    async with kit.serving_router(fake) as (address, _), kit.serving_gateway(address, controls=controls) as gateway:
        http = gateway.http
        made = (await http.post(RESPONSES, json=BODY, headers=one)).json()
        path = f"{RESPONSES}/{made['id']}"
        for refused in (
            await http.get(path, headers=other),
            await http.get(f"{path}/input_items", headers=other),
            await http.delete(path, headers=other),
            await http.post(f"{path}/cancel", headers=other),
        ):
            assert refused.status_code == 404
        asked = {**BODY, "previous_response_id": made["id"]}
        assert (await http.post(RESPONSES, json=asked, headers=other)).status_code == 400
        assert (await http.post(RESPONSES, json=asked, headers=second)).status_code == 200
        assert (await http.get(path)).status_code == 401
    await controls.close()


async def test_a_run_takes_a_place_of_its_key_until_it_ends(kit: Any, tiny_bundle: bytes, tmp_path: Path) -> None:
    write_keys(tmp_path / "keys", [api_key("one", max_concurrent=1)])
    controls = EdgeControls(EdgeSettings(api_keys=tmp_path / "keys"))
    await controls.start()
    fake = kit.FakeRouter(tiny_bundle)
    headers = {"x-api-key": "one"}
    async with kit.serving_router(fake) as (address, _), kit.serving_gateway(address, controls=controls) as gateway:
        holding(fake)
        made = (await gateway.http.post(RESPONSES, json={**BODY, "background": True}, headers=headers)).json()
        assert (await gateway.http.post(RESPONSES, json=BODY, headers=headers)).status_code == 429
        cancelled = await gateway.http.post(f"{RESPONSES}/{made['id']}/cancel", headers=headers)
        assert cancelled.json()["status"] == "cancelled"
        fake.script = fake.speak
        assert (await gateway.http.post(RESPONSES, json=BODY, headers=headers)).status_code == 200
    await controls.close()


def api_key(secret: str, tenant: str = "", **limits: Any) -> ApiKey:
    """A key of a tenant, which is named like it by default."""
    fields: dict[str, Any] = {"id": f"key_{secret}", "name": secret, "tenant": tenant or secret, "created_s": 1}
    return ApiKey(**fields, sha256=sha256_of(secret), **limits)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="redis"):
        RedisStore("redis+sentinel://nowhere")
