"""Responses and conversations stored in Redis, so that any gateway can continue them: one string for each, with a time
to live.

headrace:response:ID           see `store.packed`, and `background` for those in the background; ID is also that of a
                               conversation
headrace:responses:OWNER       sorted set of the ids of a tenant's responses, each with the time at which it ends, in
                               microseconds: of two that are stored at once, one is the older
headrace:responses:OWNER:size  hash of their sizes in bytes, and of the `total`

If a tenant exceeds its bytes, its own oldest responses are deleted in the same step. If Redis evicts values by itself,
their sizes count until they would have expired, which only tightens the tenant's limit.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable
from typing import TypeVar, cast

from headrace.common.stores.redis_link import connect, failures, state_of, word_for
from headrace.gateway.responses.store import DEFAULT_TTL_S, TENANT_BYTES, StoreError, TooLargeError
from headrace.protos.router_pb2 import REDIS_STATE_OK, REDIS_STATE_UNREACHABLE, REDIS_STATE_UNSPECIFIED, RedisState

PREFIX = "headrace:response:"
OWNERS_PREFIX = "headrace:responses:"
TIMEOUT_S = 2.0
LOOK_S = 5.0
# The size of a conversation. A Redis that is nearly full still takes smaller values.
PROBE_BYTES = 64 << 10
_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

_PRELUDE = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local function forget(id)
  local size = redis.call('HGET', KEYS[3], id)
  if size then
    redis.call('HINCRBY', KEYS[3], 'total', -size)
    redis.call('HDEL', KEYS[3], id)
  end
  redis.call('ZREM', KEYS[2], id)
end
"""
# A full Redis refuses a write only if it is the first one of a script. So each script writes or deletes the value
# first. Keys: the value, the owner's ids, their sizes. Arguments: prefix of values, id, value, life in ms, bytes of the
# owner.
_PUT = (
    _PRELUDE
    + """
local prefix, id, value, life, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
redis.call('SET', KEYS[1], value, 'PX', life)
for _, ended in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 100)) do forget(ended) end
forget(id)
redis.call('ZADD', KEYS[2], now + 1000 * life, id)
redis.call('HSET', KEYS[3], id, #value)
local total = redis.call('HINCRBY', KEYS[3], 'total', #value)
while total > most do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
  if not oldest or oldest == id then break end
  redis.call('DEL', prefix .. oldest)
  forget(oldest)
  total = tonumber(redis.call('HGET', KEYS[3], 'total'))
end
redis.call('PEXPIRE', KEYS[2], life)
redis.call('PEXPIRE', KEYS[3], life)
return total
"""
)
# Keys and arguments as above, and behind them the SHA-1 of the value that is replaced. Nothing is written before the
# value itself, as above.
_SWAP = """
local found = redis.call('GET', KEYS[1])
if not found or redis.sha1hex(found) ~= ARGV[6] then return 0 end
""" + _PUT.replace("return total", "return 1")
# Keys as above. Arguments: the id.
_DELETE = _PRELUDE + "local found = redis.call('DEL', KEYS[1]) forget(ARGV[1]) return found"


class RedisStore:
    """A `Store` in the Redis at a URL. Raises ValueError if the URL is not one of Redis."""

    is_shared = True

    def __init__(self, url: str, ttl_s: float = DEFAULT_TTL_S, tenant_bytes: int = TENANT_BYTES) -> None:
        self._redis = connect(url, TIMEOUT_S)
        self._ttl_s = ttl_s
        self._tenant_bytes = tenant_bytes
        self.redis: RedisState = REDIS_STATE_UNSPECIFIED
        """As `Store.redis`."""

    async def put(self, key: str, value: bytes, ttl_s: float | None = None, owner: str | None = None) -> None:
        """As `Store.put`."""
        ttl_ms = max(1, round(1000 * (self._ttl_s if ttl_s is None else ttl_s)))
        if owner is None:
            await self._within(self._redis.set(PREFIX + key, value, px=ttl_ms))
            return
        await self._within(self._redis.eval(_PUT, 3, *_keys(key, owner), *self._arguments(key, value, ttl_ms)))

    async def swap(self, key: str, old: bytes, value: bytes, owner: str) -> bool:
        """As `Store.swap`."""
        arguments = [*self._arguments(key, value, max(1, round(1000 * self._ttl_s))), _sha1(old)]
        return bool(await self._within(self._redis.eval(_SWAP, 3, *_keys(key, owner), *arguments)))

    def _arguments(self, key: str, value: bytes, ttl_ms: int) -> list[str | bytes | int]:
        """The arguments of a script that stores a value."""
        if len(value) > self._tenant_bytes:
            raise TooLargeError(len(value))
        return [PREFIX, key, value, ttl_ms, self._tenant_bytes]

    async def get(self, key: str) -> bytes | None:
        """As `Store.get`."""
        # Bytes, since the client does not decode.
        return cast("bytes | None", await self._within(self._redis.get(PREFIX + key)))

    async def delete(self, key: str, owner: str | None = None) -> bool:
        """As `Store.delete`."""
        if owner is None:
            return bool(await self._within(self._redis.delete(PREFIX + key)))
        return bool(await self._within(self._redis.eval(_DELETE, 3, *_keys(key, owner), key)))

    async def watch(self) -> None:
        """As `Store.watch`."""
        while True:
            before, self.redis = self.redis, await self._state()
            if self.redis not in (before, REDIS_STATE_OK):
                _LOG.warning("responses are not kept: their Redis is %s", word_for(self.redis))
            await asyncio.sleep(LOOK_S)

    async def _state(self) -> RedisState:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await state_of(self._redis, PROBE_BYTES)
        except TimeoutError:
            return REDIS_STATE_UNREACHABLE

    async def close(self) -> None:
        """As `Store.close`."""
        await self._redis.aclose()

    async def _within(self, command: Awaitable[_T]) -> _T:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await command
        except failures() as error:
            raise StoreError(f"Redis does not answer: {error or type(error).__name__}") from error


def _sha1(value: bytes) -> str:
    # Redis knows no other digest. It finds a change of a value, and is no secret.
    return hashlib.sha1(value, usedforsecurity=False).hexdigest()


def _keys(key: str, owner: str) -> tuple[str, str, str]:
    return PREFIX + key, OWNERS_PREFIX + owner, f"{OWNERS_PREFIX}{owner}:size"
