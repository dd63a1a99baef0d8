"""A chaos run: random faults in a fleet and clients with all kinds of requests, from one seed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.fleet import Fleet, Process
from tests.e2e.serving import MODEL
from tests.e2e.streams import Stream
from tests.patience import patience
from tests.redis_server import RedisServer

NUM_PROMPTS = 12
MAX_TOKENS = 24
REQUEST_BOUND_S = 240.0
ANSWERS_BETWEEN = 3


class Clock:
    """The wall clock of all processes: ours plus the steps applied to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.step(0)

    def step(self, offset_s: int) -> None:
        """Set the clock's difference to ours."""
        with self._path.open("r+b" if self._path.exists() else "wb") as file:
            file.write(struct.pack("q", offset_s))


def body_of(number: int) -> dict[str, Any]:
    """A chat that always gets the same answer."""
    prompt = f"Tell me story number {number} about a mill on a river. " * (1 + 6 * (number % 5))
    sampling = {"temperature": 0} if number % 2 else {"temperature": 0.8, "top_p": 0.9, "seed": number}
    message = {"role": "user", "content": prompt}
    return {"model": MODEL, "messages": [message], "ignore_eos": True, "max_tokens": MAX_TOKENS, **sampling}


@dataclass
class Clients:
    """Clients that send requests until `stop`. `ends` counts the outcomes of requests; `wrong` describes forbidden
    ones."""

    fleet: Fleet
    rng: random.Random
    texts: dict[int, str]
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    is_stopping: bool = False

    @property
    def num_answers(self) -> int:
        """Answers that came whole."""
        return self.ends["stream"] + self.ends["whole"]

    async def ask_on(self) -> None:
        """Run one client."""
        kinds: list[Callable[[httpx.AsyncClient, str], Awaitable[str]]]
        kinds = [self._stream, self._slow_stream, self._whole, self._leave, self._too_long, self._malformed, self._late]
        weights = (8, 2, 4, 2, 1, 1, 2)
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=patience(REQUEST_BOUND_S), limits=limits, trust_env=False) as http:
            while not self.is_stopping:
                [kind] = self.rng.choices(kinds, weights)
                gateway = self.rng.randrange(len(self.fleet.gateways))
                process, begun_s = self.fleet.gateways[gateway], time.monotonic()
                try:
                    self.ends[await kind(http, self.fleet.base_urls[gateway])] += 1
                except httpx.TransportError as error:
                    # Only its gateway's death may cut a client off.
                    if process.killed_s < begun_s and process.is_alive and not isinstance(error, httpx.ConnectError):
                        self.wrong.append(f"{kind.__name__}: {process.name} lives, but: {error!r}")
                    self.ends["gateway gone"] += 1
                    await asyncio.sleep(0.5)

    async def _stream(self, http: httpx.AsyncClient, url: str, pause_s: float = 0.0) -> str:
        number = self.rng.randrange(NUM_PROMPTS)
        body = {**body_of(number), "stream": True, "stream_options": {"include_usage": True}}
        stream = Stream()
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return self._refused("stream", response, await response.aread())
            async for line in response.aiter_lines():
                stream.take(line)
                if pause_s:
                    await asyncio.sleep(pause_s)
        if not stream.is_done or stream.error is not None:
            self.wrong.append(f"stream {number} ended with {stream.error}, done: {stream.is_done}")
        return self._answered("stream", number, stream.text)

    async def _slow_stream(self, http: httpx.AsyncClient, url: str) -> str:
        return await self._stream(http, url, pause_s=0.1)

    async def _whole(self, http: httpx.AsyncClient, url: str) -> str:
        number = self.rng.randrange(NUM_PROMPTS)
        response = await http.post(f"{url}/v1/chat/completions", json=body_of(number))
        if response.status_code != 200:
            return self._refused("whole", response, response.content)
        return self._answered("whole", number, response.json()["choices"][0]["message"]["content"])

    async def _leave(self, http: httpx.AsyncClient, url: str) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.rng.uniform(0.01, 2.0)):
                await self._stream(http, url)
                return "finished before leaving"
        return "left"

    async def _late(self, http: httpx.AsyncClient, url: str) -> str:
        """A deadline that is mostly too short."""
        headers = {"x-request-timeout": f"{self.rng.uniform(0.05, 3.0):.2f}"}
        number = self.rng.randrange(NUM_PROMPTS)
        response = await http.post(f"{url}/v1/chat/completions", json=body_of(number), headers=headers)
        if response.status_code == 504:
            return "deadline"
        if response.status_code != 200:
            return self._refused("late", response, response.content)
        return self._answered("in time", number, response.json()["choices"][0]["message"]["content"])

    async def _too_long(self, http: httpx.AsyncClient, url: str) -> str:
        body = {**body_of(0), "messages": [{"role": "user", "content": "mill " * 100_000}]}
        response = await http.post(f"{url}/v1/chat/completions", json=body)
        self._expect(response, 400, "too long")
        return "too long"

    async def _malformed(self, http: httpx.AsyncClient, url: str) -> str:
        raw = json.dumps(body_of(0)).encode()
        raw = raw[: self.rng.randrange(1, len(raw))]
        response = await http.post(
            f"{url}/v1/chat/completions", content=raw, headers={"content-type": "application/json"}
        )
        self._expect(response, 400, "malformed")
        return "malformed"

    def _expect(self, response: httpx.Response, status: int, what: str) -> None:
        # A gateway that has just started may know no model yet.
        if response.status_code not in (status, 503):
            self.wrong.append(f"{what}: {response.status_code} {response.text[:300]}")

    def _refused(self, what: str, response: httpx.Response, raw: bytes) -> str:
        if response.status_code not in (429, 503) or not response.headers.get("retry-after"):
            self.wrong.append(f"{what}: {response.status_code} {raw[:300]!r}")
        return "refused"

    def _answered(self, what: str, number: int, text: str) -> str:
        if text != self.texts[number]:
            self.wrong.append(f"{what} {number}: {text!r} where {self.texts[number]!r} was due")
        return what


@dataclass
class Faults:
    """Faults at random; each is mended before its turn is over. The next one waits until some answers have come whole,
    so that there are as many on a slow machine as on a fast one."""

    clients: Clients
    fleet: Fleet
    redis: RedisServer
    clock: Clock
    rng: random.Random
    done: Counter[str] = field(default_factory=Counter)
    _busy: set[str] = field(default_factory=set)

    async def go_on(self, num_faults: int, end_s: float) -> None:
        """One source of faults: a number of them, and more until the given time."""
        kinds = [self._kill, self._hang, self._lose_redis, self._fill_redis, self._lock_redis, self._step_clock]
        while num_faults > 0 or time.monotonic() < end_s:
            num_faults -= 1
            [kind] = self.rng.choices(kinds, weights=(5, 3, 1, 1, 1, 1))
            await kind()
            wanted = self.clients.num_answers + ANSWERS_BETWEEN
            async with asyncio.timeout(patience(REQUEST_BOUND_S)):
                while self.clients.num_answers < wanted:
                    await asyncio.sleep(0.1)

    async def _kill(self) -> None:
        process = self._victim()
        process.kill()
        await asyncio.to_thread(process.gone)
        await asyncio.sleep(self.rng.uniform(0.0, 2.0))
        process.start()
        self._over(process, "killed")

    async def _hang(self) -> None:
        process = self._victim()
        process.signal(signal.SIGSTOP)
        await asyncio.sleep(self.rng.uniform(0.5, 6.0))
        process.signal(signal.SIGCONT)
        self._over(process, "hung")

    def _victim(self) -> Process:
        process = self.rng.choice([one for one in self.fleet.processes if one.name not in self._busy])
        self._busy.add(process.name)
        return process

    def _over(self, process: Process, how: str) -> None:
        self._busy.discard(process.name)
        self.done[f"{process.name.partition('-')[0]} {how}"] += 1

    async def _lose_redis(self) -> None:
        if self._takes_redis():
            self.redis.kill()
            await asyncio.sleep(self.rng.uniform(0.5, 8.0))
            await asyncio.to_thread(self.redis.start)
            self._give_redis("down")

    async def _fill_redis(self) -> None:
        """Every write is refused for want of memory."""
        await self._set_redis("maxmemory", "1", "0", "full")

    async def _lock_redis(self) -> None:
        """Every write is refused, as by a replica."""
        await self._set_redis("min-replicas-to-write", "1", "0", "read-only")

    async def _set_redis(self, name: str, bad: str, good: str, what: str) -> None:
        if self._takes_redis():
            client = self.redis.client()
            client.config_set(name, bad)
            await asyncio.sleep(self.rng.uniform(0.5, 8.0))
            client.config_set(name, good)
            self._give_redis(what)

    def _takes_redis(self) -> bool:
        is_free = "redis" not in self._busy
        self._busy.add("redis")
        return is_free

    def _give_redis(self, what: str) -> None:
        self._busy.discard("redis")
        self.done[f"redis {what}"] += 1

    async def _step_clock(self) -> None:
        self.clock.step(self.rng.choice((-86_400, -30, 0, 30, 86_400)))
        self.done["clock stepped"] += 1
