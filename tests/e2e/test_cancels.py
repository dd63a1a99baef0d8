"""Clients disconnect at any moment and in every way, through the whole system. Nothing of their requests may remain.

`make test` runs some hundreds, and `python -m tests.soak survival` ten thousand. HEADRACE_SEED repeats a run.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from headrace.protos import inference_pb2, inference_pb2_grpc
from tests.e2e.fleet import Fleet, fleet
from tests.e2e.serving import until
from tests.e2e.streams import chat_body, http_client

pytestmark = pytest.mark.e2e

SOAK = os.environ.get("HEADRACE_SOAK") == "1"
NUM_REQUESTS = 10_000 if SOAK else 300
NUM_CLIENTS = 48


@pytest.fixture
def own_fleet(tmp_path: Path) -> Iterator[Fleet]:
    with fleet(tmp_path, num_workers=2, num_routers=2) as made:
        yield made


@asynccontextmanager
async def leaving(clients: httpx.AsyncClient, url: str, body: dict[str, Any]) -> AsyncIterator[httpx.Response]:
    """A response that is not read to its end when the block is left: the connection is closed."""
    async with clients.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        yield response


class Visitors:
    """Clients with one seed; `ends` counts how they ended."""

    def __init__(self, own_fleet: Fleet, seed: int) -> None:
        self.ends: Counter[str] = Counter()
        self._fleet = own_fleet
        self._rng = random.Random(seed)
        self._left = NUM_REQUESTS

    async def visit(self, http: httpx.AsyncClient, inference: inference_pb2_grpc.InferenceStub) -> None:
        """A client that sends and abandons requests until all are done."""
        ways = (self._leave_stream, self._leave_early, self._deadline, self._cancel_call, self._stay)
        while self._left > 0:
            self._left -= 1
            way = self._rng.choices(ways, weights=(4, 2, 1, 2, 2))[0]
            self.ends[await way(http, inference)] += 1

    def _body(self, **fields: Any) -> dict[str, Any]:
        body = chat_body(self._rng.randrange(60), self._rng.randrange(1, 40), temperature=self._rng.choice((0, 1)))
        if self._rng.random() < 0.2:
            body |= {"n": 2}
        return body | fields

    async def _leave_stream(self, http: httpx.AsyncClient, _: Any) -> str:
        """Disconnect after some events, possibly after the last one."""
        stay_for = self._rng.randrange(50)
        async with leaving(http, self._fleet.base_url, self._body()) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                stay_for -= line.startswith("data: ")
                if stay_for <= 0:
                    return "left a stream"
        return "finished"

    async def _leave_early(self, http: httpx.AsyncClient, _: Any) -> str:
        """Disconnect a moment after asking, maybe before there is any answer."""
        unary = self._body(stream=False)
        del unary["stream_options"]
        try:
            async with asyncio.timeout(self._rng.random() ** 3):
                response = await http.post(f"{self._fleet.base_url}/v1/chat/completions", json=unary)
        except TimeoutError:
            return "left early"
        assert response.status_code == 200, response.text
        return "finished"

    async def _deadline(self, _: Any, inference: inference_pb2_grpc.InferenceStub) -> str:
        """Send a request to a router with a deadline that may be too short."""
        try:
            async for _message in inference.Generate(self._tokens(), timeout=self._rng.uniform(0.01, 1.0)):
                pass
        except grpc.aio.AioRpcError as error:
            # A router may see beforehand that the deadline cannot be met.
            if error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED):
                raise
            return "deadline"
        return "finished"

    async def _cancel_call(self, _: Any, inference: inference_pb2_grpc.InferenceStub) -> str:
        """Cancel a call at a router after some messages, possibly before the first."""
        call, stay_for = inference.Generate(self._tokens(), timeout=300), self._rng.randrange(30)
        if stay_for == 0:
            call.cancel()
            return "cancelled"
        async for _message in call:
            stay_for -= 1
            if stay_for == 0:
                call.cancel()
                return "cancelled"
        return "finished"

    async def _stay(self, http: httpx.AsyncClient, _: Any) -> str:
        response = await http.post(f"{self._fleet.base_url}/v1/chat/completions", json=self._body())
        assert response.status_code == 200, response.text
        assert response.text.endswith("data: [DONE]\n\n"), response.text
        return "finished"

    def _tokens(self) -> inference_pb2.GenerateRequest:
        tokens = [self._rng.randrange(10, 40_000) for _ in range(self._rng.randrange(1, 200))]
        sampling = inference_pb2.SamplingParams(max_tokens=self._rng.randrange(1, 40), ignore_eos=True)
        return inference_pb2.GenerateRequest(token_ids=tokens, sampling=sampling)


@pytest.mark.timeout(240 + NUM_REQUESTS // 4)
async def test_random_cancels_and_disconnects_leave_nothing_behind(own_fleet: Fleet) -> None:
    seed = int(os.environ.get("HEADRACE_SEED", "4"))
    print(f"HEADRACE_SEED={seed}")
    visitors = Visitors(own_fleet, seed)
    async with http_client() as http, grpc.aio.insecure_channel(own_fleet.router_addresses[0]) as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(visitors.visit(http, inference))
    print(dict(visitors.ends))
    assert visitors.ends.total() == NUM_REQUESTS
    assert min(visitors.ends.values()) > 0
    own_fleet.until_idle()
    until(lambda: own_fleet.metric("headrace_requests_in_flight") == 0, "the gateway has no request")
    for worker in own_fleet.list_workers():
        totals = worker.load.counters
        assert totals.requests_failed == 0
        assert totals.requests_admitted == totals.requests_finished + totals.requests_cancelled
