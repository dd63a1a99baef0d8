"""Answers reach clients that are still sending when their connection is closed, and those that never stop are cut."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headrace.gateway.edge import lingering
from headrace.gateway.edge.connections import ConnectionBounds
from headrace.gateway.edge.exchange import Message, Receive, Send
from headrace.gateway.edge.http import HttpServer, bound_socket
from headrace.gateway.edge.lingering import Lingering, LingeringTransport
from headrace.gateway.edge.tls import EdgeTls
from tests.certificates import make_certificates
from tests.gateway.edge.test_bounds import HEAD, bounded, connected, shaped
from tests.patience import patience

MIB = 1 << 20
BOUND_S = 20
POST = b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n"
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


async def refuse(scope: Message, receive: Receive, send: Send) -> None:
    """An application that wants no body, and ends each connection."""
    headers = [(b"content-length", b"2"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": b"no"})


@dataclass
class Served:
    """A server of `refuse`."""

    server: HttpServer
    port: int
    client_tls: ssl.SSLContext | None

    @property
    def num_open(self) -> int:
        return len(self.server.server_state.connections)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        name = {} if self.client_tls is None else {"server_hostname": "localhost"}
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.client_tls, **name)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def until_open(self, number: int) -> None:
        async with asyncio.timeout(patience(BOUND_S)):
            while self.num_open != number:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(bounds: ConnectionBounds, certificates: Path | None = None) -> AsyncIterator[Served]:
    tls = client = None
    if certificates is not None:
        tls = EdgeTls(certificates / "cert.pem", certificates / "key.pem", None)
        client = ssl.create_default_context(cafile=certificates / "ca.pem")
    bound = bound_socket("127.0.0.1", 0)
    server = HttpServer(refuse, 2, bounds, tls)
    running = asyncio.create_task(server.serve(sockets=[bound]))
    while not server.started:
        await asyncio.sleep(0)
    try:
        yield Served(server, bound.getsockname()[1], client)
    finally:
        server.should_exit = True
        await running


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a coroutine on a loop of each kind."""

    def run(test: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(test)

    return run


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certs") / "edge")


@pytest.mark.parametrize("over_tls", [False, True])
def test_a_client_that_reads_when_it_has_sent_everything_reads_the_answer(
    run: Callable[..., None], certificates: Path, over_tls: bool
) -> None:
    async def test() -> None:
        async with serving(ConnectionBounds(), certificates if over_tls else None) as served:
            for _ in range(4):
                async with served.connected() as (reader, writer):
                    writer.write(POST % (20 * MIB))
                    for _ in range(40):
                        writer.write(bytes(MIB))
                        await writer.drain()
                    answer = await reader.read(4096)
                    assert answer.startswith(b"HTTP/1.1 400 "), answer
            await served.until_open(0)

    run(test())


async def _is_over(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, piece: bytes, pause_s: float) -> None:
    """Send until the server ends the connection."""
    async with asyncio.timeout(patience(BOUND_S)):
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)


@pytest.mark.parametrize("over_tls", [False, True])
@pytest.mark.parametrize(
    ("bound", "value", "piece", "pause_s"),
    [
        ("body_timeout_s", 0.3, b" ", 0.01),
        ("_MAX_SILENCE_S", 0.3, b"", 0.05),
        ("MAX_LINGERING_BYTES", MIB, bytes(MIB), 0.0),
    ],
)
def test_clients_that_drip_say_nothing_or_never_stop_are_cut(
    run: Callable[..., None],
    certificates: Path,
    monkeypatch: pytest.MonkeyPatch,
    bound: str,
    value: float,
    piece: bytes,
    pause_s: float,
    over_tls: bool,
) -> None:
    most = {"body_timeout_s": 3600.0, "_MAX_SILENCE_S": 3600.0, "MAX_LINGERING_BYTES": 1 << 40, bound: value}
    monkeypatch.setattr(lingering, "_MAX_SILENCE_S", most["_MAX_SILENCE_S"])
    monkeypatch.setattr(lingering, "MAX_LINGERING_BYTES", most["MAX_LINGERING_BYTES"])

    async def test() -> None:
        bounds, files = ConnectionBounds(body_timeout_s=most["body_timeout_s"]), certificates if over_tls else None
        async with serving(bounds, files) as served, served.connected() as (reader, writer):
            writer.write(POST % (1 << 40))
            assert (await reader.read(4096)).startswith(b"HTTP/1.1 400 ")
            sending = asyncio.create_task(_is_over(reader, writer, piece, pause_s))
            await served.until_open(0)
            sending.cancel()

    run(test())


def test_a_whole_request_is_closed_at_once(run: Callable[..., None]) -> None:
    async def test() -> None:
        async with serving(ConnectionBounds()) as served, served.connected() as (reader, writer):
            writer.write(POST % 2 + b"{}")
            assert (await reader.read()).endswith(b"no")
            await served.until_open(0)

    run(test())


def test_refused_connections_that_linger_take_no_place(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lingering, "_MAX_SILENCE_S", 3600.0)

    async def test() -> None:
        async with serving(ConnectionBounds(max_connections=1)) as served, contextlib.AsyncExitStack() as stack:
            async with served.connected():
                await served.until_open(1)
                for _ in range(5):
                    reader, _ = await stack.enter_async_context(served.connected())
                    assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
                assert served.num_open == 6
            await served.until_open(5)
            async with served.connected() as (reader, writer):
                writer.write(POST % 2 + b"{}")
                assert (await reader.read()).startswith(b"HTTP/1.1 400 ")

    run(test())


class Ends(asyncio.Transport):
    """A transport that only notes whether it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def can_write_eof(self) -> bool:
        return False

    def resume_reading(self) -> None:
        pass


async def test_the_oldest_of_too_many_ends() -> None:
    held = Lingering(3600.0, max_connections=3)
    ends = [Ends() for _ in range(10)]
    loop = asyncio.get_running_loop()
    transports = [LingeringTransport(one, held, lambda: True, loop) for one in ends]
    for transport in transports:
        transport.close()
        transport.close()
    assert [one.is_closed for one in ends] == [True] * 7 + [False] * 3
    assert len(held) == 3
    for transport in transports:
        transport.end()
    assert all(one.is_closed for one in ends)
    assert len(held) == 0


# --- the gateway's own refusals


async def _whole(gateway: Any, request: bytes, size: int) -> tuple[int, dict[str, str], dict[str, Any]]:
    """The answer to a client that reads when it has sent all of its body."""
    async with connected(gateway) as client:
        client.send(request)
        for _ in range(size // MIB):
            client.send(bytes(MIB))
            await client.writer.drain()
        return await client.response()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (HEAD + b"content-length: %d\r\n\r\n" % (33 * MIB), 413, "body_too_large"),
        (b"POST /v1/no HTTP/1.0\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % (20 * MIB), 404, "not_found"),
        (HEAD + b"x: " + b"a" * 90_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"POST / HTTP/9\r\n\r\n", 400, "invalid_request"),
    ],
)
async def test_refusals_reach_clients_that_send_on(gateway: Any, head: bytes, status: int, code: str) -> None:
    for _ in range(4):
        shaped(await _whole(gateway, head, 20 * MIB), status, code)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_unmodified_client_reads_why_it_is_refused(gateway: Any) -> None:
    for _ in range(4):
        answer = await gateway.http.post("/v1/no", content=bytes(20 * MIB), headers={"connection": "close"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_that_comes_too_late_is_refused_while_it_comes(kit: Any, router: Any) -> None:
    async with bounded(kit, router, body_timeout=0.2) as gateway, connected(gateway) as client:
        client.send(HEAD + b"content-length: %d\r\n\r\n" % MIB)
        shaped(await client.response(), 408, "request_timeout")
        client.send(b" " * 100)
        assert await client.is_closed()


@pytest.mark.asyncio(loop_scope="module")
async def test_nothing_is_read_of_a_body_that_says_it_is_too_large(gateway: Any) -> None:
    async with connected(gateway) as client:
        client.send(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % (33 * MIB))
        shaped(await client.response(), 413, "body_too_large")
