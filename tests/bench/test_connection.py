"""Connections: kept ones that the server closes, answers without a length, TLS, and requests as they are sent."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

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
