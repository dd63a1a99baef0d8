"""Limits of the HTTP edge against slow, large or numerous clients; other origins; the format of refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from headrace.gateway.edge.settings import EdgeControls, EdgeSettings
from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\n"
BOUND_S = 20


@asynccontextmanager
async def bounded(kit: Any, router: Any, **settings: Any) -> AsyncIterator[Any]:
    """A gateway with these limits."""
    async with kit.serving_gateway(router.address, controls=EdgeControls(EdgeSettings(**settings))) as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict(kit_of_module: Any, router: Any) -> AsyncIterator[Any]:
    """A gateway that has little patience and little room."""
    settings = {"head_timeout": 0.4, "body_timeout": 0.4, "max_head_kb": 8, "max_body_mb": 1, "max_requests": 2}
    origins = ("https://chat.example", "http://localhost:3000")
    async with bounded(kit_of_module, router, **settings, cors_origins=origins) as gateway:
        yield gateway


class Connection:
    """A client that sends exactly the given bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    def send(self, raw: bytes) -> None:
        """Send bytes, even if the server has closed the connection."""
        self.writer.write(raw)

    async def response(self) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Status, headers and JSON of the next response."""
        async with asyncio.timeout(patience(BOUND_S)):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
            status, *lines = head.strip().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            body = await self._reader.readexactly(int(headers["content-length"]))
        return int(status.split()[1]), headers, json.loads(body)

    async def is_closed(self) -> bool:
        """Whether the gateway closes the connection, with nothing more said."""
        async with asyncio.timeout(patience(BOUND_S)):
            try:
                return await self._reader.read() == b""
            except ConnectionError:
                return True


@asynccontextmanager
async def connected(gateway: Any) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


def shaped(answer: tuple[int, dict[str, str], dict[str, Any]], status: int, code: str) -> None:
    """Assert that an answer is an error of the one shape."""
    assert (answer[0], answer[2]["error"]["code"]) == (status, code)
    assert answer[2]["error"].keys() == {"message", "type", "param", "code"}


# --- time


async def test_a_connection_that_says_nothing_is_closed(strict: Any) -> None:
    async with connected(strict) as client:
        assert await client.is_closed()


async def test_headers_that_drip_get_408_and_are_cut(strict: Any) -> None:
    async with connected(strict) as client:
        client.send(HEAD)

        async def drip() -> None:
            while True:
                client.send(b"x-more: 1\r\n")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        shaped(await client.response(), 408, "request_timeout")
        assert await client.is_closed()
        dripping.cancel()


async def test_a_body_that_drips_gets_408_and_is_cut(strict: Any) -> None:
    async with connected(strict) as client:
        client.send(HEAD + b"content-length: 1000\r\n\r\n")

        async def drip() -> None:
            while True:
                client.send(b" ")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        answer = await client.response()
        shaped(answer, 408, "request_timeout")
        assert answer[1]["connection"] == "close"
        assert await client.is_closed()
        dripping.cancel()


async def test_a_body_that_nobody_wants_may_not_drip_for_ever(strict: Any) -> None:
    async with connected(strict) as client:
        client.send(b"POST /v1/nothing HTTP/1.1\r\nhost: h\r\ncontent-length: 1000\r\n\r\n")
        shaped(await client.response(), 404, "not_found")

        async def drip() -> None:
            while True:
                client.send(b" ")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        assert await client.is_closed()
        dripping.cancel()


async def test_a_connection_serves_again_and_again_within_its_bounds(strict: Any) -> None:
    body = json.dumps(BODY).encode()
    async with connected(strict) as client:
        for _ in range(3):
            client.send(HEAD + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body))
            client.send(body)
            status, _, answer = await client.response()
            assert (status, answer["object"]) == (200, "chat.completion")
            await asyncio.sleep(0.5)  # longer than the headers of a request may take


async def test_an_answer_that_takes_too_long_ends_with_504_and_cancels_the_generation(kit: Any, router: Any) -> None:
    async def never(fake: Any, stream: Any, send: Any) -> None:
        await send([kit.token_of(ord("a"))], 0, None)
        await asyncio.Event().wait()

    # Time for the first token, also where the machine is slow.
    async with bounded(kit, router, request_timeout=patience(0.3)) as gateway:
        router.reset()
        router.script = never
        response = await gateway.http.post(CHAT, json=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        streamed = await gateway.http.post(CHAT, json={**BODY, "stream": True})
        assert streamed.status_code == 200
        assert '"code":"deadline_exceeded"' in streamed.text.replace(" ", "")
        assert "[DONE]" not in streamed.text
        async with asyncio.timeout(patience(BOUND_S)):
            for stream in router.streams:
                await stream.cancelled.wait()
    router.reset()


# --- size


@pytest.mark.parametrize(
    "head",
    [
        b"x-large: " + b"a" * 9000 + b"\r\n\r\n",
        b"".join(b"x-%d: %s\r\n" % (i, b"a" * 90) for i in range(100)) + b"\r\n",
        b"x-endless: " + b"a" * 400_000,
    ],
)
async def test_headers_over_the_limit_get_431_whether_they_end_or_not(strict: Any, head: bytes) -> None:
    async with connected(strict) as client:
        client.send(HEAD + head)
        shaped(await client.response(), 431, "headers_too_large")


async def test_a_target_over_the_limit_gets_431(strict: Any) -> None:
    async with connected(strict) as client:
        client.send(b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nhost: h\r\n\r\n")
        shaped(await client.response(), 431, "headers_too_large")


async def test_trailers_without_end_get_431_and_are_cut(strict: Any) -> None:
    async with connected(strict) as client:
        client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n")
        client.send(b"x-endless: " + b"a" * 600_000)
        shaped(await client.response(), 431, "headers_too_large")
        assert await client.is_closed()


async def test_what_is_no_http_gets_400_of_the_one_shape(strict: Any) -> None:
    for raw in (b"\x16\x03\x01\x00\xa5\x01\x00\x00", b"GET / HTTP/9\r\n\r\n", b"GET\r\n\r\n"):
        async with connected(strict) as client:
            client.send(raw)
            shaped(await client.response(), 400, "invalid_request")
            assert await client.is_closed()


async def test_a_body_over_the_limit_gets_413_also_when_it_does_not_say_its_length(strict: Any) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    for content in (b" " * (1 << 20) + b"x", endless()):
        response = await strict.http.post(CHAT, content=content)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


async def test_all_bodies_together_are_bounded(kit: Any, router: Any) -> None:
    async with bounded(kit, router, max_bodies_mb=1) as gateway, connected(gateway) as client:
        client.send(HEAD + b"content-length: 900000\r\n\r\n" + b" " * 800_000)
        async with asyncio.timeout(patience(BOUND_S)):
            while gateway.edge.bodies.num_bytes < 800_000:
                await asyncio.sleep(0.01)
        response = await gateway.http.post(CHAT, content=b" " * 500_000)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        client.writer.close()
        async with asyncio.timeout(patience(BOUND_S)):
            while gateway.edge.bodies.num_bytes:
                await asyncio.sleep(0.01)
        assert (await gateway.http.post(CHAT, content=b" " * 500_000)).status_code == 400


# --- number


async def test_connections_over_the_limit_get_503_and_come_in_when_others_go(kit: Any, router: Any) -> None:
    async with bounded(kit, router, max_connections=2) as gateway:
        async with connected(gateway) as first:
            first.send(b"GET /health/live HTTP/1.1\r\nhost: h\r\n\r\n")
            assert (await first.response())[0] == 200
            async with connected(gateway) as second, connected(gateway) as third:
                second.send(b"GET /health/live HTTP/1.1\r\nhost: h\r\n\r\n")
                assert (await second.response())[0] == 200
                answer = await third.response()
                shaped(answer, 503, "too_many_connections")
                assert answer[1]["retry-after"] in ("1", "2")
                assert await third.is_closed()
        async with asyncio.timeout(patience(BOUND_S)):
            while True:
                async with connected(gateway) as again:
                    again.send(b"GET /health/live HTTP/1.1\r\nhost: h\r\n\r\n")
                    if (await again.response())[0] == 200:
                        break


async def test_requests_over_the_limit_of_the_gateway_get_429(strict: Any, router: Any) -> None:
    go_on = asyncio.Event()

    async def wait(fake: Any, stream: Any, send: Any) -> None:
        await go_on.wait()
        await send([5], 0, 2)

    router.reset()
    router.script = wait
    running = [asyncio.create_task(strict.http.post(CHAT, json=BODY)) for _ in range(2)]
    async with asyncio.timeout(patience(BOUND_S)):
        while len(router.streams) < 2:
            await asyncio.sleep(0.01)
    refused = await strict.http.post(CHAT, json=BODY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert (await strict.http.get("/health/live")).status_code == 200
    go_on.set()
    assert [(await one).status_code for one in running] == [200, 200]
    router.reset()


# --- other origins


async def test_no_origin_may_use_the_api_by_default(gateway: Any) -> None:
    headers = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    preflight = await gateway.http.options(CHAT, headers=headers)
    answered = await gateway.http.post(CHAT, json=BODY, headers={"origin": "https://chat.example"})
    assert preflight.status_code == 405
    assert not [name for name in (*preflight.headers, *answered.headers) if name.startswith("access-control")]


async def test_named_origins_may_use_the_api_and_others_may_not(strict: Any) -> None:
    for origin in ("https://chat.example", "http://localhost:3000"):
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        preflight = await strict.http.options(CHAT, headers={"origin": origin, **asked})
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == origin
        assert preflight.headers["access-control-allow-headers"] == "authorization"
        answered = await strict.http.post(CHAT, json=BODY, headers={"origin": origin})
        assert answered.headers["access-control-allow-origin"] == origin
        exposed = answered.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "x-headrace-ignored"} <= set(exposed)
        assert "origin" in answered.headers["vary"]
    for origin in ("https://evil.example", "https://chat.example.evil.example", "null"):
        answered = await strict.http.post(CHAT, json=BODY, headers={"origin": origin})
        assert not [name for name in answered.headers if name.startswith("access-control")]


async def test_a_star_lets_any_origin_use_the_api_without_credentials(kit: Any, router: Any) -> None:
    async with bounded(kit, router, cors_origins=("*",)) as gateway:
        answered = await gateway.http.get("/v1/models", headers={"origin": "https://any.example"})
        assert answered.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answered.headers
