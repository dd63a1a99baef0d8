"""Limits that all gateways of a fleet share, in Redis; and what holds while it is away.

    headrace:quota:{KEY}:requests    hash of `level` and `at_us`, a bucket as in `limits`
    headrace:quota:{KEY}:tokens      the same for tokens
    headrace:quota:{KEY}:inside      sorted set of requests at a time, each with the time at which its lease ends

Decisions are scripts, so they are atomic, and on the clock of Redis, so that gateways need not agree on the time.
Requests inside hold a lease that is renewed: those of a gateway that died give their places back.

While Redis is away each gateway keeps serving and holds every key to its limits by itself, with what this gateway has
let in before counted: a key cannot start anew, but may get its limits from each of the gateways. That Redis is away is
known from the first command that fails or takes longer than `TIMEOUT_S`, and at the latest after `LOOK_S`; from then
on nobody waits for it, until it answers again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.gateway.limits import Answer, Entry, KeyLimits, LocalLimits, Standing
from headrace.gateway.redis_link import connect, failures

if TYPE_CHECKING:
    from redis.asyncio import Redis

TIMEOUT_S = 0.5
LOOK_S = 0.5
LEASE_S = 30.0
MAX_PENDING = 10_000
"""Ended requests and settlements that wait to be told to Redis; beyond that, the oldest are left to their leases."""
_BATCH = 256
_LOOKED_KEY = "headrace:quota:looked"
_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

# Arguments: time in microseconds, or "" for that of Redis. Numbers are written out, since Lua would round long ones.
_PRELUDE = """
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local function drained(key, limit)
  local kept = redis.call('HMGET', key, 'level', 'at_us')
  local level, at = tonumber(kept[1]) or 0, tonumber(kept[2]) or now
  return math.max(0, level - limit * math.max(0, now - at))
end
local function keep(key, limit, level)
  if level == 0 then redis.call('DEL', key) return end
  redis.call('HSET', key, 'level', string.format('%.0f', level), 'at_us', string.format('%.0f', now))
  redis.call('PEXPIRE', key, string.format('%.0f', math.ceil(level / limit / 1000) + 1000))
end
local function told(limit, level)
  return math.floor(math.max(0, limit * 60000000 - level) / 60000000), math.ceil(level / limit)
end
"""

# Further arguments: cost, limit, whether to take it anyway. Answer: wait in us, remaining, reset in us.
TAKE = (
    _PRELUDE
    + """
local cost, limit, anyway = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4] == '1'
local level = drained(KEYS[1], limit)
local over = level + cost * 60000000 - limit * 60000000
local wait = 0
if over > 0 and not anyway then
  wait = math.ceil(over / limit)
else
  level = math.min(math.max(0, level + cost * 60000000), 9007199254740991)
  keep(KEYS[1], limit, level)
end
local remaining, reset = told(limit, level)
return {wait, remaining, reset}
"""
)

# Further arguments: limit of requests or 0, most at a time or 0, the request's name, its lease in us.
# Answer: wait in us, whether there are too many at a time, remaining, reset in us.
ENTER = (
    _PRELUDE
    + """
local limit, most, visit, lease = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local level, remaining, reset = 0, 0, 0
if limit > 0 then
  level = drained(KEYS[1], limit)
  remaining, reset = told(limit, level)
end
if most > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now))
  if redis.call('ZCARD', KEYS[2]) >= most then return {0, 1, remaining, reset} end
end
if limit > 0 then
  local over = level + 60000000 - limit * 60000000
  if over > 0 then return {math.ceil(over / limit), 0, remaining, reset} end
  level = level + 60000000
  keep(KEYS[1], limit, level)
  remaining, reset = told(limit, level)
end
if most > 0 then
  redis.call('ZADD', KEYS[2], string.format('%.0f', now + lease), visit)
  redis.call('PEXPIRE', KEYS[2], string.format('%.0f', math.ceil(lease / 1000)))
end
return {0, 0, remaining, reset}
"""
)

# Further arguments: lease in us, names of requests. Those that are still inside stay for another lease; one that came
# in while Redis was away is entered.
RENEW = (
    _PRELUDE
    + """
for index = 3, #ARGV do
  redis.call('ZADD', KEYS[1], string.format('%.0f', now + tonumber(ARGV[2])), ARGV[index])
end
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.ceil(tonumber(ARGV[2]) / 1000)))
"""
)

_LEASE_US = round(LEASE_S * 1e6)


class SharedLimits:
    """The limits of all gateways at one Redis. `local` holds while it is away, and follows along while it is not."""

    def __init__(self, url: str, local: LocalLimits) -> None:
        """Raises ValueError for what is no URL of Redis."""
        self._redis: Redis = connect(url, TIMEOUT_S)
        self._local = local
        self.is_shared = False
        """Whether Redis answers."""
        self._take = self._redis.register_script(TAKE)
        self._enter = self._redis.register_script(ENTER)
        self._renew = self._redis.register_script(RENEW)
        self._inside: dict[str, KeyLimits] = {}
        self._pending: dict[object, tuple[KeyLimits, str, int]] = {}
        self._told = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Find out whether Redis answers, and keep an eye on it from then on."""
        await self._look()
        if not self.is_shared:
            _LOG.warning("Redis does not answer: keys are held to their limits by each gateway for itself")
        self._tasks = [
            asyncio.create_task(self._keep_looking(), name="Redis"),
            asyncio.create_task(self._keep_telling(), name="limits to Redis"),
        ]

    async def close(self) -> None:
        """Tell Redis what is still to be told, if it answers, and stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.is_shared:
            await self._tell()
        await self._redis.aclose()

    async def enter(self, key: KeyLimits, visit: str) -> Entry:
        """Let a request in, if its key has room; a refused one counts for nothing. `visit` is a name of its own."""
        if not self.is_shared:
            return self._enter_here(key, visit)
        limit, most = key.requests_per_minute or 0, key.max_concurrent or 0
        names = [_name(key, "requests"), _name(key, "inside")]
        told = await self._ask(self._enter(names, ["", limit, most, visit, _LEASE_US]))
        if told is None:
            return self._enter_here(key, visit)
        wait_us, is_crowded, remaining, reset_us = told
        entry = Entry(wait_us, bool(is_crowded), Standing(limit, remaining, reset_us) if limit else None)
        if entry.is_in:
            self._local.enter(key, visit, anyway=True)
            self._inside[visit] = key
        return entry

    def _enter_here(self, key: KeyLimits, visit: str) -> Entry:
        entry = self._local.enter(key, visit)
        if entry.is_in:
            self._inside[visit] = key
        return entry

    async def take_tokens(self, key: KeyLimits, cost: int) -> Answer:
        """Count tokens, if there is room. The key has such a limit."""
        limit = key.tokens_per_minute
        assert limit is not None
        told = await self._ask(self._take([_name(key, "tokens")], ["", cost, limit, 0])) if self.is_shared else None
        if told is None:
            return self._local.take_tokens(key, cost)
        wait_us, remaining, reset_us = told
        if not wait_us:
            self._local.take_tokens(key, cost, anyway=True)
        return Answer(wait_us, Standing(limit, remaining, reset_us))

    def settle(self, key: KeyLimits, delta: int) -> None:
        """So many tokens more (or fewer, if negative) were used than taken. Redis is told in a moment."""
        if key.tokens_per_minute is not None and delta:
            self._local.take_tokens(key, delta, anyway=True)
            self._later(key, "", delta)

    def leave(self, key: KeyLimits, visit: str) -> None:
        """A request that was let in has ended. Redis is told in a moment."""
        self._local.leave(key, visit)
        self._inside.pop(visit, None)
        if key.max_concurrent is not None:
            self._later(key, visit, 0)

    def retain(self, key_ids: Collection[str]) -> None:
        """Forget all other keys, where nothing of them is inside."""
        self._local.retain(key_ids)

    # --- Redis ------------------------------------------------------------------------------------------------------

    async def _ask(self, command: Awaitable[_T]) -> _T | None:
        """The answer; None, and nobody asks again for now, if there is none in time."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await command
        except failures() as error:
            if self.is_shared:
                what = str(error) or type(error).__name__
                _LOG.warning("Redis is away (%s): each gateway holds keys to their limits for itself", what[:200])
            self.is_shared = False
            return None

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                # A replica and a server without memory would answer a ping, too.
                await self._redis.set(_LOOKED_KEY, b"1", px=1000)
        except failures() as error:
            if self.is_shared:
                what = str(error) or type(error).__name__
                _LOG.warning("Redis is away (%s): each gateway holds keys to their limits for itself", what[:200])
            self.is_shared = False
        else:
            self.is_shared = True

    async def _keep_looking(self) -> None:
        renewed_s = asyncio.get_running_loop().time()
        while True:
            was_shared = self.is_shared
            await self._look()
            now_s = asyncio.get_running_loop().time()
            if self.is_shared and (not was_shared or now_s - renewed_s > LEASE_S / 3):
                if not was_shared:
                    _LOG.info("Redis is back: gateways share the limits of keys again")
                renewed_s = now_s
                await self._renew_leases()
                self._told.set()
            await asyncio.sleep(LOOK_S)

    async def _renew_leases(self) -> None:
        by_key: dict[KeyLimits, list[str]] = {}
        for visit, key in self._inside.items():
            if key.max_concurrent is not None:
                by_key.setdefault(key, []).append(visit)
        for key, visits in by_key.items():
            for start in range(0, len(visits), _BATCH):
                batch = [visit for visit in visits[start : start + _BATCH] if visit in self._inside]
                if batch:
                    await self._ask(self._renew([_name(key, "inside")], ["", _LEASE_US, *batch]))

    def _later(self, key: KeyLimits, visit: str, delta: int) -> None:
        while len(self._pending) >= MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        if visit:
            self._pending[visit] = (key, visit, 0)
        else:
            _, _, before = self._pending.get(key, (key, "", 0))
            self._pending[key] = (key, "", before + delta)
        self._told.set()

    async def _keep_telling(self) -> None:
        while True:
            await self._told.wait()
            self._told.clear()
            while self.is_shared and self._pending:
                await self._tell()

    async def _tell(self) -> None:
        """Tell Redis of one batch of ended requests and settlements; what it did not take stays to be told."""
        names = list(self._pending)[:_BATCH]
        batch = {name: self._pending.pop(name) for name in names}
        if not batch:
            return
        async with self._redis.pipeline(transaction=False) as pipeline:
            for key, visit, delta in batch.values():
                if visit:
                    pipeline.zrem(_name(key, "inside"), visit)
                else:
                    arguments: list[Any] = ["", delta, key.tokens_per_minute, 1]
                    await self._take([_name(key, "tokens")], arguments, client=pipeline)
            told = await self._ask(pipeline.execute())
        if told is None:
            # Settlements might count twice if Redis had taken them before it failed; ended requests cannot.
            for name, (key, visit, delta) in batch.items():
                if visit:
                    self._pending.setdefault(name, (key, visit, delta))


def _name(key: KeyLimits, kind: str) -> str:
    # What is in braces decides the slot in a cluster: a script's keys must be in one.
    return f"headrace:quota:{{{key.key_id}}}:{kind}"
