"""HTTP clients for tests: streams that record each event with its time, and a load that runs until it is stopped."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.serving import MODEL
from tests.patience import patience

STREAM_BOUND_S = 300.0
_CONNECT_PAUSE_S = 0.05
_TRIES = 5
# What a client meets that connects while nobody listens, or whose connection was closed before it had an answer.
_NOT_CONNECTED = (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)


@dataclass
class Stream:
    """The events of one stream. Times are monotonic seconds."""

    text: str = ""
    num_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    is_done: bool = False
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def longest_pause_s(self) -> float:
        """Between two chunks."""
        return max((b - a for a, b in itertools.pairwise(self.arrivals_s)), default=0.0)

    @property
    def result(self) -> tuple[str, int | None, str | None, str | None, bool]:
        """Everything that must be the same as in an undisturbed run."""
        return self.text, self.num_tokens, self.finish_reason, self.error, self.is_done

    def take(self, line: str) -> None:
        """Enter a line of the event stream."""
        if line == "data: [DONE]":
            assert not self.is_done, "two ends"
            assert self.error is None, "[DONE] after an error"
            self.is_done = True
        elif line.startswith("data: "):
            assert not self.is_done, "more after the end"
            self.arrivals_s.append(time.monotonic())
            self._take_event(json.loads(line.removeprefix("data: ")))

    def _take_event(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = str(event["error"])
            return
        for choice in event["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        if event.get("usage"):
            self.num_tokens = event["usage"]["completion_tokens"]


def chat_body(number: int, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A chat whose prompt differs by the number, answered with exactly `max_tokens` tokens."""
    message = {"role": "user", "content": f"Tell me story number {number} about a mill on a river."}
    usage = {"include_usage": True}
    body = {"model": MODEL, "messages": [message], "stream": True, "stream_options": usage, "ignore_eos": True}
    return {**body, "max_tokens": max_tokens, **fields}


@asynccontextmanager
async def http_client() -> AsyncIterator[httpx.AsyncClient]:
    """A client for many streams at once."""
    limits = httpx.Limits(max_connections=512, max_keepalive_connections=512)
    async with httpx.AsyncClient(timeout=patience(STREAM_BOUND_S), limits=limits, trust_env=False) as client:
        yield client


async def follow(client: httpx.AsyncClient, base_url: str, body: dict[str, Any], stream: Stream) -> None:
    """Send the request and record all events. Reconnects until there is a response."""
    while True:
        try:
            async with client.stream("POST", f"{base_url}/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    stream.error = f"{response.status_code}: {(await response.aread()).decode()}"
                    return
                async for line in response.aiter_lines():
                    stream.take(line)
            if not stream.is_done:
                stream.error = stream.error or "cut"
            return
        except _NOT_CONNECTED as error:
            if stream.arrivals_s:
                stream.error = f"cut: {error!r}"
                return
            await asyncio.sleep(_CONNECT_PAUSE_S)


async def run_streams(
    base_url: str,
    bodies: list[dict[str, Any]],
    *,
    disturb_behind: int = 0,
    disturb: Callable[[], Awaitable[None]] | None = None,
) -> list[Stream]:
    """Run all streams at once.

    `disturb` is called as soon as each has brought `disturb_behind` chunks, or the fastest is half through and each has
    begun: all are in flight then. If one ended before, as on a machine that has paused, they are run again.
    """
    for _ in range(_TRIES if disturb is not None else 1):
        streams = await _run_once(base_url, bodies, disturb_behind, disturb)
        if streams is not None:
            return streams
    raise AssertionError(f"in {_TRIES} runs a stream ended before all were in flight")


async def _run_once(
    base_url: str,
    bodies: list[dict[str, Any]],
    disturb_behind: int,
    disturb: Callable[[], Awaitable[None]] | None,
) -> list[Stream] | None:
    """See `run_streams`. None if a stream ended before all were in flight; they end undisturbed then."""
    streams = [Stream() for _ in bodies]
    is_in_flight = True
    async with http_client() as client:
        tasks = [
            asyncio.create_task(follow(client, base_url, body, stream))
            for body, stream in zip(bodies, streams, strict=True)
        ]
        if disturb is not None:
            async with asyncio.timeout(patience(STREAM_BOUND_S)):
                while not _is_time(streams, disturb_behind, bodies[0]["max_tokens"] // 2):
                    assert not any(stream.error for stream in streams), [stream.error for stream in streams]
                    await asyncio.sleep(0.005)
            is_in_flight = not any(stream.is_done for stream in streams)
            if is_in_flight:
                await disturb()
        await asyncio.gather(*tasks)
    return streams if is_in_flight else None


def _is_time(streams: list[Stream], slowest: int, fastest: int) -> bool:
    counts = [len(stream.arrivals_s) for stream in streams]
    return min(counts) >= slowest or (max(counts) >= fastest and min(counts) > 0)


class Load:
    """Clients that send one short stream after another until `stop`."""

    def __init__(self, base_url: str, *, num_clients: int, max_tokens: int = 24) -> None:
        self.finished: list[Stream] = []
        self.failed: list[Stream] = []
        self._base_url = base_url
        self._max_tokens = max_tokens
        self._stopping = False
        self._numbers = itertools.count()
        self._tasks = [asyncio.create_task(self._client()) for _ in range(num_clients)]

    async def more(self, count: int) -> None:
        """Return when `count` more requests have ended well, or one has failed."""
        target = len(self.finished) + count
        async with asyncio.timeout(patience(STREAM_BOUND_S)):
            while len(self.finished) < target and not self.failed:
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        """Send no new requests, and wait for the running ones."""
        self._stopping = True
        async with asyncio.timeout(patience(STREAM_BOUND_S)):
            await asyncio.gather(*self._tasks)

    async def _client(self) -> None:
        async with http_client() as client:
            while not self._stopping:
                stream = Stream()
                body = chat_body(next(self._numbers) % 40, self._max_tokens, temperature=0)
                await follow(client, self._base_url, body, stream)
                complete = stream.error is None and stream.num_tokens == self._max_tokens
                (self.finished if complete else self.failed).append(stream)


@asynccontextmanager
async def load(base_url: str, *, num_clients: int = 8, max_tokens: int = 24) -> AsyncIterator[Load]:
    """Load while inside; outside all its requests have ended."""
    running = Load(base_url, num_clients=num_clients, max_tokens=max_tokens)
    try:
        yield running
    finally:
        await running.stop()


async def hits(url: str, prompts: list[list[int]]) -> float:
    """The share of the prompts' tokens that were cached."""
    async with http_client() as client:
        answers = [await _usage(client, url, prompt) for prompt in prompts]
    return sum(cached for cached, _ in answers) / sum(total for _, total in answers)


async def _usage(client: httpx.AsyncClient, url: str, prompt: list[int]) -> tuple[int, int]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = (await client.post(f"{url}/v1/completions", json=body)).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["usage"]["prompt_tokens"]
