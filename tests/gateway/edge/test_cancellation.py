"""Requests that are cut short at any moment, by their client or by a gateway that stops: each ends exactly once."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.common.stores.api_keys import ApiKey, sha256_of, write_keys
from headrace.gateway.access.limits import LEVELS
from headrace.gateway.edge.settings import EdgeControls, EdgeSettings
from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")
SECRET = "hr-secret-of-somebody"
HI = [{"role": "user", "content": "hi"}]
STREAM = {"messages": HI, "max_tokens": 100, "stream": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", STREAM),
    ("/v1/chat/completions", {**STREAM, "stream": False}),
    ("/v1/chat/completions", {**STREAM, "n": 3, "stop": ["w"]}),
    ("/v1/completions", {"prompt": ["a", "b"], "best_of": 2, "max_tokens": 100}),
    ("/v1/messages", STREAM),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 100, "stream": True}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 100, "background": True, "stream": True}),
    ("/api/chat", {"messages": HI}),
    ("/generate_stream", {"inputs": "hi"}),
]


@dataclass
class Call:
    """A request to the application itself, whose client may be slow and go away."""

    edge: Any
    path: str
    body: dict[str, Any]
    rng: random.Random
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    sent: list[dict[str, Any]] = field(default_factory=list)
    room: asyncio.Event = field(default_factory=asyncio.Event)
    """The client reads."""

    def __post_init__(self) -> None:
        raw = json.dumps({"model": "tiny", **self.body}).encode()
        self._parts = [raw[:10], raw[10:]]
        self.room.set()

    def start(self) -> asyncio.Task[None]:
        headers = [(b"authorization", b"Bearer " + SECRET.encode())]
        scope = {"type": "http", "method": "POST", "path": self.path, "headers": headers, "root_path": ""}
        return asyncio.create_task(self.edge(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            return {"type": "http.request", "body": self._parts.pop(0), "more_body": bool(self._parts)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        """As uvicorn does: wait while the client does not read, then write."""
        for _ in range(self.rng.choice([0, 0, 1, 3])):
            await asyncio.sleep(0)
        await self.room.wait()
        self.sent.append(message)

    @property
    def shape(self) -> list[str]:
        """The response: its start, its parts, and its end."""
        names = {True: "part", False: "end"}
        return [names[one["more_body"]] if "body" in one else "start" for one in self.sent]


@dataclass
class Books:
    """All that is counted of requests, at the gateway, for their key, and at the router."""

    gateway: Any
    controls: EdgeControls
    num_at_router: int = 0

    @property
    def num_ended(self) -> float:
        return self._metric("headrace_requests_total")

    @property
    def still_open(self) -> dict[str, Any]:
        """What is not at zero."""
        found = {
            "in flight": self._metric("headrace_requests_in_flight"),
            "admitted": self.controls.admission._num_admitted,
            "bodies": self.controls.bodies.num_bytes,
            "of the key": sum(len(one.inside) for one in self._accounts.values()),
            "models": dict(self.gateway.upstream._in_use),
            "at the router": self.num_at_router,
        }
        return {name: value for name, value in found.items() if value}

    @property
    def num_tokens(self) -> float:
        """Tokens that the key has paid for."""
        return sum(one.tokens.level for one in self._accounts.values()) / LEVELS

    def forget_tokens(self) -> None:
        self._accounts.clear()

    @property
    def _accounts(self) -> dict[str, Any]:
        accounts: dict[str, Any] = self.controls.admission._limits._local._accounts  # type: ignore[union-attr]
        return accounts

    def _metric(self, name: str) -> float:
        families = self.gateway.edge._metrics.registry.collect()
        return float(sum(one.value for family in families for one in family.samples if one.name == name))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def books(kit_of_module: Any, router: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Books]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.json"
    many = 10**7
    limits = {"tokens_per_minute": many, "requests_per_minute": many, "max_concurrent": 1}
    key = ApiKey(id="key_1", name="somebody", tenant="mill", created_s=1, sha256=sha256_of(SECRET), **limits)
    write_keys(path, [key])
    controls = EdgeControls(EdgeSettings(api_keys=path))
    await controls.start()
    controls.admission._limits._local._now_us = lambda: 0  # type: ignore[union-attr]
    async with kit_of_module.serving_gateway(router.address, controls=controls) as gateway:
        yield Books(gateway, controls)
    await controls.close()


@pytest.fixture(autouse=True)
def _fresh(router: Any, kit: Any, books: Books) -> None:
    async def speak(fake: Any, stream: Any, send: Any) -> None:
        books.num_at_router += 1
        try:
            await kit.speak(fake, stream, send)
        finally:
            books.num_at_router -= 1

    router.reset()
    router.script = speak


async def test_a_gateway_that_stops_ends_a_response_that_could_not_begin_with_a_whole_one(books: Books) -> None:
    for body in (STREAM, {**STREAM, "stream": False}, {**STREAM, "messages": []}):
        call = Call(books.gateway.edge, "/v1/chat/completions", body, random.Random(0))
        call.room.clear()
        task = call.start()
        async with asyncio.timeout(patience(20)):
            while not any(exchange.status for exchange in books.gateway.edge._running):
                await asyncio.sleep(0.001)
            books.gateway.edge.interrupt()
            await asyncio.sleep(0.01)
            call.room.set()
            await asyncio.wait({task})
        assert task.exception() is None
        assert (call.shape[0], call.shape[-1], call.shape.count("start")) == ("start", "end", 1)
    assert not books.still_open


@pytest.mark.parametrize("seed", range(3))
async def test_a_request_that_is_cut_short_anywhere_ends_once_and_leaves_nothing(
    books: Books, router: Any, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        router.streams.clear()
        books.forget_tokens()
        num_ended = books.num_ended
        path, body = rng.choice(REQUESTS)
        call, cut = Call(books.gateway.edge, path, body, rng), rng.choice(["client", "gateway", "both", "neither"])
        task = call.start()
        for _ in range(1 + int(rng.expovariate(1 / 40))):
            await asyncio.sleep(0)
        if cut in ("client", "both"):
            call.gone.set()
        if cut == "both":
            await asyncio.sleep(0)
        if cut in ("gateway", "both"):
            books.gateway.edge.interrupt()
        what = f"{cut} {path} {body}"
        async with asyncio.timeout(patience(20)):
            await asyncio.wait({task})
            while books.still_open:
                await asyncio.sleep(0.001)
        assert task.exception() is None, what
        assert books.num_ended == num_ended + 1, what
        num_most = sum(len(one.request.token_ids) + len(router.answer.encode()) + 1 for one in router.streams)
        assert books.num_tokens <= num_most, what
        if cut in ("gateway", "neither"):
            assert (call.shape[0], call.shape[-1], call.shape.count("start")) == ("start", "end", 1), what
        assert call.shape.count("end") <= call.shape.count("start") <= 1, what
