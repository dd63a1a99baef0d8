"""What health says of each Redis that is used: for people, whatever the status."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.gateway.responses import redis_store
from headrace.gateway.responses.redis_store import RedisStore
from headrace.protos import router_pb2
from tests.redis_server import RedisServer

READY = {"status": "ready"}
PATHS = ("/health", "/health/ready", "/v2/health/ready", "/ping")


async def health(gateway: Any) -> Any:
    answers = [await gateway.http.get(path) for path in PATHS]
    assert {answer.status_code for answer in answers} == {200}
    return answers[-1].json()


async def test_health_tells_how_the_redis_of_the_leases_is(kit: Any, tiny_bundle: bytes) -> None:
    router = kit.FakeRouter(tiny_bundle)
    async with kit.serving_router(router) as (address, _), kit.serving_gateway(address) as gateway:
        assert await health(gateway) == READY
        for state, word in (
            (router_pb2.REDIS_STATE_OK, "ok"),
            (router_pb2.REDIS_STATE_UNWRITABLE, "unwritable"),
            (router_pb2.REDIS_STATE_UNREACHABLE, "unreachable"),
        ):
            router.redis = state
            await gateway.upstream.list_models()
            for path in PATHS:
                assert (await gateway.http.get(path)).json() == {**READY, "redis": {"leases": word}}


async def test_health_tells_how_the_redis_of_the_responses_is(
    kit: Any, tiny_bundle: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "LOOK_S", 0.05)
    server = RedisServer(tmp_path, "--maxmemory", "1", "--maxmemory-policy", "noeviction").start()
    store = RedisStore(server.url)
    router = kit.FakeRouter(tiny_bundle)
    body = {"model": "tiny", "input": "hi"}
    async with kit.serving_router(router) as (address, _), kit.serving_gateway(address, responses=store) as gateway:
        watching = asyncio.create_task(store.watch())

        async def until_redis_is(word: str) -> None:
            async with asyncio.timeout(20):
                while await health(gateway) != {**READY, "redis": {"responses": word}}:
                    await asyncio.sleep(0.02)

        try:
            await until_redis_is("unwritable")
            answer = await gateway.http.post("/v1/responses", json=body)
            assert (answer.status_code, answer.json()["store"]) == (200, False)
            server.client().config_set("maxmemory", 0)
            await until_redis_is("ok")
            assert (await gateway.http.post("/v1/responses", json=body)).json()["store"] is True
            server.client().replicaof("127.0.0.1", str(server.port))
            await until_redis_is("unwritable")
            server.kill()
            await until_redis_is("unreachable")
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await store.close()
            server.kill()


async def test_a_gateway_that_cannot_be_asked_tells_too(kit: Any, tiny_bundle: bytes) -> None:
    router = kit.FakeRouter(tiny_bundle)
    router.cards, router.redis = [], router_pb2.REDIS_STATE_UNWRITABLE
    async with kit.serving_router(router) as (address, _), kit.serving_gateway(address) as gateway:
        answer = await gateway.http.get("/health/ready")
        assert answer.status_code == 503
        assert answer.json() == {"status": "no model can be asked for", "redis": {"leases": "unwritable"}}
