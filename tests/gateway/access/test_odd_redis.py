"""Keys and limits beside a Redis that answers nothing, or what no Redis answers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.common.stores.api_keys import REDIS_KEYS, REDIS_VERSION, ApiKey, dump_key, sha256_of
from headrace.gateway.access import keys, quota
from headrace.gateway.access.keys import KeyRing, KeyTable
from headrace.gateway.access.limits import KeyLimits, LocalLimits
from headrace.gateway.access.quota import SharedLimits
from tests.odd_redis import ODD_ANSWERS, odd_redis
from tests.patience import patience
from tests.redis_server import RedisServer, until

BOUND_S = 20


async def test_limits_hold_by_themselves_until_redis_is_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(quota, "LOOK_S", 0.05)
    server = RedisServer(tmp_path)
    limits = SharedLimits(server.url, LocalLimits(lambda: time.monotonic_ns() // 1000))
    key = KeyLimits("k", requests_per_minute=100, tokens_per_minute=100, max_concurrent=100)
    async with asyncio.timeout(patience(BOUND_S)), odd_redis(server.port) as odd:
        await limits.start()
        for number, odd.answer in enumerate((b"", *ODD_ANSWERS)):
            seen = odd.num_commands
            while odd.num_commands < seen + 3:
                entry = await limits.enter(key, str(number))
                assert entry.is_in
                assert (await limits.take_tokens(key, 1)).wait_us == 0
                limits.settle(key, -1)
                limits.leave(key, str(number))
                await asyncio.sleep(0.02)
    server.start()
    await asyncio.to_thread(until, lambda: limits.is_shared, "Redis is used again")
    client: Any = server.client()
    assert (await limits.enter(key, "last")).is_in
    await asyncio.to_thread(until, lambda: client.zscore("headrace:quota:{k}:inside", "last"), "Redis counts")
    await limits.close()
    server.kill()


async def test_known_keys_stay_until_redis_is_one_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "LOOK_S", 0.05)
    monkeypatch.setattr(keys, "_REDIS_TIMEOUT_S", 0.3)
    server = RedisServer(tmp_path)
    ring = KeyRing(KeyTable(server.url))
    async with asyncio.timeout(patience(BOUND_S)), odd_redis(server.port) as odd:
        following = asyncio.create_task(ring.run())
        for odd.answer in (b"", *ODD_ANSWERS):
            seen = odd.num_commands
            while odd.num_commands < seen + 3:
                assert not following.done()
                await asyncio.sleep(0.02)
    server.start()
    client: Any = server.client()
    client.hset(REDIS_KEYS, "k", dump_key(ApiKey("k", sha256_of("hr-1"), "alice", "mill", 0)))
    client.set(REDIS_VERSION, "one")
    await asyncio.to_thread(until, lambda: "k" in {key.id for key in ring._by_sha256.values()}, "the key is read")
    following.cancel()
    await ring.close()
    server.kill()
