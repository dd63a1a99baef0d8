"""Connections whose clients offer upgrades, pipeline, break the framing, do not read, or stop in a TLS handshake."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.gateway.edge import http
from tests.certificates import make_certificates
from tests.gateway.edge.test_bounds import BODY, BOUND_S, HEAD, bounded, connected, shaped
from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIVE = b"GET /health/live HTTP/1.1\r\nhost: h\r\n\r\n"
# As the HTTP client of Java's library sends it with the first request.
OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict(kit_of_module: Any, router: Any) -> AsyncIterator[Any]:
    """A gateway that waits for a slow reader a second only."""
    async with bounded(kit_of_module, router, send_timeout=1.0, head_timeout=5.0) as gateway:
        yield gateway


def chat(**more: Any) -> bytes:
    """The body of a chat."""
    return json.dumps({**BODY, **more}).encode()


async def until(condition: Any) -> None:
    async with asyncio.timeout(patience(BOUND_S)):
        while not condition():
            await asyncio.sleep(0.01)


# --- upgrades


@pytest.mark.parametrize("size", [1, 40, 100_000])
async def test_an_offer_to_upgrade_is_ignored_and_the_body_is_read(strict: Any, router: Any, size: int) -> None:
    router.reset()
    body = chat()
    asked = HEAD + OFFER + b"content-length: %d\r\n\r\n" % len(body) + body
    async with connected(strict) as client:
        for raw in (asked, LIVE, asked):
            for start in range(0, len(raw), size):
                client.send(raw[start : start + size])
                await asyncio.sleep(0)
            assert (await client.response())[0] == 200
    assert len(router.streams) == 2


async def test_several_offers_in_one_segment_are_answered_in_order(strict: Any) -> None:
    body = chat()
    asked = HEAD + OFFER + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    async with connected(strict) as client:
        client.send((asked + LIVE) * 3)
        answers = [(await client.response())[2] for _ in range(6)]
    assert [answer.get("status", "chat") for answer in answers] == ["chat", "live"] * 3


@pytest.mark.parametrize("raw", [LIVE.replace(b"host", OFFER + b"host"), b"\x16\x03\x01\x02", HEAD + b"x: \0\r\n\r\n"])
async def test_strangers_do_not_fill_the_log(strict: Any, caplog: pytest.LogCaptureFixture, raw: bytes) -> None:
    with caplog.at_level(logging.WARNING):
        async with connected(strict) as client:
            client.send(raw)
            await client.response()
    assert not caplog.records


# --- idle connections


async def test_a_connection_whose_request_was_answered_before_its_end_is_closed_when_it_is_idle(
    kit: Any, router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "KEEP_CONNECTION_S", 1)
    async with bounded(kit, router) as gateway, connected(gateway) as client:
        client.send(b"POST /v1/nothing HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\n\r\n")
        assert (await client.response())[0] == 404
        client.send(b"    " + LIVE)
        assert (await client.response())[0] == 200
        client.send(b"POST /v1/nothing HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\n\r\n")
        assert (await client.response())[0] == 404
        client.send(b"    ")
        assert await client.is_closed()


# --- framing


@pytest.mark.parametrize(
    "rest",
    [
        b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        b"transfer-encoding: chunked\r\n\r\n4\r\n{   }\r\n",
        b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"content-length: 2\r\n\r\n{}}}}}}}}}}}}}",
    ],
)
async def test_a_body_that_breaks_the_framing_gets_400(strict: Any, rest: bytes) -> None:
    async with connected(strict) as client:
        client.send(HEAD + rest)
        shaped(await client.response(), 400, "invalid_request")
        assert await client.is_closed()


# --- pipelining


async def test_few_requests_may_wait_on_a_connection_and_many_may_not(strict: Any) -> None:
    async with connected(strict) as client:
        client.send(LIVE * 20)
        for _ in range(20):
            assert (await client.response())[0] == 200
    async with connected(strict) as client:
        client.send(LIVE * 5000)
        shaped(await client.response(), 400, "invalid_request")
        assert await client.is_closed()


async def test_a_client_that_leaves_cancels_its_request_whatever_waits_behind_it(strict: Any, router: Any) -> None:
    async def never(fake: Any, stream: Any, send: Any) -> None:
        await asyncio.Event().wait()

    router.reset()
    router.script = never
    body = chat(stream=True)
    async with connected(strict) as client:
        client.send(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body + LIVE)
        await until(lambda: router.streams)
    async with asyncio.timeout(patience(BOUND_S)):
        await router.streams[0].cancelled.wait()
    router.reset()


# --- clients that do not read


async def test_a_client_that_takes_nothing_of_a_stream_is_left(strict: Any, router: Any, kit: Any) -> None:
    async def long(fake: Any, stream: Any, send: Any) -> None:
        for position in range(200):
            await send([kit.token_of(ord("a"))], position, None)
        await asyncio.Event().wait()

    router.reset()
    router.script = long
    body = chat(stream=True, max_tokens=230)
    with unread(strict, HEAD + b"content-length: %d\r\n\r\n" % len(body) + body) as client:
        await until(lambda: router.streams)
        async with asyncio.timeout(patience(BOUND_S)):
            await router.streams[0].cancelled.wait()
        await until(lambda: not is_held(client))
    router.reset()


async def test_an_answer_that_nobody_takes_keeps_no_connection(strict: Any) -> None:
    with unread(strict, b"GET /openapi.json HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n") as client:
        await until(lambda: is_held(client))
        await until(lambda: not is_held(client))


def unread(gateway: Any, request: bytes) -> socket.socket:
    """A client that asks and reads nothing. Its system takes a few KiB for it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", int(gateway.url.rpartition(":")[2])))
    client.sendall(request)
    return client


def is_held(client: socket.socket) -> bool:
    """Whether the server's end of a connection exists."""
    ends = f":{client.getpeername()[1]:04X}", f":{client.getsockname()[1]:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(ends[0]) and row[2].endswith(ends[1]) for row in rows)


# --- TLS handshakes


async def test_handshakes_that_stop_are_few_and_end(
    kit: Any, router: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = make_certificates(tmp_path / "own")
    files = {"tls_cert": own / "cert.pem", "tls_key": own / "key.pem"}
    async with bounded(kit, router, **files, head_timeout=5.0, max_connections=3) as gateway:
        stuck = [await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2])) for _ in range(6)]
        for _, writer in stuck:
            writer.write(b"\x16\x03\x01\x02")
        async with asyncio.timeout(patience(BOUND_S)):
            for reader, _ in stuck[3:]:
                assert await read(reader) == b""
            assert not any(reader.at_eof() for reader, _ in stuck[:3]), "they have time"
            for reader, _ in stuck[:3]:
                await read(reader)
        assert (await gateway.http.get("/health/live")).status_code == 200
        for _, writer in stuck:
            writer.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def read(reader: asyncio.StreamReader) -> bytes:
    """What comes until the end."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""
