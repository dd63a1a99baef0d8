"""Many connections and many idle streams at once. `python -m benchmarks gateway` has more of them, and their cost."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")
NUM_CONNECTIONS = 800
NUM_IDLE = 200
SOON_S = 1.0
GET = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
ANSWER = b'{"status":"live"}'
CHAT = b'{"messages":[{"role":"user","content":"hi"}],"stream":true}'


@pytest.fixture(autouse=True)
def _fresh(router: Any) -> None:
    router.reset()


@pytest_asyncio.fixture(loop_scope="module")
async def connect(gateway: Any) -> AsyncIterator[Any]:
    """Opens connections to the gateway, and closes them at the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    port, writers = int(gateway.url.rpartition(":")[2]), []

    async def one() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        return reader, writer

    yield one
    for writer in writers:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_each_of_many_open_connections_is_answered_again_and_again(connect: Any) -> None:
    opened = [await connect() for _ in range(NUM_CONNECTIONS)]
    async with asyncio.timeout(patience(60)):
        for _ in range(2):
            for _, writer in opened:
                writer.write(GET)
            for reader, _ in opened:
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                assert await reader.readexactly(len(ANSWER)) == ANSWER


async def test_an_idle_stream_waits_for_its_worker_and_nothing_else(connect: Any, router: Any, kit: Any) -> None:
    """Nothing is to be run, and no timer is due soon: what does nothing costs nothing."""

    async def idle(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("a"), 0, None)
        await asyncio.Event().wait()

    def due_soon() -> int:
        loop: Any = asyncio.get_running_loop()
        return sum(not timer.cancelled() and timer.when() < loop.time() + SOON_S for timer in loop._scheduled)

    router.script = idle
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(CHAT)
    before = due_soon()
    async with asyncio.timeout(patience(60)):
        opened = [await connect() for _ in range(NUM_IDLE)]
        for _, writer in opened:
            writer.write(head + CHAT)
        for reader, _ in opened:
            await reader.readuntil(b'"content":"a"')
    assert len(router.streams) == NUM_IDLE
    assert due_soon() <= before + 10
