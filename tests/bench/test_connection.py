"""Connections: kept ones that the server closes, answers without a length, pieces that are read later, TLS, and
requests as they are sent."""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.bench import connection
from headrace.bench.apis import Options, Prompt, api_of
from headrace.bench.connection import Client, ExchangeError
from headrace.bench.sender import HttpSender
from headrace.bench.target import target_of
from tests.certificates import make_certificates

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def whole(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


def client_of(port: int, scheme: str = "http", **options: object) -> Client:
    target = target_of(f"{scheme}://127.0.0.1:{port}", {}, options.get("ca_file"), bool(options.get("insecure")))  # type: ignore[arg-type]
    return Client(target, 5.0)


async def test_connections_are_kept_and_a_request_is_sent_again_if_a_kept_one_was_closed() -> None:
    connections: list[int] = []

    async def answer_once_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        for _ in range(2):
            await whole(reader)
            connections[-1] += 1
            if connections == [2]:
                break  # the second request on the first connection is dropped
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        writer.close()

    async with served(answer_once_and_close) as port:
        client = client_of(port)
        assert await client.call("GET", "/") == (200, b"ok")
        assert await client.call("GET", "/") == (200, b"ok")
        assert connections == [2, 1]
        client.close()


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        writer.close()

    async with served(handler) as port:
        assert await client_of(port).call("GET", "/") == (200, b"all of it")


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\npart", "disconnected"),
        (b"", "disconnected"),
        (b"SSH-2.0 hello\r\n\r\n", "malformed"),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n", "disconnected"),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n", "malformed"),
    ],
)
async def test_an_answer_that_is_not_whole_fails(raw: bytes, kind: str) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole(reader)
        writer.write(raw)
        writer.close()

    async with served(handler) as port:
        with pytest.raises(ExchangeError) as caught:
            await client_of(port).call("GET", "/")
    assert caught.value.kind == kind


class Told:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.pieces: list[tuple[bytes, float]] = []
        self.ends: list[str] = []

    @property
    def body(self) -> bytes:
        return b"".join(piece for piece, _ in self.pieces)

    def began(self, status: int, content_type: str) -> None:
        assert (status, content_type, self.pieces) == (200, "text/event-stream", [])

    def received(self, piece: bytes, now_s: float) -> None:
        assert not self.ends
        self.pieces.append((piece, now_s))

    def ended(self, error: ExchangeError | None) -> None:
        self.ends.append("whole" if error is None else error.kind)


class FakeTransport:
    def __init__(self) -> None:
        self.is_aborted = False
        self.num_requests = 0

    def write(self, raw: bytes) -> None:
        self.num_requests += 1

    def abort(self) -> None:
        self.is_aborted = True


class Wire:
    """A client whose connections are fed by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 5.0) -> None:
        self.client = Client(target_of("http://127.0.0.1:1", {}, None, False), timeout_s)
        self.protocols: list[Any] = []
        self.transports: list[FakeTransport] = []
        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", self._connected)

    async def _connected(self, made: Callable[[], Any], *_: object, **__: object) -> tuple[FakeTransport, Any]:
        self.protocols.append(made())
        self.transports.append(FakeTransport())
        self.protocols[-1].connection_made(self.transports[-1])
        return self.transports[-1], self.protocols[-1]

    async def asked(self, may_wait: bool = False) -> tuple[Told, Any]:
        """An exchange on its way: its listener, and what takes its bytes."""
        told = Told()
        before = [transport.num_requests for transport in self.transports]
        self.client.start(b"GET / HTTP/1.1\r\n\r\n", told, may_wait)
        async with asyncio.timeout(30):
            while (now := [transport.num_requests for transport in self.transports]) in (before, [*before, 0]):
                await asyncio.sleep(0)
        place = next(place for place, count in enumerate(now) if [count] != before[place : place + 1])
        return told, self.protocols[place].data_received


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(raw: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(raw), raw)


@pytest.mark.parametrize("trailer", [b"", b"X-Cost: {}\r\n"])
@pytest.mark.parametrize("ends", [b"\n\n", b"\n", b"\r\n\r\n"])
async def test_an_answer_ends_with_its_last_byte_in_whatever_pieces_it_comes(
    monkeypatch: pytest.MonkeyPatch, ends: bytes, trailer: bytes
) -> None:
    wire = Wire(monkeypatch)
    events = [b"data: {}" + ends, b"data: {1}" + ends]
    tail = b"".join(map(chunk, events)) + b"0\r\n" + trailer + b"\r\n"
    for first, second in itertools.combinations(range(len(tail)), 2):
        told, feed = await wire.asked()
        feed(HEAD + tail[:first])
        feed(tail[first:second])
        assert not told.ends
        feed(tail[second:])
        assert (told.ends, told.body) == (["whole"], b"".join(events))
    assert len(wire.protocols) == 1


async def test_pieces_that_are_read_later_have_the_times_at_which_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    told, feed = await wire.asked()
    event = chunk(b"data: {}\n\n")
    arrivals = [HEAD, event, event, event + b"0\r\n\r\n"]
    for now_s, piece in enumerate(arrivals):
        assert not told.pieces
        monkeypatch.setattr(connection, "_now", lambda now_s=now_s: float(now_s))
        feed(piece)
    assert [now_s for _, now_s in told.pieces] == [1.0, 2.0, 3.0]
    assert told.ends == ["whole"]


INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\nContent-Type: text/html\r\n\r\n"


async def test_messages_before_an_answer_are_skipped() -> None:
    """By a raw server, over one kept connection, each message in a piece of its own and all in one."""
    connections = itertools.count()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        next(connections)
        for separately in (False, True):
            await whole(reader)
            writer.write(INTERIM)
            if separately:
                await writer.drain()
                await asyncio.sleep(0.01)
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno")

    async with served(handler) as port:
        client = client_of(port)
        assert [await client.call("GET", "/") for _ in range(2)] == [(404, b"no")] * 2
        assert next(connections) == 1
        client.close()


@pytest.mark.parametrize("may_wait", [False, True])
async def test_a_stream_is_whole_behind_messages_before_it(monkeypatch: pytest.MonkeyPatch, may_wait: bool) -> None:
    """In whatever pieces they come. The times of its pieces are right, and its connection is kept."""
    wire = Wire(monkeypatch)
    for cut in range(1, len(INTERIM + HEAD) + 1):
        told, feed = await wire.asked(may_wait)
        for now_s, piece in enumerate(
            [(INTERIM + HEAD)[:cut], (INTERIM + HEAD)[cut:], chunk(b"data: {}\n\n"), chunk(b"data: {}\n\n") + END]
        ):
            assert not told.ends
            monkeypatch.setattr(connection, "_now", lambda now_s=now_s: float(now_s))
            feed(piece)
        assert told.ends == ["whole"]
        assert told.pieces == [(b"data: {}\n\n", 2.0), (b"data: {}\n\n", 3.0)]
    assert len(wire.protocols) == 1


async def test_a_long_stream_is_read_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told, feed = await Wire(monkeypatch).asked()
    feed(HEAD)
    for _ in range(1000):
        feed(chunk(b"data: {}\n\n"))
    assert len(told.pieces) > 900


END = b"0\r\n\r\n"


async def test_an_answer_that_may_wait_is_read_with_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection sends the next request before. When nothing else is under way, the answers are read."""
    wire = Wire(monkeypatch)
    event = chunk(b"data: {}\n\n")
    others, feed_others = await wire.asked()
    asked: list[Told] = []
    for number in range(3):
        told, feed = await wire.asked(may_wait=True)
        feed(HEAD)
        feed(event)
        feed(chunk(b"data: %d\n\n" % number) + END)
        asked.append(told)
    assert len(wire.protocols) == 2
    assert not any(told.pieces for told in asked)
    feed_others(HEAD + event + END)
    assert [told.body for told in asked] == [b"data: {}\n\ndata: %d\n\n" % number for number in range(3)]
    assert [told.ends for told in (*asked, others)] == [["whole"]] * 4


async def test_many_answers_that_may_wait_are_read_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    await wire.asked()
    asked = []
    for _ in range(20):
        told, feed = await wire.asked(may_wait=True)
        feed(HEAD)
        feed(chunk(b"data: {}\n\n") + END)
        asked.append(told)
    assert sum(told.ends == ["whole"] for told in asked) == 16
    wire.client.read()
    assert all(told.ends == ["whole"] for told in asked)


@pytest.mark.parametrize("cut", range(1, len(END)))
async def test_an_answer_that_may_wait_may_end_in_pieces(monkeypatch: pytest.MonkeyPatch, cut: int) -> None:
    wire = Wire(monkeypatch)
    told, feed = await wire.asked(may_wait=True)
    for piece in (HEAD, chunk(b"data: {}\n\n"), chunk(b"data: {}\n\n") + END[:cut]):
        feed(piece)
        assert not told.ends
    feed(END[cut:])
    assert (told.body, told.ends) == (b"data: {}\n\n" * 2, ["whole"])


async def test_an_answer_that_waits_is_read_when_its_connection_is_lost_or_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire(monkeypatch)
    await wire.asked()
    for lose in (lambda: wire.protocols[-1].connection_lost(None), wire.client.close):
        told, feed = await wire.asked(may_wait=True)
        feed(HEAD)
        feed(chunk(b"data: {}\n\n") + END)
        assert not told.ends
        lose()
        assert (told.body, told.ends) == (b"data: {}\n\n", ["whole"])


async def test_a_request_behind_an_answer_that_waits_is_sent_again_if_the_connection_was_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire(monkeypatch)
    await wire.asked()
    waits, feed = await wire.asked(may_wait=True)
    feed(HEAD)
    feed(chunk(b"data: {}\n\n") + END)
    again, _ = await wire.asked()
    assert len(wire.protocols) == 2
    wire.protocols[-1].connection_lost(None)
    assert waits.ends == ["whole"]
    async with asyncio.timeout(30):
        while len(wire.protocols) < 3 or not wire.transports[-1].num_requests:
            await asyncio.sleep(0)
    wire.protocols[-1].data_received(HEAD + chunk(b"data: {}\n\n") + END)
    assert (again.body, again.ends) == (b"data: {}\n\n", ["whole"])


async def test_a_connection_that_the_server_closes_after_an_answer_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire(monkeypatch)
    await wire.asked()
    told, feed = await wire.asked(may_wait=True)
    feed(HEAD.removesuffix(b"\r\n") + b"Connection: close\r\n\r\n")
    feed(chunk(b"data: {}\n\n") + END)
    assert told.ends == ["whole"]
    await wire.asked()
    assert len(wire.protocols) == 3


async def test_what_came_before_a_disconnection_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    told, feed = await wire.asked()
    feed(HEAD)
    feed(chunk(b"data: {}\n\n"))
    assert not told.pieces
    wire.protocols[0].connection_lost(None)
    assert (told.body, told.ends) == (b"data: {}\n\n", ["disconnected"])


async def test_what_came_before_a_timeout_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch, timeout_s=0.05)
    told, feed = await wire.asked()
    feed(HEAD)
    feed(chunk(b"data: {}\n\n"))
    async with asyncio.timeout(30):
        while not told.ends:
            await asyncio.sleep(0.01)
    assert (told.body, told.ends) == (b"data: {}\n\n", ["timeout"])
    assert wire.transports[0].is_aborted


async def test_a_cancelled_exchange_is_told_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    told, feed = await wire.asked()
    feed(HEAD)
    wire.client.close()
    assert wire.transports[0].is_aborted
    wire.protocols[0].connection_lost(None)
    assert (told.pieces, told.ends) == ([], [])


async def test_an_exchange_may_be_cancelled_before_there_is_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(monkeypatch)
    told = Told()
    wire.client.start(b"GET / HTTP/1.1\r\n\r\n", told).cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert (wire.protocols, told.ends) == ([], [])


async def test_whatever_prevents_a_connection_ends_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object, **__: object) -> tuple[Any, Any]:
        raise ValueError("unforeseen")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", broken)
    with pytest.raises(ExchangeError, match="unforeseen") as caught:
        await client_of(1).call("GET", "/")
    assert caught.value.kind == "connect"


async def test_tls_holds_servers_to_their_authority(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "server")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(made / "cert.pem", made / "key.pem")

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await whole(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with served(handler, tls) as port:
        assert await client_of(port, "https", insecure=True).call("GET", "/") == (200, b"ok")
        with pytest.raises(ExchangeError, match="name its authority with --ca-file"):
            await client_of(port, "https").call("GET", "/")


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("http://a:80", "/v1/completions"),
        ("http://a:80/v1/", "/v1/completions"),
        ("http://a:80/v1/chat/completions", "/v1/completions"),
        ("http://a:80/proxy/v1", "/proxy/v1/completions"),
    ],
)
def test_a_url_may_have_a_path(url: str, path: str) -> None:
    request = target_of(url, {"x-a": "b"}, None, False).request("POST", "/v1/completions", b"{}")
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.decode().split("\r\n")[0] == f"POST {path} HTTP/1.1"
    assert b"Host: a:80\r\nx-a: b\r\n" in head
    assert body == b"{}"


def test_conversations_ask_adapters_in_turn_and_requests_have_ids() -> None:
    target = target_of("http://a", {}, None, False)
    sender = HttpSender(Client(target, 1.0), api_of("openai", None), Options("base"), ["one", "two"], "run-")
    said = [{"role": "user", "content": "hi"}]
    requests = [sender.prepared(Prompt(said, 4, number)) for number in (0, 1, 1, 2)]
    assert [json.loads(raw.partition(b"\r\n\r\n")[2])["model"] for raw in requests] == ["one", "two", "two", "one"]
    assert [f"x-request-id: run-{number}\r\n".encode() in raw for number, raw in enumerate(requests)] == [True] * 4
