"""Responses kept in Redis, so that any gateway can go on from them: one string for each, which Redis forgets in time.

headrace:response:ID    see `response_store.packed`, and `response_runs` for those in the background
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar, cast

from headrace.gateway.response_store import DEFAULT_TTL_S, StoreError
from headrace.protos.redis_link import connect, failures

PREFIX = "headrace:response:"
TIMEOUT_S = 2.0
_T = TypeVar("_T")


class RedisStore:
    """A `Store` in the Redis at a URL. Raises ValueError for what is no such URL."""

    is_shared = True

    def __init__(self, url: str, ttl_s: float = DEFAULT_TTL_S) -> None:
        self._redis = connect(url, TIMEOUT_S)
        self._ttl_s = ttl_s

    async def put(self, key: str, value: bytes, ttl_s: float | None = None) -> None:
        """As `Store.put`."""
        ttl_ms = max(1, round(1000 * (self._ttl_s if ttl_s is None else ttl_s)))
        await self._within(self._redis.set(PREFIX + key, value, px=ttl_ms))

    async def get(self, key: str) -> bytes | None:
        """As `Store.get`."""
        # Bytes, since the client does not decode.
        return cast("bytes | None", await self._within(self._redis.get(PREFIX + key)))

    async def delete(self, key: str) -> bool:
        """As `Store.delete`."""
        return bool(await self._within(self._redis.delete(PREFIX + key)))

    async def close(self) -> None:
        """As `Store.close`."""
        await self._redis.aclose()

    async def _within(self, command: Awaitable[_T]) -> _T:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await command
        except failures() as error:
            raise StoreError(f"Redis does not answer: {error or type(error).__name__}") from error
