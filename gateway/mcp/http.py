"""Requests to one MCP server over Streamable HTTP: JSON-RPC messages in POST requests, whose answers are JSON or
server-sent events. https://modelcontextprotocol.io/specification/2025-06-18/basic/transports

    initialize  ->  notifications/initialized  ->  tools/list, tools/call, ...  ->  DELETE

A session begins with its first request. The server is the operator's: its URL and headers never come from a caller.
Redirects are not followed, proxies of the environment and cookies are not used, and each answer has a bound of time and
of bytes.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpcore
import msgspec

from headrace.gateway.mcp import messages
from headrace.gateway.mcp.credentials import Credentials, Headers
from headrace.gateway.mcp.values import CONNECTION_LOST, TIMED_OUT, McpError

MAX_CONNECTIONS = 64
UNAUTHORIZED = 401
MAX_SERVER_REQUESTS = 16
"""Requests of the server within one answer."""
_MAX_SESSION_ID_CHARS = 1024
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server of the operator's list."""

    name: str
    url: str
    timeout_s: float
    """For each answer."""
    credentials: Credentials
    """The operator's own headers for it."""


def new_pool() -> httpcore.AsyncConnectionPool:
    """The connections of a gateway to all servers."""
    return httpcore.AsyncConnectionPool(
        ssl_context=ssl.create_default_context(),
        max_connections=MAX_CONNECTIONS,
        network_backend=httpcore.AnyIOBackend(),
    )


async def post(pool: httpcore.AsyncConnectionPool, url: str, headers: Headers, body: bytes) -> tuple[int, bytes]:
    """See `credentials.Post`."""
    try:
        async with pool.stream("POST", url, headers=[*headers], content=body) as response:
            return response.status, b"".join([part async for part in _bounded(response.aiter_stream())])
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
        _LOG.warning("%s cannot be reached: %r", url, error)
        raise McpError("the gateway gets no token for the MCP server", CONNECTION_LOST) from None


class HttpExchange:
    """See `session.Exchange`. Servers may keep a state in its session."""

    def __init__(
        self,
        server: HttpServer,
        pool: httpcore.AsyncConnectionPool,
        in_background: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """`in_background` runs work that no caller waits for."""
        self._server = server
        self._url = httpcore.URL(server.url)
        self._pool = pool
        self._in_background = in_background
        self._notice: asyncio.Task[None] | None = None
        self._last_id = 0
        self._session_id = ""
        self._version = ""
        """The version that was agreed on, once the session has begun."""

    def close(self) -> None:
        """End the session, in the background."""
        if self._session_id:
            self._in_background(self._end(self._headers(), self._notice))
            self._session_id = ""

    async def result(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """See `Exchange`."""
        timeout = asyncio.timeout(self._server.timeout_s)
        try:
            async with timeout:
                try:
                    return await self._in_session(method, params)
                except McpError as error:
                    is_unauthorized = error.is_http and error.code == UNAUTHORIZED
                    if not (is_unauthorized and await self._server.credentials.refused()):
                        raise
                return await self._in_session(method, params)
        except TimeoutError:
            if not timeout.expired():
                raise
            problem = f"the MCP server did not answer within {self._server.timeout_s:g} s"
            raise McpError(problem, TIMED_OUT) from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            _LOG.warning("the MCP server %s cannot be reached: %r", self._server.name, error)
            raise McpError("the MCP server cannot be reached, or broke off", CONNECTION_LOST) from None

    async def _in_session(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        await self._server.credentials.prepare()
        if not self._version:
            await self._begin()
        return await self._answered(method, params)

    async def _begin(self) -> None:
        self._session_id = ""
        self._version = messages.version_in(await self._answered("initialize", messages.first_params()))
        await self._send(messages.INITIALIZED)

    async def _answered(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """As `result`, without bounds of time."""
        self._last_id += 1
        request_id = self._last_id
        message = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
        try:
            async with aclosing(self._messages(message)) as found:
                async for one in found:
                    if one.get("id") == request_id and "method" not in one:
                        return messages.result_in(one)
        except asyncio.CancelledError:
            # The end of the connection does not cancel a request.
            if method != "initialize":
                cancelled = messages.cancellation_of(request_id)
                self._notice = self._in_background(
                    self._request("POST", self._headers(), msgspec.json.encode(cancelled))
                )
            raise
        raise McpError("the MCP server's answer has no result", CONNECTION_LOST)

    async def _messages(self, message: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The messages in the answer to a request. Also answers the requests that the server sends."""
        num_requests = 0
        async with self._pool.stream(
            "POST", self._url, headers=self._headers(), content=msgspec.json.encode(message)
        ) as response:
            headers = {name.lower(): value for name, value in response.headers}
            self._check(response.status, headers)
            if message.get("method") == "initialize":
                self._session_id = _session_id_in(headers)
            kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
            if kind == b"text/event-stream":
                found = _events(_bounded(response.aiter_stream()))
            elif kind == b"application/json":
                found = _whole(_bounded(response.aiter_stream()))
            else:
                raise McpError("the MCP server answers neither with JSON nor with events", CONNECTION_LOST)
            async with aclosing(found):
                async for data in found:
                    one = messages.message_in(data)
                    if "method" in one and "id" in one:
                        num_requests += 1
                        if num_requests > MAX_SERVER_REQUESTS:
                            raise McpError("the MCP server asks too much of its client", CONNECTION_LOST)
                        await self._send(messages.refusal_of(one))
                    else:
                        yield one

    async def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message that gets no answer."""
        await self._request("POST", self._headers(), msgspec.json.encode(message))

    async def _end(self, headers: Sequence[tuple[str, str]], notice: asyncio.Task[None] | None) -> None:
        if notice is not None:
            await asyncio.wait({notice})
        await self._request("DELETE", headers, b"")

    async def _request(self, method: str, headers: Sequence[tuple[str, str]], content: bytes) -> None:
        """Send a request and ignore the content of its answer."""
        url = self._url
        async with self._pool.stream(method, url, headers=headers, content=content) as response:
            async for _ in _bounded(response.aiter_stream()):
                pass
        if response.status >= 300:
            _LOG.debug("the MCP server %s answers %s with %d", self._server.name, method, response.status)

    def _headers(self) -> Sequence[tuple[str, str]]:
        url = self._url
        host = url.host.decode()
        authority = f"[{host}]" if ":" in host else host
        headers = [
            ("Host", authority if url.port is None else f"{authority}:{url.port}"),
            ("Accept", "application/json, text/event-stream"),
            ("Accept-Encoding", "identity"),
            ("Content-Type", "application/json"),
            ("User-Agent", "headrace"),
        ]
        if self._session_id:
            headers.append(("Mcp-Session-Id", self._session_id))
        if self._version:
            headers.append(("MCP-Protocol-Version", self._version))
        return [*headers, *self._server.credentials.headers()]

    def _check(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        """Raise `McpError` unless the response has an answer."""
        if status in range(300, 400):
            raise McpError("the MCP server redirects to another URL, which is not followed", status, is_http=True)
        if status != 200:
            if status == 404 and self._session_id:
                self._session_id = self._version = ""  # the next request begins another session
            raise McpError(f"the MCP server answered with the status {status}", status, is_http=True)
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise McpError("the MCP server sends its answer compressed", CONNECTION_LOST)


def _session_id_in(headers: Mapping[bytes, bytes]) -> str:
    found = headers.get(b"mcp-session-id", b"")
    if len(found) > _MAX_SESSION_ID_CHARS or any(not 0x21 <= byte <= 0x7E for byte in found):
        raise McpError("the MCP server gives an id of its session that cannot be one", CONNECTION_LOST)
    return found.decode()


async def _bounded(parts: Any) -> AsyncGenerator[bytes, None]:
    num_bytes = 0
    async for part in parts:
        num_bytes += len(part)
        if num_bytes > messages.MAX_ANSWER_BYTES:
            raise McpError(f"the MCP server's answer has more than {messages.MAX_ANSWER_BYTES} bytes", CONNECTION_LOST)
        yield part


async def _whole(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield b"".join([part async for part in parts])


async def _events(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The data of each server-sent event."""
    rest = b""
    data: list[bytes] = []
    async for part in parts:
        # A part may end between the two characters of a line's end, so the last line waits for more.
        *lines, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line.removeprefix(b"data:").removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []
