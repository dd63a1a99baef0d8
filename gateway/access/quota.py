"""Limits that all gateways of a fleet share in Redis, and local limits while it is unreachable.

    headrace:quota:{KEY}:requests    hash of `level` and `at_us`, a bucket as in `limits`
    headrace:quota:{KEY}:tokens      the same for tokens
    headrace:quota:{KEY}:inside      sorted set of running requests, each with the time at which its lease ends

Decisions are scripts: they are atomic, and they use the clock of Redis, so gateways need not agree on the time. An
admitted request holds a lease that its gateway renews. When the gateway dies, the lease ends and the place is free.

A gateway sends its decisions and notes over one connection, in order, and all that are ready in one message.

While Redis is unreachable, each gateway counts by itself, beginning with the requests that it has already admitted. So
a key's counts do not start again from zero, but each gateway grants the key its full limits. Redis counts as
unreachable when a message fails or takes longer than `TIMEOUT_S`. Until it answers again no request waits for it, and
the gateway tries it every `LOOK_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.common.stores.redis_link import RedisClient, connect, failures
from headrace.common.tasks import end_tasks
from headrace.gateway.access.limits import Answer, Entry, KeyLimits, LimitState, LocalLimits

TIMEOUT_S = 1.0
LOOK_S = 0.5
LEASE_S = 30.0
MAX_NOTES = 10_000
"""Maximum of ended requests and corrections that wait for Redis. Beyond it, corrections are lost and leases expire."""
_BATCH = 256
# If a wait ends this late, the gateway itself was blocked; that says nothing about Redis.
_STALL_S = 0.25
_SOCKET_TIMEOUT_S = 5.0
_LOOKED_KEY = "headrace:quota:looked"
_LOG = logging.getLogger(__name__)

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
local function state(limit, level)
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
local remaining, reset = state(limit, level)
return {wait, remaining, reset}
"""
)

# Further arguments: limit of requests or 0, most at a time or 0, the request's name, its lease in us.
# Answer: wait in us, whether there are too many at a time, remaining, reset in us.
ENTER = (
    _PRELUDE
    + """
local limit, most, request, lease = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local level, remaining, reset = 0, 0, 0
if limit > 0 then
  level = drained(KEYS[1], limit)
  remaining, reset = state(limit, level)
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
  remaining, reset = state(limit, level)
end
if most > 0 then
  redis.call('ZADD', KEYS[2], string.format('%.0f', now + lease), request)
  redis.call('PEXPIRE', KEYS[2], string.format('%.0f', math.ceil(lease / 1000)))
end
return {0, 0, remaining, reset}
"""
)

# Argument: a request's name.
LEAVE = "return redis.call('ZREM', KEYS[1], ARGV[1])"

# Further arguments: lease in us, names of requests. Running requests get another lease; requests that were admitted
# while Redis was unavailable are added.
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
_NUM_NUMBERS = {ENTER: 4, TAKE: 3}


@dataclass(frozen=True, slots=True, eq=False)
class _Script:
    """A script to run. `answer` is None if no request waits for it."""

    text: str
    keys: Sequence[str]
    arguments: Sequence[Any]
    answer: asyncio.Future[list[int] | None] | None = None


class SharedLimits:
    """The limits of all gateways at one Redis. `local` counts all requests, and decides while Redis is unreachable."""

    def __init__(self, url: str, local: LocalLimits) -> None:
        """Raises ValueError if the URL is not a Redis URL."""
        self._redis: RedisClient = connect(url, _SOCKET_TIMEOUT_S)
        self._local = local
        self.is_shared = False
        """Whether Redis answers."""
        self._inside: dict[str, KeyLimits] = {}
        self._queue: deque[_Script] = deque()
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Find out whether Redis answers, and check regularly from then on."""
        await self._look()
        if not self.is_shared:
            _LOG.warning("Redis does not answer: each gateway applies the limits of keys by itself")
        self._tasks = [
            asyncio.create_task(self._keep_looking(), name="Redis"),
            asyncio.create_task(self._keep_telling(), name="limits in Redis"),
        ]

    async def close(self) -> None:
        """Send the notes that are left, if Redis answers, and stop."""
        await end_tasks(*self._tasks)
        while self.is_shared and self._queue:
            await self._tell()
        await self._redis.aclose()

    async def enter(self, key: KeyLimits, request: str) -> Entry:
        """Admit a request, if its key has room. A refused request does not count. `request` is its unique name."""
        limit = key.requests_per_minute or 0
        most = key.max_concurrent or 0
        names = [_name(key, "requests"), _name(key, "inside")]
        try:
            reply = await self._ask(ENTER, names, ["", limit, most, request, _LEASE_US])
        except asyncio.CancelledError:
            self.leave(key, request)  # Redis may admit it, or have admitted it
            raise
        if reply is None:
            entry = self._local.enter(key, request)
        else:
            wait_us, is_at_max_concurrent, remaining, reset_us = reply
            entry = Entry(
                wait_us, bool(is_at_max_concurrent), LimitState(limit, remaining, reset_us) if limit else None
            )
            if entry.is_in:
                self._local.enter(key, request, anyway=True)
        if entry.is_in:
            self._inside[request] = key
        return entry

    async def take_tokens(self, key: KeyLimits, cost: int) -> Answer:
        """Count tokens if there is room. The key must have such a limit."""
        limit = key.tokens_per_minute
        assert limit is not None
        answer = self._asked(TAKE, [_name(key, "tokens")], ["", cost, limit, 0])
        try:
            reply = None if answer is None else await asyncio.shield(answer)
        except asyncio.CancelledError:
            if answer is not None:  # Redis may count the tokens, or have done so
                answer.add_done_callback(lambda done: self._give_back(key, cost, done))
            raise
        if reply is None:
            return self._local.take_tokens(key, cost)
        wait_us, remaining, reset_us = reply
        if not wait_us:
            self._local.take_tokens(key, cost, anyway=True)
        return Answer(wait_us, LimitState(limit, remaining, reset_us))

    def _give_back(self, key: KeyLimits, cost: int, answer: asyncio.Future[list[int] | None]) -> None:
        """Give Redis' tokens back if it took them, for a request that did not wait for the answer."""
        reply = None if answer.cancelled() else answer.result()
        if reply is not None and not reply[0]:
            self._note(_Script(TAKE, [_name(key, "tokens")], ["", -cost, key.tokens_per_minute, 1]))

    def settle(self, key: KeyLimits, delta: int) -> None:
        """Correct the count by `delta` tokens, which is negative if fewer were used than taken. Redis is updated
        shortly after."""
        if key.tokens_per_minute is not None and delta:
            self._local.take_tokens(key, delta, anyway=True)
            self._note(_Script(TAKE, [_name(key, "tokens")], ["", delta, key.tokens_per_minute, 1]))

    def leave(self, key: KeyLimits, request: str) -> None:
        """Note that an admitted request has ended. Redis is updated shortly after."""
        self._local.leave(key, request)
        self._inside.pop(request, None)
        if key.max_concurrent is not None:
            self._note(_Script(LEAVE, [_name(key, "inside")], [request]))

    def retain(self, key_ids: Collection[str]) -> None:
        """Forget all keys except these, and except keys with running requests."""
        self._local.retain(key_ids)

    # --- Redis ------------------------------------------------------------------------------------------------------

    async def _ask(self, text: str, keys: Sequence[str], arguments: Sequence[Any]) -> list[int] | None:
        """The result of a script; None if Redis is unreachable."""
        answer = self._asked(text, keys, arguments)
        return None if answer is None else await answer

    def _asked(
        self, text: str, keys: Sequence[str], arguments: Sequence[Any]
    ) -> asyncio.Future[list[int] | None] | None:
        """The future result of a script, or None in it if Redis fails in the meantime; no future if Redis is
        unreachable."""
        if not self.is_shared:
            return None
        answer: asyncio.Future[list[int] | None] = asyncio.get_running_loop().create_future()
        self._queue.append(_Script(text, keys, arguments, answer))
        self._wake.set()
        return answer

    def _note(self, script: _Script) -> None:
        if len(self._queue) < MAX_NOTES:
            self._queue.append(script)
            self._wake.set()

    async def _keep_telling(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self.is_shared and self._queue:
                await self._tell()

    async def _tell(self) -> None:
        """Run the next scripts, all of them in one message."""
        batch = [self._queue.popleft() for _ in range(min(_BATCH, len(self._queue)))]
        answers: list[Any] | None = None
        try:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for script in batch:
                    pipeline.eval(script.text, len(script.keys), *script.keys, *script.arguments)
                answers = await self._in_time(asyncio.ensure_future(pipeline.execute()))
            if answers is not None and not all(map(_fits, batch, answers)):
                _LOG.warning("Redis gave an invalid answer: each gateway applies the limits of keys by itself")
                answers = None
        except failures():
            _LOG.debug("a broken connection to Redis could not be given back")
        finally:
            for script, answer in zip(batch, answers or [None] * len(batch), strict=True):
                if script.answer is not None and not script.answer.done():
                    script.answer.set_result(answer)
            if answers is None:
                # Notes are not sent again: Redis may have them, and they would count twice.
                self._is_away()

    async def _in_time(self, command: asyncio.Future[Any]) -> Any:
        """The result; None if it failed or took too long."""
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        try:
            await asyncio.wait({command}, timeout=TIMEOUT_S)
            if not command.done() and loop.time() - begun_s > TIMEOUT_S + _STALL_S:
                await asyncio.wait({command}, timeout=TIMEOUT_S)
            if command.done():
                return command.result()
            problem = f"no answer within {TIMEOUT_S:g} s"
        except failures() as error:
            problem = str(error) or type(error).__name__
        finally:
            command.cancel()
        if self.is_shared:
            _LOG.warning("Redis is unreachable (%s): each gateway applies the limits of keys by itself", problem[:200])
        return None

    def _is_away(self) -> None:
        """Stop waiting for Redis. Notes for it are kept until it is back."""
        self.is_shared = False
        waiting = [script for script in self._queue if script.answer is not None]
        self._queue = deque(script for script in self._queue if script.answer is None)
        for script in waiting:
            assert script.answer is not None
            if not script.answer.done():
                script.answer.set_result(None)

    async def _look(self) -> None:
        # A replica and a server that is out of memory answer a ping too.
        looking = asyncio.ensure_future(self._redis.set(_LOOKED_KEY, b"1", px=1000))
        if await self._in_time(looking) is None:
            self._is_away()
        else:
            self.is_shared = True

    async def _keep_looking(self) -> None:
        loop = asyncio.get_running_loop()
        renewed_s = loop.time()
        while True:
            was_shared = self.is_shared
            await self._look()
            if self.is_shared and (not was_shared or loop.time() - renewed_s > LEASE_S / 3):
                if not was_shared:
                    _LOG.info("Redis is back: gateways share the limits of keys again")
                renewed_s = loop.time()
                self._renew_leases()
                self._wake.set()
            await asyncio.sleep(LOOK_S)

    def _renew_leases(self) -> None:
        by_key: dict[KeyLimits, list[str]] = {}
        for request, key in self._inside.items():
            if key.max_concurrent is not None:
                by_key.setdefault(key, []).append(request)
        for key, names in by_key.items():
            for start in range(0, len(names), _BATCH):
                batch = names[start : start + _BATCH]
                self._note(_Script(RENEW, [_name(key, "inside")], ["", _LEASE_US, *batch]))


def _fits(script: _Script, answer: Any) -> bool:
    """Whether the answer is one of this script."""
    if script.answer is None:
        return True
    is_list = isinstance(answer, list) and len(answer) == _NUM_NUMBERS[script.text]
    return is_list and all(isinstance(number, int) for number in answer)


def _name(key: KeyLimits, kind: str) -> str:
    # In a cluster, the part in braces decides the slot, and a script's keys must be in one slot.
    return f"headrace:quota:{{{key.key_id}}}:{kind}"
