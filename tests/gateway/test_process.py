"""The gateway process: it starts at once, reports errors clearly, and stops within its time limit."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.patience import patience
from tests.ports import free_port
from tests.redis_server import RedisServer

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}


async def start(*flags: str, role: str = "gateway", **environment: str) -> asyncio.subprocess.Process:
    import os

    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"headrace.{role}",
        *flags,
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )


async def until_ready(url: str, path: str = "/health/ready") -> None:
    async with httpx.AsyncClient(timeout=patience(20)) as http, asyncio.timeout(patience(20)):
        while True:
            try:
                if (await http.get(url + path)).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.02)


@pytest.fixture
async def router(kit: Any, tiny_bundle: bytes) -> AsyncIterator[Any]:
    fake = kit.FakeRouter(tiny_bundle)
    async with kit.serving_router(fake) as (address, _):
        fake.address = address
        yield fake


async def test_it_serves_stops_on_a_signal_and_ends_streams_with_an_error(router: Any, kit: Any) -> None:
    async def endless(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("a"), 0, None)
        await asyncio.Event().wait()

    router.script = endless
    port, grpc_port = free_port(), free_port()
    process = await start("--port", str(port), "--grpc-port", str(grpc_port), "--router", router.address)
    url = f"http://127.0.0.1:{port}"
    await until_ready(url)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="headrace.v1.Text")
        )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    async with (
        httpx.AsyncClient(timeout=patience(20)) as http,
        http.stream("POST", f"{url}/v1/chat/completions", json=BODY) as response,
    ):
        seen = ""
        stopped_s = 0.0
        async for text in response.aiter_text():
            seen += text
            if '"content":"a"' in seen and not stopped_s:
                process.send_signal(signal.SIGTERM)
                stopped_s = asyncio.get_running_loop().time()
    error = json.loads(seen.rstrip("\n").split("\n\n")[-1].removeprefix("data: "))["error"]
    assert error["code"] == "draining"
    assert await asyncio.wait_for(process.wait(), patience(30)) == 0
    await asyncio.wait_for(router.streams[0].cancelled.wait(), patience(5))
    assert process.stdout is not None
    assert await process.stdout.read() == b""


async def test_it_is_live_before_there_is_a_router_and_ready_when_one_comes(kit: Any, tiny_bundle: bytes) -> None:
    port, router_port = free_port(), free_port()
    process = await start(HEADRACE_GATEWAY_PORT=str(port), HEADRACE_GATEWAY_ROUTER=f"127.0.0.1:{router_port}")
    url = f"http://127.0.0.1:{port}"
    try:
        await until_ready(url, "/health/live")
        async with httpx.AsyncClient(timeout=patience(20)) as http:
            assert (await http.get(f"{url}/health/ready")).status_code == 503
        async with kit.serving_router(kit.FakeRouter(tiny_bundle), f"127.0.0.1:{router_port}"):
            await until_ready(url)
    finally:
        process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), patience(30)) == 0


async def test_health_tells_how_the_redis_of_router_and_gateway_are(tmp_path: Path) -> None:
    leases = RedisServer(tmp_path).start()
    full = RedisServer(tmp_path, "--maxmemory", "1", "--maxmemory-policy", "noeviction").start()
    address, port = f"unix:{tmp_path}/router.sock", free_port()
    processes = [
        await start("--listen", address, "--redis", leases.url, role="router"),
        await start("--port", str(port), "--router", address, "--response-redis", full.url),
    ]
    url = f"http://127.0.0.1:{port}"
    try:
        await until_ready(url, "/health/live")
        async with httpx.AsyncClient(timeout=patience(20)) as http, asyncio.timeout(patience(20)):
            while (told := (await http.get(f"{url}/health")).json().get("redis", {})).keys() != {"leases", "responses"}:
                await asyncio.sleep(0.02)
            assert told["responses"] == "unwritable"
            while (await http.get(f"{url}/health")).json()["redis"]["leases"] != "ok":
                await asyncio.sleep(0.02)
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        statuses = [await asyncio.wait_for(process.wait(), patience(30)) for process in processes]
        leases.kill()
        full.kill()
    assert statuses == [0, 0]


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
async def test_a_port_in_use_is_told_in_one_sentence(flag: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        flags = {"--port": "0", flag: port}
        process = await start("--router", "127.0.0.1:1", *(part for pair in flags.items() for part in pair))
        _, stderr = await asyncio.wait_for(process.communicate(), patience(20))
    assert process.returncode == 2
    last = stderr.decode().strip().splitlines()[-1]
    assert last.startswith("error: cannot listen")
    assert port in last
    assert flag in last


async def test_a_bad_flag_has_the_same_status() -> None:
    for flags in (["--port", "x", "--router", "a"], [], ["--nothing"]):
        process = await start(*flags)
        _, stderr = await asyncio.wait_for(process.communicate(), patience(20))
        assert process.returncode == 2
        assert stderr.decode().startswith("error: ")


async def test_a_picker_that_cannot_speak_tls_says_what_is_missing() -> None:
    """A flag that would have no effect is refused too."""
    flags = ("--port", "0", "--router", "127.0.0.1:1", "--endpoint-picker-tls")
    processes = [await start(*flags, "mutual", "--endpoint-picker", "127.0.0.1:0"), await start(*flags, "self-signed")]
    told = [await asyncio.wait_for(process.communicate(), patience(20)) for process in processes]
    last = [stderr.decode().strip().splitlines()[-1] for _, stderr in told]
    assert [process.returncode for process in processes] == [2, 2]
    assert last[0].startswith("error: --endpoint-picker-tls mutual needs the certificates of the fleet: give --tls-dir")
    assert last[1] == "error: --endpoint-picker-tls needs --endpoint-picker HOST:PORT"


@pytest.mark.parametrize("address", ["http://10.0.0.5:50051", "router.example", "[::1]"])
async def test_a_router_without_an_address_is_refused(address: str) -> None:
    process = await start("--router", address)
    _, raw = await process.communicate()
    assert process.returncode == 2
    assert f"'{address}' is not an address: write HOST:PORT or unix:/PATH" in raw.decode()
