"""The lease that a worker keeps in Redis. A real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.common.stores.redis_link import WORKER_KEY, WORKERS_KEY
from headrace.worker.server.registration import LEASE_S, RedisLease
from tests.patience import patience
from tests.redis_server import RedisServer


@pytest.fixture
async def lease(redis_server: RedisServer) -> AsyncIterator[RedisLease]:
    made = RedisLease(redis_server.url, "w", "10.0.0.1:1")
    yield made
    await made.close()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(patience(20)):
        while not condition():
            await asyncio.sleep(0.01)


async def test_the_lease_says_where_the_worker_is_and_ends_by_itself(
    redis_server: RedisServer, lease: RedisLease
) -> None:
    client = redis_server.client()
    await until(lambda: client.exists(WORKER_KEY + "w"))
    assert json.loads(client.get(WORKER_KEY + "w") or b"") == {"worker_id": "w", "address": "10.0.0.1:1"}
    assert client.smembers(WORKERS_KEY) == {b"w"}
    assert 0 < client.pttl(WORKER_KEY + "w") <= LEASE_S * 1000


async def test_a_redis_that_comes_back_empty_gets_the_lease_again(redis_server: RedisServer, lease: RedisLease) -> None:
    await until(lambda: redis_server.client().exists(WORKER_KEY + "w"))
    redis_server.kill()
    redis_server.start()
    await until(lambda: redis_server.client().exists(WORKER_KEY + "w"))
    assert redis_server.client().smembers(WORKERS_KEY) == {b"w"}


async def test_whether_the_lease_is_published_is_told(tmp_path: Path) -> None:
    full = RedisServer(tmp_path, "--maxmemory", "1", "--maxmemory-policy", "noeviction").start()
    told: list[bool] = []
    lease = RedisLease(full.url, "w", "10.0.0.1:1", told.append)
    try:
        await until(lambda: told)
        assert not any(told)
        full.client().config_set("maxmemory", 0)
        await until(lambda: told[-1])
    finally:
        await lease.close()
        full.kill()


async def test_closing_takes_the_lease_back(redis_server: RedisServer) -> None:
    lease = RedisLease(redis_server.url, "w", "10.0.0.1:1")
    await until(lambda: redis_server.client().exists(WORKER_KEY + "w"))
    await lease.close()
    assert redis_server.client().keys("*") == []


async def test_a_name_that_another_worker_has_by_now_is_left_to_it(redis_server: RedisServer) -> None:
    lease = RedisLease(redis_server.url, "w", "10.0.0.1:1")
    await until(lambda: redis_server.client().exists(WORKER_KEY + "w"))
    successor = json.dumps({"worker_id": "w", "address": "10.0.0.2:1"})
    redis_server.client().set(WORKER_KEY + "w", successor)
    await lease.close()
    assert redis_server.client().get(WORKER_KEY + "w") == successor.encode()


async def test_closing_does_not_wait_for_a_redis_that_is_away(redis_server: RedisServer) -> None:
    lease = RedisLease(redis_server.url, "w", "10.0.0.1:1")
    await until(lambda: redis_server.client().exists(WORKER_KEY + "w"))
    redis_server.kill()
    async with asyncio.timeout(patience(5)):
        await lease.close()
