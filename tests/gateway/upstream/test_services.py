"""A gateway that finds its routers by the slices of a Service. Fake workers stand for them: a gateway takes both."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from headrace.common.kubernetes.services import Condition, Endpoint, Endpoints
from headrace.gateway.upstream.routers import Upstream
from headrace.protos.inference_pb2 import GenerateRequest, SamplingParams
from tests.api_server import ApiServer, Pod
from tests.patience import patience
from tests.ports import free_port
from tests.router.fake_worker import FakeWorker, answer, until

PROMPT = [5, 6, 7]
SERVICE = "kubernetes:///router.fleet:{}"


@pytest.fixture
async def workers() -> AsyncIterator[list[FakeWorker]]:
    """Three at one port of different addresses."""
    port = free_port()
    made = [await FakeWorker(f"r{number}").start(f"127.0.9.{number}:{port}") for number in (1, 2, 3)]
    yield made
    for worker in made:
        await worker.kill()


@pytest.fixture
async def upstream(workers: list[FakeWorker]) -> AsyncIterator[Upstream]:
    made = Upstream([service_of(workers)])
    yield made
    await made.close()


def service_of(workers: list[FakeWorker]) -> str:
    return SERVICE.format(workers[0].address.rpartition(":")[2])


def pods(*workers: FakeWorker, **conditions: Condition) -> Endpoints:
    return {
        worker.address: Endpoint(worker.address, worker.name, conditions.get(worker.name, Condition.READY))
        for worker in workers
    }


async def generated(upstream: Upstream, num_tokens: int = 20) -> list[int]:
    request = GenerateRequest(token_ids=PROMPT, sampling=SamplingParams(max_tokens=num_tokens))
    async with asyncio.timeout(patience(30)):
        return [token async for message in upstream.generate(request) for token in message.token_ids]


async def test_calls_go_to_the_pods_that_are_there(workers: list[FakeWorker], upstream: Upstream) -> None:
    first, second, third = workers
    service = service_of(workers)
    upstream.pods_seen(service, pods(first, second))
    for _ in range(6):
        assert await generated(upstream) == answer(PROMPT, 20)
    assert [len(worker.requests) for worker in workers] == [3, 3, 0]
    upstream.pods_seen(service, pods(second, third))
    for _ in range(6):
        assert await generated(upstream) == answer(PROMPT, 20)
    assert len(first.requests) == 3
    assert len(third.requests) >= 2


async def test_until_a_pod_is_known_the_name_of_the_service_is_asked(
    workers: list[FakeWorker], upstream: Upstream
) -> None:
    port = workers[0].address.rpartition(":")[2]
    assert [address for address, _ in upstream.addresses()] == [f"dns:///router.fleet:{port}"]
    waiting = asyncio.create_task(generated(upstream))
    await asyncio.sleep(0.1)
    upstream.pods_seen(service_of(workers), pods(workers[0]))
    assert await waiting == answer(PROMPT, 20)
    upstream.pods_seen(service_of(workers), {})
    assert [address for address, _ in upstream.addresses()] == [f"dns:///router.fleet:{port}"]


async def test_a_pod_that_leaves_keeps_its_streams(workers: list[FakeWorker], upstream: Upstream) -> None:
    first, second, _ = workers
    service = service_of(workers)
    upstream.pods_seen(service, pods(first))
    first.budget = 3
    running = asyncio.create_task(generated(upstream))
    await until(lambda: first.is_stuck)
    upstream.pods_seen(service, pods(first, second, r1=Condition.TERMINATING))
    assert await generated(upstream) == answer(PROMPT, 20)
    upstream.pods_seen(service, pods(second))
    first.budget = None
    assert await running == answer(PROMPT, 20)
    assert len(first.requests) == 1
    assert len(second.requests) == 1, "the stream did not move"


async def test_pods_that_change_all_the_time_lose_no_request(workers: list[FakeWorker], upstream: Upstream) -> None:
    service = service_of(workers)
    for worker in workers:
        worker.token_s = 0.001
    running = [asyncio.create_task(generated(upstream, 40)) for _ in range(10)]
    for number in range(50):
        upstream.pods_seen(service, pods(*(one for index, one in enumerate(workers) if index != number % 3)))
        running.append(asyncio.create_task(generated(upstream, 10)))
        await asyncio.sleep(0.005)
    results = await asyncio.gather(*running)
    assert all(tokens == answer(PROMPT, len(tokens)) for tokens in results)
    assert {len(tokens) for tokens in results} == {10, 40}


async def test_the_commands_follow_services(tmp_path: Path) -> None:
    """A gateway finds a router, and the router a worker, through the API server that the flags name."""
    worker = await FakeWorker("w").start("127.0.9.9:0")
    server = await ApiServer().start()
    port = int(worker.address.rpartition(":")[2])
    server.put("w", [Pod("w", "127.0.9.9")], service="worker")
    (tmp_path / "namespace").write_text("fleet")
    cluster = ["--kubernetes-api", server.url, "--kubernetes-credentials", str(tmp_path)]
    router = ["router", "--listen", "127.0.9.10:0", "--worker", f"kubernetes:///worker:{port}", *cluster]
    async with process(*router) as (address, _):
        server.put("r", [Pod("r", "127.0.9.10")], service="router")
        named = f"kubernetes:///router.fleet:{address.rpartition(':')[2]}"
        gateway = ["gateway", "--port", "0", "--router", named, *cluster]
        async with process(*gateway) as (url, _), httpx.AsyncClient(trust_env=False) as client:
            async with asyncio.timeout(patience(30)):
                while True:
                    metrics = ""
                    with contextlib.suppress(httpx.TransportError):  # it is about to listen
                        metrics = (await client.get(f"{url}/metrics", timeout=patience(10))).text
                    found = re.search(r'headrace_worker_up\{[^}]*"w"[^}]*\} 1', metrics)
                    if found and 'headrace_service_pods{condition="ready",service="router"} 1.0' in metrics:
                        break
                    await asyncio.sleep(0.05)
            assert 'headrace_service_watch_up{service="router"} 1.0' in metrics
    await server.stop()
    await worker.kill()


@contextlib.asynccontextmanager
async def process(role: str, *args: str) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """A process of ours that listens, and its address."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    made = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"headrace.{role}", *args, stderr=subprocess.PIPE, env=environment
    )
    assert made.stderr is not None
    try:
        async with asyncio.timeout(patience(60)):
            async for line in made.stderr:
                if found := re.search(r"listening on (\S+)", line.decode()):
                    break
            else:
                raise AssertionError(f"{role} ended")
        draining = asyncio.create_task(made.stderr.read())
        yield found[1], made
        made.send_signal(signal.SIGTERM)
        async with asyncio.timeout(patience(30)):
            assert await made.wait() == 0
        await draining
    finally:
        with contextlib.suppress(ProcessLookupError):
            made.kill()
        await made.wait()
