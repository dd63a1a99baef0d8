"""Limits of HTTP connections, which apply before a request exists.

    connected --head_timeout_s--> head complete --> answered --75 s--> closed
                                  413, 408 by the exchange; then it lingers

There are limits for open connections and for those that are not open yet (TLS handshakes), the time until a request's
head is complete, the size of the head and of trailers, the framing of a body, the time for the rest of a body whose
request is already answered, the requests that wait for the answers of earlier ones, and the time in which a client
takes nothing of an answer. Refusals are JSON in OpenAI's error format. Connections that end before the client has sent
its request linger (see `lingering`).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.gateway.edge.cors import Application
from headrace.gateway.edge.exchange import Message, Receive, Send
from headrace.gateway.edge.failures import OPENAI_ERRORS, HttpError, failure_of
from headrace.gateway.edge.lingering import Lingering, LingeringTransport

# The event loop reads this much at a time.
_READ_BYTES = 256 * 1024
# A chunk of one byte takes six bytes.
_MAX_FRAMING = 8
# Requests that wait for the answers of earlier ones on their connection.
_MAX_PIPELINED = 32


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """Bounds of connections; times in seconds."""

    max_connections: int = 10_000
    head_timeout_s: float = 15.0
    max_head_bytes: int = 64 * 1024
    body_timeout_s: float = 60.0
    send_timeout_s: float = 60.0


class BoundedConnection(HttpToolsProtocol):
    """A connection with limits on its size, time and number of requests."""

    transport: LingeringTransport

    def __init__(
        self,
        *args: Any,
        bounds: ConnectionBounds,
        opening: dict[BoundedConnection, float],
        lingering: Lingering,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._bounds = bounds
        self._opening = opening
        self._lingering = lingering
        opening[self] = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: HttpError | None = None
        self._is_open_message = False
        self._num_head_bytes = 0
        self._num_fed_bytes = 0
        self._num_body_bytes = 0
        self._num_new_bytes = 0
        self._in_head = False
        self._certificates: list[str] = []
        self._answering: RequestResponseCycle | None = None
        self._plain_head = b""

    # --- life of the connection -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection if there is room for another one."""
        super().connection_made(LingeringTransport(transport, self._lingering, self._may_be_sending, self.loop))
        self._opening.pop(self, None)
        connection = transport.get_extra_info("ssl_object")
        if isinstance(connection, (ssl.SSLObject, ssl.SSLSocket)):
            shown = connection.getpeercert(binary_form=True)
            self._certificates = [ssl.DER_cert_to_PEM_cert(shown)] if shown else []
        # The system ends a connection whose client reads nothing for this time, even while it is being closed.
        unread_ms = round(self._bounds.send_timeout_s * 1000)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
        if len(self.connections) - len(self._lingering) > self._bounds.max_connections:
            problem = f"the gateway has {self._bounds.max_connections} connections, its maximum"
            self._refuse(HttpError(503, "too_many_connections", problem, [(b"retry-after", b"1")]))
        else:
            self._arm(self._bounds.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection, and tell the request that is being answered."""
        self._disarm()
        self.transport.end()
        super().connection_lost(exc)
        self._leave_answer()
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and check the limits."""
        if self.transport.is_closing():
            self.transport.drop(len(data))
            return
        self._num_new_bytes = len(data)
        self._num_fed_bytes += len(data)
        self._unset_keepalive_if_required()
        self._feed(data)
        around = self._num_fed_bytes - _MAX_FRAMING * self._num_body_bytes
        if self._is_open_message and around > self._bounds.max_head_bytes + _READ_BYTES:
            self._refuse(self._head_too_large())

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as end:
                # The parser treats the rest as another protocol. Parse the request again, without its offer.
                data, self._plain_head = self._plain_head + data[end.args[0] :], b""
                self.parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError:
                self._refuse(self._refusal or HttpError(400, "invalid_request", "this is not an HTTP request"))
                return
            else:
                return

    # --- callbacks of the parser ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        self._unset_keepalive_if_required()
        super().on_message_begin()
        # As in the TLS extension of ASGI.
        self.scope["extensions"] = {"tls": {"client_cert_chain": self._certificates}}
        self._is_open_message = self._in_head = True
        self._num_head_bytes = self._num_body_bytes = 0
        self._num_fed_bytes = self._num_new_bytes
        if self._timer is None:
            self._arm(self._bounds.head_timeout_s)

    def on_url(self, url: bytes) -> None:
        """A part of the request's target."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete. From now on the exchange has its own time limits."""
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._plain_head = self._head_without_upgrade()
            return
        if len(self.pipeline) >= _MAX_PIPELINED:
            problem = f"more than {_MAX_PIPELINED} requests wait on this connection; use several connections"
            self._refusal = HttpError(400, "invalid_request", problem)
            raise self._refusal
        super().on_headers_complete()
        self._in_head = False
        self._disarm()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        if self._plain_head:
            return
        self._is_open_message = False
        self._disarm()
        super().on_message_complete()
        if self.cycle.response_complete:  # so it no longer begins with the answer
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """The request is answered; the unread rest of its body may arrive for a limited time."""
        super().on_response_complete()
        if self._is_open_message and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._arm(self._bounds.body_timeout_s)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _unframed(cycle, app)
        super()._start_asgi_task(cycle, app)

    def _leave_answer(self) -> None:
        """End the request that is being answered as if its client had left. `cycle` is the newest one."""
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()

    def _head_without_upgrade(self) -> bytes:
        """The head of the request without its offer to upgrade, which a server may ignore."""
        line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([line, *headers, b"", b""])

    # --- bounds -----------------------------------------------------------------------------------------------------

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self._bounds.max_head_bytes:
            self._refusal = self._head_too_large()
            raise self._refusal

    def _head_too_large(self) -> HttpError:
        problem = f"the request line and the headers have more than {self._bounds.max_head_bytes} bytes"
        return HttpError(431, "headers_too_large", problem)

    def _arm(self, delay_s: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(delay_s, self._too_slow)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self._in_head:
            problem = f"the headers did not come within {self._bounds.head_timeout_s:g} s"
            self._refuse(HttpError(408, "request_timeout", problem))
        elif not self.transport.is_closing():
            self.transport.end()  # whatever was answered, was answered long ago

    def _may_be_sending(self) -> bool:
        """Whether the client may be sending the body of the request that is answered, or has sent more requests."""
        return (self._is_open_message and not self._in_head) or bool(self.pipeline)

    def _refuse(self, error: HttpError) -> None:
        """Answer instead of the application, and linger. If an answer has begun, only linger."""
        if self.transport.is_closing():
            return
        if self._answering is None or self._answering.response_complete:
            may_answer = self._in_head or not self._is_open_message
        else:
            may_answer = not self._answering.response_started
        if may_answer:
            self.transport.write(_response(error))
            self._leave_answer()
        self._disarm()
        self.transport.linger()


def _unframed(cycle: RequestResponseCycle, app: Application) -> Application:
    """The application for a client that speaks HTTP/1.0 and knows no chunks: the end of the connection ends a body of
    unknown length."""

    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_unframed(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unframed)

    return answer


def connections_within(bounds: ConnectionBounds) -> Callable[..., BoundedConnection]:
    """The factory of connections for uvicorn. It refuses more than the maximum that are not open yet: TLS handshakes
    take memory too."""
    # Start times. A failed handshake is not reported, but it has the time limit of a head.
    opening: dict[BoundedConnection, float] = {}
    lingering = Lingering(bounds.body_timeout_s)

    def make(*args: Any, **options: Any) -> BoundedConnection:
        while opening and next(iter(opening.values())) + bounds.head_timeout_s < time.monotonic():
            opening.pop(next(iter(opening)))
        if len(opening) >= bounds.max_connections:
            raise ConnectionRefusedError  # asyncio closes the socket
        return BoundedConnection(*args, bounds=bounds, opening=opening, lingering=lingering, **options)

    return make


def _response(error: HttpError) -> bytes:
    failure = failure_of(error)
    body = OPENAI_ERRORS.whole(failure)
    lines = [b"HTTP/1.1 %d %s" % (failure.status, HTTPStatus(failure.status).phrase.encode())]
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        *failure.headers,
    ]
    lines += [name + b": " + value for name, value in headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
