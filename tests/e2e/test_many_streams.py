"""2,000 idle and 300 busy streams through two gateways, while routers, Redis and workers are restarted in turn: none is
lost, every answer is right, and nothing grows.

Busy streams have places in the workers' batches and follow one another. An idle stream has a response, but waits for
minutes until its answer is due: its priority is lower, and few places are left. So most of what a restart moves are
requests without a token.

`python -m tests.soak streams` runs it for an hour, or HEADRACE_SOAK_MINUTES; with `-- -k small`, a tenth of the streams
while each part is restarted twice.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from headrace.common.tasks import end_tasks
from tests.e2e.fleet import Fleet, Process, fleet, num_fds, rss_mib
from tests.e2e.streams import Stream, chat_body
from tests.patience import patience
from tests.redis_server import RedisServer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.environ.get("HEADRACE_SOAK") != "1", reason="an hour: python -m tests.soak streams"),
]

SEED = int(os.environ.get("HEADRACE_SEED", "7"))
MINUTES = float(os.environ.get("HEADRACE_SOAK_MINUTES", "60"))
# What a process may have more of than in its first life, or, if it is not restarted, after the first round: MiB of
# memory that it shares with nobody, and open files. Pools fill meanwhile; in a worker also the KV cache.
MORE_MIB, MORE_FDS = 64, 32
KV_CACHE_GB = 0.15
IDLE_TOKENS = 8
BUSY_TOKENS = (24, 48)
# A part is restarted each time that one of so many idle streams has been answered. So each has its turn after about so
# many restarts: a request that loses twelve routers or workers in a row without a token ends.
TURNS = 8
# Connections that are made at a time.
OPENING = 32
_PROMPTS = 40
_LONG_S = 300.0
_STOP_S = 1200.0


@dataclass(frozen=True)
class Size:
    """Streams, and for how long parts are restarted: so many minutes, but at least so many rounds of all parts."""

    num_idle: int
    num_busy: int
    minutes: float
    rounds: int


SIZES = {"small": Size(200, 30, 0.0, 2), "whole": Size(2000, 300, MINUTES, 2)}


@dataclass
class Clients:
    """The streams. Each client sends one request after another to its gateway, and none a second time."""

    urls: list[str]
    size: Size
    rng: random.Random
    num_idle: int = 0
    num_busy: int = 0
    num_open: int = 0
    lost: list[str] = field(default_factory=list)
    lateness_s: float = 0.0
    is_over: bool = False
    _idle: dict[int, Stream] = field(default_factory=dict)
    _texts: dict[tuple[int, int], str] = field(default_factory=dict)
    _opening: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(OPENING))

    @property
    def num_waiting(self) -> int:
        """Idle streams without a token so far."""
        return sum(not stream.text for stream in self._idle.values())

    async def more(self) -> None:
        """Return when a part of the idle streams has been answered, and as many busy ones as there are."""
        idle, busy = self.num_idle + self.size.num_idle // TURNS, self.num_busy + self.size.num_busy
        await self.until(lambda: self.num_idle >= idle and self.num_busy >= busy, "streams go on")

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait while nothing is lost."""
        waited_s = 0.0
        while not condition() and not self.lost:
            assert waited_s < patience(_LONG_S), f"not within {waited_s:.0f} s: {what}"
            await asyncio.sleep(0.2)
            waited_s += 0.2

    async def idle(self, number: int) -> None:
        """One idle stream after another; the last one is answered to its end."""
        while not self.is_over:
            self._idle[number] = Stream()
            await self._follow(number, _PROMPTS + number, IDLE_TOKENS, self._idle[number], priority=-1)
            self.num_idle += 1

    async def busy(self, number: int) -> None:
        """One busy stream after another."""
        while not self.is_over:
            prompt, num_tokens = self.rng.randrange(_PROMPTS), self.rng.choice(BUSY_TOKENS)
            await self._follow(number, prompt, num_tokens, Stream(), priority=0)
            self.num_busy += 1

    async def watch_lateness(self) -> None:
        """Note how late this process is at most, which is not the gateways' fault. Runs until cancelled."""
        while True:
            due_s = time.monotonic() + 0.5
            await asyncio.sleep(0.5)
            self.lateness_s = max(self.lateness_s, time.monotonic() - due_s)

    async def _follow(self, number: int, prompt: int, num_tokens: int, stream: Stream, *, priority: int) -> None:
        url = self.urls[number % len(self.urls)]
        body = chat_body(prompt, num_tokens, temperature=0, priority=priority)
        began_s = time.monotonic()
        async with self._opening:
            call = await Call.begin(url, body, stream)
        self.num_open += 1
        await call.ended.wait()
        self.num_open -= 1
        expected = self._texts.setdefault((prompt, num_tokens), stream.text)
        if stream.error is not None or not stream.is_done or stream.num_tokens != num_tokens:
            ended = f"{call.failure!r}, after {time.monotonic() - began_s:.0f} s, with {call.num_bytes} bytes of answer"
            self.lost.append(
                f"{url}: {stream.num_tokens} tokens of {num_tokens}, {stream.error or ended}; "
                f"this client was late by {self.lateness_s:.1f} s at most"
            )
        elif stream.text != expected:
            self.lost.append(f"{url}: another answer to story {prompt}: {stream.text!r}, before {expected!r}")


class Call(asyncio.Protocol):
    """A request on a connection of its own. It is sent as soon as there is a connection, and lines are read as they
    arrive, at little cost: clients that lack CPU time would be too slow for the limits of gateways."""

    def __init__(self, request: bytes, stream: Stream) -> None:
        self.ended = asyncio.Event()
        self.failure: Exception | None = None
        self.num_bytes = 0
        self._request = request
        self._stream = stream
        self._transport: asyncio.Transport | None = None
        self._rest = b""

    @classmethod
    async def begin(cls, url: str, body: dict[str, Any], stream: Stream) -> Call:
        """Connect and send; a refused connection ends the call."""
        address, content = urlsplit(url), json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content
        call = cls(request, stream)
        try:
            await asyncio.get_running_loop().create_connection(lambda: call, address.hostname, address.port)
        except OSError as error:
            call.connection_lost(error)
        return call

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Read whole lines."""
        if not self.num_bytes and not data.startswith(b"HTTP/1.1 200 "):
            self._stream.error = data.decode(errors="replace")
        self.num_bytes += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                self._stream.take(line.decode().rstrip("\r"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The answer, whole or not, has ended."""
        self.failure = exc
        self.ended.set()


@asynccontextmanager
async def clients(urls: list[str], size: Size) -> AsyncIterator[Clients]:
    """The streams inside; outside, all have ended."""
    made = Clients(urls, size, random.Random(SEED))
    works = [made.idle(number) for number in range(size.num_idle)]
    works += [made.busy(number) for number in range(size.num_busy)]
    tasks = [asyncio.create_task(work) for work in works]
    watch = asyncio.create_task(made.watch_lateness())
    try:
        yield made
        made.is_over = True
        async with asyncio.timeout(patience(_STOP_S)):
            await asyncio.gather(*tasks)
    finally:
        await end_tasks(watch, *tasks)


class Held:
    """The memory and the open files of each process, at the end of each life or round."""

    def __init__(self) -> None:
        self._seen: dict[str, list[tuple[float, int]]] = {}

    def note(self, process: Process) -> None:
        """Note what it has now."""
        self._seen.setdefault(process.name, []).append((rss_mib(process), num_fds(process)))

    def growth(self) -> list[str]:
        """The processes that have more than is allowed, and how much."""
        found = []
        for name, ((first_mib, first_fds), *_, (mib, fds)) in self._several().items():
            more_mib = MORE_MIB + (KV_CACHE_GB * 1024 if name.startswith("worker") else 0)
            if mib > first_mib + more_mib or fds > first_fds + MORE_FDS:
                found.append(f"{name}: {first_mib:.0f} MiB and {first_fds} files, then {mib:.0f} MiB and {fds} files")
        return found

    def __str__(self) -> str:
        return "; ".join(
            f"{name} {first[0]:.0f} to {last[0]:.0f} MiB" for name, (first, *_, last) in self._several().items()
        )

    def _several(self) -> dict[str, list[tuple[float, int]]]:
        return {name: seen for name, seen in self._seen.items() if len(seen) > 1}


class Restarts:
    """Restarts of the parts in turn, by SIGTERM and by SIGKILL in alternate rounds."""

    def __init__(self, made: Fleet, redis: RedisServer, held: Held) -> None:
        self.num_done = 0
        self._fleet = made
        self._redis = redis
        self._held = held

    def turn(self, round_number: int) -> list[Callable[[], Awaitable[None]]]:
        """What is restarted in a round, one after the other."""
        is_kill = round_number % 2 == 1
        pairs = zip(self._fleet.routers, self._fleet.workers, strict=True)
        return [
            work
            for router, worker in pairs
            for work in (
                lambda router=router: self._restart(router, is_kill=is_kill),  # type: ignore[misc]
                self._restart_redis,
                lambda worker=worker: self._restart(worker, is_kill=is_kill),  # type: ignore[misc]
            )
        ]

    async def _restart(self, process: Process, *, is_kill: bool) -> None:
        self._held.note(process)
        if is_kill:
            process.kill()
        else:
            process.terminate()
        status = await asyncio.to_thread(process.gone, _LONG_S)
        assert is_kill or status == 0, f"{process.name} has ended with status {status}"
        process.start()
        await asyncio.to_thread(self._fleet.until_whole, _LONG_S)
        self.num_done += 1

    async def _restart_redis(self) -> None:
        self._redis.kill()
        await asyncio.sleep(1.0)
        await asyncio.to_thread(self._redis.start)
        self.num_done += 1


@pytest.fixture
def many_files() -> None:
    """As many open files as the system allows, also for the processes that are started."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@pytest.mark.timeout(3 * _STOP_S + 90 * MINUTES)
@pytest.mark.parametrize("size", ["small", "whole"])
async def test_no_stream_is_lost_while_everything_behind_the_gateways_is_restarted_in_turn(
    tmp_path: Path, redis_server: RedisServer, many_files: None, size: str
) -> None:
    streams, held = SIZES[size], Held()
    # Places for all busy streams and a few more.
    places = str(streams.num_busy // 2 + 10)
    sizes = ("--max-num-seqs", places, "--kv-cache-gb", str(KV_CACHE_GB), "--execution-mode", "accuracy")
    # Idle streams wait for as long as the test takes, and lose several workers meanwhile.
    long_s = "86400"
    with fleet(
        tmp_path,
        num_workers=2,
        num_routers=2,
        num_gateways=2,
        redis_url=redis_server.url,
        worker_flags=(*sizes, "--max-ttft-s", long_s),
        router_flags=("--max-ttft", long_s, "--max-waiting", "4096", "--max-attempts", "12"),
        gateway_flags=("--early-headers", "1", "--request-timeout", long_s),
    ) as made:
        restarts, began_s, rounds = Restarts(made, redis_server, held), time.monotonic(), 0
        async with clients(made.base_urls, streams) as running:
            await running.more()
            assert running.lost == []
            while rounds < streams.rounds or time.monotonic() - began_s < 60 * streams.minutes:
                for restart in restarts.turn(rounds):
                    assert running.num_waiting > streams.num_idle // 2, "most idle streams wait when a part is lost"
                    assert running.num_open > 0.9 * (streams.num_idle + streams.num_busy), "nearly all are open"
                    await restart()
                    await running.more()
                    assert running.lost == []
                for gateway in made.gateways:
                    held.note(gateway)
                rounds += 1
        print(
            f"{running.num_idle} idle and {running.num_busy} busy streams, {len(running.lost)} lost; "
            f"{restarts.num_done} restarts in {time.monotonic() - began_s:.0f} s; seed {SEED}; "
            f"the client was late by {running.lateness_s:.1f} s at most; {held}"
        )
        assert running.lost == []
        made.until_idle(_LONG_S)
        assert held.growth() == []
