"""API keys over HTTP and gRPC: authentication, permissions, and limits in responses."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from headrace.common.stores.api_keys import (
    REDIS_KEYS,
    REDIS_VERSION,
    ApiKey,
    dump_key,
    load_key,
    new_secret,
    read_keys,
    sha256_of,
    write_keys,
)
from headrace.gateway.access.keys import KeyFile, KeyRing, KeysError, KeyTable
from headrace.gateway.edge.settings import EdgeControls, EdgeSettings, EdgeSettingsError
from headrace.protos import text_pb2, text_pb2_grpc
from headrace.protos.cache_scope import scoped_salt
from headrace.protos.status import Reason, StatusError, error_of
from tests.patience import patience
from tests.redis_server import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
SECRET = "hr-secret-of-alice"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def key_of(secret: str = SECRET, **fields: Any) -> ApiKey:
    """A key with this secret."""
    values: dict[str, Any] = {"id": f"key_{sha256_of(secret)[:8]}", "name": "alice", "tenant": "mill", "created_s": 1}
    return ApiKey(**{**values, "sha256": sha256_of(secret), **fields})


def bearer(secret: str = SECRET) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


Guarded = Callable[..., Any]


@asynccontextmanager
async def guarded_gateway(kit: Any, router: Any, path: Path, **settings: Any) -> AsyncIterator[tuple[Any, KeyRing]]:
    """A gateway that asks for the keys in a file, which is empty, and its key ring."""
    write_keys(path, [])
    controls = EdgeControls(EdgeSettings(api_keys=path, **settings))
    await controls.start()
    assert controls.keys is not None
    try:
        async with kit.serving_gateway(router.address, controls=controls) as gateway:
            yield gateway, controls.keys
    finally:
        await controls.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    kit_of_module: Any, router: Any, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Any, KeyRing, Path]]:
    """The module's guarded gateway, its key ring and its file."""
    path = tmp_path_factory.mktemp("shared") / "keys"
    async with guarded_gateway(kit_of_module, router, path) as (gateway, ring):
        yield gateway, ring, path


@pytest.fixture
def guarded(shared: tuple[Any, KeyRing, Path], router: Any) -> Guarded:
    """Replace the keys of the module's guarded gateway by these, which must be new."""
    gateway, ring, path = shared

    @asynccontextmanager
    async def start(*keys: ApiKey) -> AsyncIterator[Any]:
        router.reset()
        for content in ((), keys):
            write_keys(path, content)
            await ring.refresh()
        yield gateway

    return start


async def until(condition: Callable[[], Any]) -> None:
    """Return when the condition holds; fail when it does not in time."""
    async with asyncio.timeout(patience(20)):
        while not condition():
            await asyncio.sleep(0.01)


# --- who is let in


async def test_a_key_is_asked_for_everywhere_but_at_health_and_what_everybody_may_know(guarded: Guarded) -> None:
    async with guarded(key_of()) as gateway:
        for headers in ({}, bearer("hr-wrong"), {"authorization": "Basic abc"}, {"x-api-key": "hr-wrong"}):
            response = await gateway.http.post(CHAT, json=BODY, headers=headers)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (401, "invalid_api_key")
            assert error.keys() == {"message", "type", "param", "code"}
            assert response.headers["www-authenticate"] == "Bearer"
            assert "hr-wrong" not in response.text
        for path in ("/v1/models", "/metrics", "/console/fleet"):
            assert (await gateway.http.get(path)).status_code == 401, path
            assert (await gateway.http.get(path, headers=bearer())).status_code == 200, path
        for path in ("/health/live", "/health/ready", "/v2/health/ready", "/openapi.json", "/"):
            assert (await gateway.http.get(path)).status_code == 200, path
        assert (await gateway.http.get("/v1/nothing")).status_code == 404


async def test_a_key_comes_as_bearer_or_as_x_api_key(guarded: Guarded) -> None:
    async with guarded(key_of()) as gateway:
        for headers in (bearer(), {"authorization": f"bearer  {SECRET}"}, {"x-api-key": SECRET}):
            assert (await gateway.http.post(CHAT, json=BODY, headers=headers)).status_code == 200


async def test_an_endless_key_is_refused_like_any_other(guarded: Guarded) -> None:
    async with guarded(key_of()) as gateway:
        response = await gateway.http.post(CHAT, json=BODY, headers=bearer("x" * 50_000))
        assert (response.status_code, len(response.content) < 4096) == (401, True)


async def test_metrics_may_be_left_open(kit: Any, router: Any, tmp_path: Path) -> None:
    async with guarded_gateway(kit, router, tmp_path / "keys", open_metrics=True) as (gateway, _):
        assert (await gateway.http.get("/metrics")).status_code == 200


async def test_the_tenant_of_a_request_is_that_of_its_key_and_nothing_a_caller_says(
    guarded: Guarded, router: Any
) -> None:
    async with guarded(key_of()) as gateway:
        body = {**BODY, "tenant": "other", "user": "other", "n": 2}
        assert (await gateway.http.post(CHAT, json=body, headers={**bearer(), "x-tenant": "x"})).status_code == 200
        assert {stream.request.tenant for stream in router.streams} == {"mill"}
        assert all("authorization" not in stream.metadata for stream in router.streams)


async def test_prompts_of_one_tenant_share_a_cache_and_those_of_two_only_by_choice(
    guarded: Guarded, router: Any
) -> None:
    tenants = {"a": ("mill", None), "b": ("mill", None), "c": ("shop", None), "d": ("shop", "mill"), "e": ("x", "mill")}
    keys = [
        key_of(f"hr-{name}", id=name, tenant=tenant, cache_group=group) for name, (tenant, group) in tenants.items()
    ]
    async with guarded(*keys) as gateway:

        async def wire_of(name: str, **fields: Any) -> tuple[str, str]:
            response = await gateway.http.post(CHAT, json={**BODY, **fields}, headers=bearer(f"hr-{name}"))
            assert response.status_code == 200
            return router.streams[-1].request.cache_salt, router.streams[-1].request.session_key

        plain = {name: await wire_of(name) for name in tenants}
        assert plain["a"] == plain["b"]
        assert plain["d"] == plain["e"]
        assert len(set(plain.values())) == 3
        salted = {name: await wire_of(name, cache_salt="s", prompt_cache_key="k") for name in tenants}
        assert salted["a"] == salted["b"]
        assert len({part for pair in [*plain.values(), *salted.values()] for part in pair}) == 10
        # A tenant cannot write the salt of another one.
        assert (await wire_of("c", cache_salt=plain["a"][0]))[0] != plain["a"][0]
        assert (await wire_of("a", cache_salt="s"))[0] == salted["a"][0] == scoped_salt("tenant/mill", "s")


async def test_without_keys_everybody_is_let_in(gateway: Any) -> None:
    response = await gateway.http.post(CHAT, json=BODY, headers=bearer("anything"))
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("x-ratelimit")]


# --- what a key allows


async def test_requests_over_the_limit_get_429_with_the_exact_time_to_come_back(guarded: Guarded) -> None:
    async with guarded(key_of(requests_per_minute=2)) as gateway:
        first = await gateway.http.post(CHAT, json=BODY, headers=bearer())
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert re.fullmatch(r"(30s|29\.\d+s)", first.headers["x-ratelimit-reset-requests"])
        assert (await gateway.http.post("/tokenize", json={"prompt": "a"}, headers=bearer())).status_code == 200
        refused = await gateway.http.post(CHAT, json=BODY, headers=bearer())
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (429, "rate_limit_exceeded")
        wait_ms = int(refused.headers["retry-after-ms"])
        assert 20_000 < wait_ms <= 30_000
        assert int(refused.headers["retry-after"]) == -(-wait_ms // 1000)
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        # What is only looked at does not count.
        assert (await gateway.http.get("/v1/models", headers=bearer())).status_code == 200


async def test_tokens_are_taken_for_prompt_and_answer_and_settled_to_what_was_used(
    guarded: Guarded, router: Any
) -> None:
    async with guarded(key_of(tokens_per_minute=150)) as gateway:
        router.answer = "abc"
        response = await gateway.http.post(CHAT, json={**BODY, "max_tokens": 60}, headers=bearer())
        usage = response.json()["usage"]
        assert response.headers["x-ratelimit-limit-tokens"] == "150"
        assert usage["completion_tokens"] == 4
        again = await gateway.http.post(CHAT, json={**BODY, "max_tokens": 60}, headers=bearer())
        used = usage["total_tokens"] + usage["prompt_tokens"] + 60
        assert 150 - used <= int(again.headers["x-ratelimit-remaining-tokens"]) <= 150 - used + 10
        refused = await gateway.http.post(CHAT, json={**BODY, "max_tokens": 120}, headers=bearer())
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 0 < int(refused.headers["retry-after-ms"]) <= 60_000
        never = await gateway.http.post(CHAT, json={**BODY, "max_tokens": 149}, headers=bearer())
        assert (never.status_code, never.json()["error"]["param"]) == (400, "max_tokens")


async def test_an_answer_of_open_length_is_paid_for_behind(guarded: Guarded, router: Any) -> None:
    async with guarded(key_of(tokens_per_minute=60)) as gateway:
        router.answer = "x" * 100
        body = {"model": "tiny", "messages": BODY["messages"], "stream": True}
        streamed = await gateway.http.post(CHAT, json=body, headers=bearer())
        assert streamed.text.rstrip().endswith("[DONE]")
        assert streamed.headers["x-ratelimit-limit-tokens"] == "60"
        refused = await gateway.http.post(CHAT, json=body, headers=bearer())
        assert refused.status_code == 429
        assert int(refused.headers["retry-after-ms"]) > 60_000, "the debt drains first"


async def test_a_request_that_brought_nothing_costs_no_tokens(guarded: Guarded, router: Any) -> None:
    async def refuse(*_: Any) -> None:
        raise StatusError(Reason.TOO_LARGE_FOR_CACHE, "no room")

    async with guarded(key_of(tokens_per_minute=1000)) as gateway:
        router.script = refuse
        body = {**BODY, "max_tokens": 200}
        for _ in range(10):
            assert (await gateway.http.post(CHAT, json=body, headers=bearer())).status_code == 400


async def test_a_key_has_so_many_requests_at_a_time_and_gets_places_back_however_they_end(
    guarded: Guarded, router: Any
) -> None:
    go_on = asyncio.Event()

    async def wait(fake: Any, stream: Any, send: Any) -> None:
        await go_on.wait()
        await send([5], 0, 2)

    other = key_of("hr-other", tenant="other")
    async with guarded(key_of(max_concurrent=2), other) as gateway:
        router.script = wait
        running = [asyncio.create_task(gateway.http.post(CHAT, json=BODY, headers=bearer())) for _ in range(2)]
        await until(lambda: len(router.streams) == 2)
        refused = await gateway.http.post(CHAT, json=BODY, headers=bearer())
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        elsewhere = asyncio.create_task(gateway.http.post(CHAT, json=BODY, headers=bearer("hr-other")))
        await until(lambda: len(router.streams) == 3)
        running[0].cancel()
        await until(router.streams[0].cancelled.is_set)
        go_on.set()
        assert (await running[1]).status_code == (await elsewhere).status_code == 200
        async with asyncio.timeout(patience(10)):
            answers = await asyncio.gather(*(gateway.http.post(CHAT, json=BODY, headers=bearer()) for _ in range(2)))
        assert [answer.status_code for answer in answers] == [200, 200]


async def test_a_key_may_be_for_some_models_and_priorities_only(guarded: Guarded) -> None:
    keys = (key_of(models=("other",)), key_of("hr-2", max_priority=3))
    async with guarded(*keys) as gateway:
        refused = await gateway.http.post(CHAT, json=BODY, headers=bearer())
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "model")
        for priority, status in ((-5, 200), (3, 200), (4, 403)):
            answer = await gateway.http.post(CHAT, json={**BODY, "priority": priority}, headers=bearer("hr-2"))
            assert answer.status_code == status
        assert answer.json()["error"]["param"] == "priority"


# --- gRPC


async def test_grpc_asks_for_the_same_keys_and_limits(guarded: Guarded, router: Any) -> None:
    request = text_pb2.ChatRequest(messages=[text_pb2.ChatMessage(role="user", content="hi")])
    request.params.max_tokens = 2
    async with (
        guarded(key_of(requests_per_minute=3)) as gateway,
        grpc.aio.insecure_channel(gateway.grpc_address) as channel,
    ):
        text = text_pb2_grpc.TextStub(channel)

        async def chat(*metadata: tuple[str, str]) -> StatusError | None:
            try:
                async for _ in text.Chat(request, metadata=metadata, timeout=10):
                    pass
            except grpc.aio.AioRpcError as error:
                return error_of(error)
            return None

        for metadata in ((), (("authorization", "Bearer hr-wrong"),)):
            refused = await chat(*metadata)
            assert refused is not None
            assert refused.reason is Reason.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await text.Tokenize(text_pb2.TokenizeRequest(text="a"), timeout=patience(10))
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        known = (("authorization", f"Bearer {SECRET}"),)
        assert await chat(*known) is None
        assert router.streams[-1].request.tenant == "mill"
        assert await chat(("x-api-key", SECRET)) is None
        assert (await text.Tokenize(text_pb2.TokenizeRequest(text="a"), metadata=known)).token_ids
        assert (await text.ListModels(text_pb2.TextListModelsRequest(), metadata=known)).models
        refused = await chat(*known)
        assert refused is not None
        assert refused.reason is Reason.QUOTA
        assert refused.retry_after_s is not None
        assert 10 < refused.retry_after_s <= 20


# --- files and Redis


async def test_a_key_is_kept_by_its_hash_in_a_file_for_its_owner_alone(tmp_path: Path) -> None:
    secret = new_secret()
    assert len(secret) > 40
    key = key_of(secret, requests_per_minute=5, models=("a", "b"))
    write_keys(tmp_path / "keys", [key])
    assert secret.encode() not in (tmp_path / "keys").read_bytes()
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600
    assert read_keys(tmp_path / "keys") == (key,)
    assert load_key(dump_key(key)) == key
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


@pytest.mark.parametrize(
    "wrong",
    [
        "[]",
        "{",
        '{"keys": [1]}',
        '{"keys": [{"id": "a"}]}',
        json.dumps({"keys": [{**json.loads(dump_key(key_of())), "requests_per_minut": 5}]}),
        json.dumps({"keys": [{**json.loads(dump_key(key_of())), "requests_per_minute": 0}]}),
        json.dumps({"keys": [{**json.loads(dump_key(key_of())), "sha256": "abc"}]}),
        json.dumps({"keys": [json.loads(dump_key(key_of()))] * 2}),
        "[" * 100_000,
    ],
)
async def test_a_file_that_makes_no_sense_changes_nothing_and_is_not_quoted(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "keys"
    write_keys(path, [key_of()])
    ring = KeyRing(KeyFile(path))
    await ring.refresh()
    path.write_text(wrong)
    with pytest.raises(KeysError) as raised:
        await ring.refresh()
    assert len(str(raised.value)) < 500
    assert sha256_of(SECRET) not in str(raised.value)
    assert ring.find(SECRET).name == "alice"
    path.unlink()
    with pytest.raises(KeysError):
        await ring.refresh()
    assert ring.find(SECRET).name == "alice"


async def test_a_changed_file_is_followed_without_a_restart(
    guarded: Guarded, shared: tuple[Any, KeyRing, Path]
) -> None:
    async with guarded(key_of()) as gateway:

        async def statuses() -> Sequence[int]:
            answers = [await gateway.http.get("/v1/models", headers=bearer(one)) for one in (SECRET, "hr-new")]
            return [answer.status_code for answer in answers]

        assert await statuses() == [200, 401]
        write_keys(shared[2], [key_of("hr-new")])
        async with asyncio.timeout(patience(20)):
            while await statuses() != [401, 200]:
                await asyncio.sleep(0.05)


async def test_keys_in_redis_are_followed_and_outlive_it(tmp_path: Path) -> None:
    server = RedisServer(tmp_path).start()
    client: Any = server.client()
    table = KeyTable(server.url)
    ring = KeyRing(table)
    with pytest.raises(StatusError) as raised:
        ring.find(SECRET)
    assert raised.value.reason is Reason.NO_CAPACITY, "nothing is known yet"
    await ring.refresh()
    with pytest.raises(StatusError) as raised:
        ring.find(SECRET)
    assert raised.value.reason is Reason.UNAUTHENTICATED
    client.hset(REDIS_KEYS, "k", dump_key(replace(key_of(), id="k")))
    client.set(REDIS_VERSION, "one")
    await ring.refresh()
    assert ring.find(SECRET).id == "k"
    server.kill()
    with pytest.raises(KeysError):
        await ring.refresh()
    server.start()  # empty
    with pytest.raises(KeysError, match="emptied"):
        await ring.refresh()
    assert ring.find(SECRET).id == "k"
    client.hset(REDIS_KEYS, "other", dump_key(key_of("hr-2")))
    client.set(REDIS_VERSION, "another")
    await ring.refresh()
    assert ring.find("hr-2").name == "alice"
    await table.close()
    server.kill()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"api_keys": Path("/nowhere/keys")}, "headrace keys create"),
        ({"api_keys": Path("a"), "api_keys_redis": True}, "choose one"),
        ({"api_keys_redis": True}, "--redis URL"),
        ({"tls_cert": Path("a")}, "go together"),
        ({"tls_client_ca": Path("a")}, "needs --tls-cert"),
        ({"tls_cert": Path("/nowhere/a"), "tls_key": Path("/nowhere/b")}, "PEM files"),
        ({"tls_dir": Path("/nowhere")}, "headrace certs create"),
        ({"join_token_file": Path("/nowhere/token")}, "join token"),
        ({"cors_origins": ("chat.example",)}, "SCHEME://HOST"),
        ({"api_keys": Path(os.devnull), "redis_url": "http://u:hunter2@h/"}, "not a Redis URL"),
    ],
)
async def test_what_cannot_be_done_is_refused_with_the_remedy_and_without_secrets(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(EdgeSettingsError) as raised:
        await EdgeControls(EdgeSettings(**settings)).start()
    assert said in str(raised.value)
    assert "hunter2" not in str(raised.value)
