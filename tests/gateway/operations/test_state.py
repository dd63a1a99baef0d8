"""The health response shows the state of each Redis, independent of its status."""

from __future__ import annotations

from typing import Any

from headrace.protos import router_pb2

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


async def test_a_gateway_that_cannot_be_asked_tells_too(kit: Any, tiny_bundle: bytes) -> None:
    router = kit.FakeRouter(tiny_bundle)
    router.cards, router.redis = [], router_pb2.REDIS_STATE_UNWRITABLE
    async with kit.serving_router(router) as (address, _), kit.serving_gateway(address) as gateway:
        answer = await gateway.http.get("/health/ready")
        assert answer.status_code == 503
        assert answer.json() == {"status": "no model is ready", "redis": {"leases": "unwritable"}}
