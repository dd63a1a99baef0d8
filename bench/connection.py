"""HTTP/1.1 to one server over connections that are kept: as little work for each piece of an answer as possible.

A received piece is stamped with the time before anything else happens to it. httptools parses heads and chunks; what
the body means is the listener's business.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from typing import Any, Protocol, cast

import httptools

from headrace.bench.target import Target

_MAX_BODY_BYTES = 64 << 20
_WATCH_S = 1.0
_CONTENT_TYPE = b"content-type"
_FRAMING = (b"content-length", b"transfer-encoding")
_LENGTHS = frozenset(map(len, (_CONTENT_TYPE, *_FRAMING)))


class Listener(Protocol):
    """Takes an answer as it arrives. Times are those of `time.perf_counter`."""

    def began(self, status: int, content_type: str) -> None:
        """The head has arrived."""

    def received(self, piece: bytes, now_s: float) -> None:
        """A piece of the body has arrived. Raises ValueError if it makes no sense; the connection is then closed."""


class ExchangeError(Exception):
    """An answer that did not come whole. `kind` is a word for counts of errors."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Body:
    """A listener that collects a short answer."""

    def __init__(self) -> None:
        self.status = 0
        self.content = bytearray()

    def began(self, status: int, content_type: str) -> None:
        """Keep the status."""
        self.status = status

    def received(self, piece: bytes, now_s: float) -> None:
        """Append a piece."""
        self.content += piece
        if len(self.content) > _MAX_BODY_BYTES:
            raise ValueError(f"the answer has more than {_MAX_BODY_BYTES} bytes")


class _Connection(asyncio.Protocol):
    """One connection; one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._listener: Listener | None = None
        self._done: asyncio.Future[None] | None = None
        self._now_s = 0.0
        self._content_type = ""
        self._has_length = False
        self._has_head = False
        self.is_open = False
        self.was_answered = False
        """Whether a byte of the present answer has arrived."""

    def start(self, request: bytes, listener: Listener) -> asyncio.Future[None]:
        """Send a request. The future ends with the answer, or with ExchangeError."""
        assert self._transport is not None
        self._listener = listener
        self._content_type = ""
        self._has_length = self._has_head = self.was_answered = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        """Close at once."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        self.was_answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            cause = error.__context__ or error
            self._fail("malformed", f"the answer is not valid: {str(cause)[:300]}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._has_head and not self._has_length and exc is None:
            self._succeed()
        else:
            self._fail("disconnected", "the server closed the connection before the end of the answer")

    # httptools' side

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) in _LENGTHS:
            lower = name.lower()
            if lower == _CONTENT_TYPE:
                self._content_type = value.decode("latin-1").lower()
            elif lower in _FRAMING:
                self._has_length = True

    def on_headers_complete(self) -> None:
        self._has_head = True
        if self._listener is not None:
            self._listener.began(self._parser.get_status_code(), self._content_type)

    def on_body(self, body: bytes) -> None:
        if self._listener is not None:
            self._listener.received(body, self._now_s)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.is_open = False
        self._succeed()

    def _succeed(self) -> None:
        self._listener = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, kind: str, message: str) -> None:
        self._listener = None
        if self._done is not None and not self._done.done():
            self._done.set_exception(ExchangeError(kind, message))


class Client:
    """Exchanges with one server, each over an idle connection or a new one. `timeout_s` bounds a whole exchange."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.target = target
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []
        self._address: tuple[str, int] | None = None
        self._deadlines_s: dict[asyncio.Future[None], float] = {}
        self._is_watching = False

    async def exchange(self, request: bytes, listener: Listener) -> None:
        """Send a request and hand its answer to `listener`. Raises ExchangeError."""
        while True:
            kept = self._kept()
            connection = kept or await self._connect()
            done = connection.start(request, listener)
            self._watch(done)
            is_whole = False
            try:
                await done
                is_whole = True
            except ExchangeError as error:
                # The server may close a kept connection just when it is used again.
                if kept is not None and error.kind == "disconnected" and not connection.was_answered:
                    continue
                raise
            finally:
                del self._deadlines_s[done]
                if is_whole and connection.is_open:
                    self._idle.append(connection)
                else:
                    connection.close()
            return

    async def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """A short call: its status and body. Raises ExchangeError."""
        answer = Body()
        await self.exchange(self.target.request(method, path, body), answer)
        return answer.status, bytes(answer.content)

    def close(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _watch(self, done: asyncio.Future[None]) -> None:
        """Fail an exchange soon after its time is over. One timer watches all: a timer of each would cost more."""
        loop = asyncio.get_running_loop()
        self._deadlines_s[done] = loop.time() + self._timeout_s
        if not self._is_watching:
            self._is_watching = True
            loop.call_later(min(_WATCH_S, self._timeout_s), self._expire)

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for done, deadline_s in self._deadlines_s.items():
            if deadline_s <= now_s and not done.done():
                done.set_exception(ExchangeError("timeout", f"no whole answer within {self._timeout_s:g} s"))
        self._is_watching = bool(self._deadlines_s)
        if self._is_watching:
            loop.call_later(min(_WATCH_S, self._timeout_s), self._expire)

    def _kept(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        target = self.target
        try:
            if self._address is None:
                found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
                host, port = found[0][4][:2]
                self._address = (str(host), int(port))
            name = target.host if target.tls is not None else None
            _, connection = await asyncio.wait_for(
                loop.create_connection(_Connection, *self._address, ssl=target.tls, server_hostname=name),
                self._timeout_s,
            )
        except ssl.SSLCertVerificationError as error:
            reason = error.verify_message.rstrip(".")
            message = f"its certificate is not accepted ({reason}); name its authority with --ca-file"
            raise ExchangeError("connect", message) from None
        except TimeoutError:
            raise ExchangeError("timeout", f"no connection within {self._timeout_s:g} s") from None
        except (OSError, ssl.SSLError) as error:
            raise ExchangeError("connect", f"cannot connect to {target.url}: {error}") from None
        return connection
