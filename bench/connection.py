"""HTTP/1.1 to one server over connections that are kept: as little work for each piece of an answer as possible.

A received piece is stamped with the time before anything else happens to it. In the middle of a stream it is then kept,
and read with later ones: between two pieces, other programs fill the caches of the CPU, so pieces take longer one by
one. httptools parses heads and chunks; what the body means is the listener's business. A request has no task and no
future of its own, which would take longer than all else that is done for it.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, cast

import httptools

from headrace.bench.target import Target

_MAX_BODY_BYTES = 64 << 20
_WATCH_S = 1.0
_CONTENT_TYPE, _CONTENT_LENGTH, _TRANSFER_ENCODING = b"content-type", b"content-length", b"transfer-encoding"
_LENGTHS = frozenset(map(len, (_CONTENT_TYPE, _CONTENT_LENGTH, _TRANSFER_ENCODING)))
# How a chunk ends that holds an event. A message in chunks ends with \r\n\r\n, so it cannot end like this.
_CHUNK_ENDS = (b"\n\n\r\n", b"}\n\r\n")
_LAST_CHUNK = b"\r\n0\r\n\r\n"
# Answers that are kept at most.
_MAX_ARRIVED = 8
# Pieces that are kept at most. Reading them takes some 40 us, for which other streams wait.
_MAX_UNREAD = 16


_now = time.perf_counter


def _is_head_of_chunks(data: bytes) -> bool:
    """Whether the first piece of an answer is its head, without any of the chunks that follow it."""
    return (
        data.startswith(b"HTTP/1.1 200 ")
        and data.find(b"\r\n\r\n") == len(data) - 4
        and b"\r\ntransfer-encoding: chunked\r\n" in (lower := data.lower())
        and b"\r\nconnection: close\r\n" not in lower
    )


class Listener(Protocol):
    """Takes an answer as it arrives. Times are those of `time.perf_counter`."""

    def began(self, status: int, content_type: str) -> None:
        """The head has arrived."""

    def received(self, piece: bytes, now_s: float) -> None:
        """A piece of the body arrived at `now_s`, which may be up to a second ago. Raises ValueError if it makes no
        sense; the connection is then closed."""

    def ended(self, error: ExchangeError | None) -> None:
        """The answer is whole, or will not be for this reason. Nothing comes after it."""


class ExchangeError(Exception):
    """An answer that did not come whole. `kind` is a word for counts of errors."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Body:
    """A listener that collects a short answer."""

    def __init__(self) -> None:
        self.status = 0
        self.content = bytearray()
        self.whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def began(self, status: int, content_type: str) -> None:
        """Keep the status."""
        self.status = status

    def received(self, piece: bytes, now_s: float) -> None:
        """Append a piece."""
        self.content += piece
        if len(self.content) > _MAX_BODY_BYTES:
            raise ValueError(f"the answer has more than {_MAX_BODY_BYTES} bytes")

    def ended(self, error: ExchangeError | None) -> None:
        """Tell it to who waits."""
        if self.whole.done():
            return
        if error is None:
            self.whole.set_result(None)
        else:
            self.whole.set_exception(error)


class Exchange:
    """A request, until its answer has ended."""

    __slots__ = ("_drop", "connecting", "connection", "deadline_s", "has_arrived", "listener", "may_wait", "request")

    def __init__(
        self,
        request: bytes,
        listener: Listener,
        may_wait: bool,
        deadline_s: float,
        drop: Callable[[Exchange], None],
    ) -> None:
        self.request = request
        self.listener = listener
        self.may_wait = may_wait
        """Whether its listener may be told of the end later."""
        self.has_arrived = False
        """Whether its answer is there, and is read later."""
        self.deadline_s = deadline_s
        self.connection: _Connection | None = None
        """None while there is none yet, and after the end."""
        self.connecting: asyncio.Task[None] | None = None
        """What makes a connection for it."""
        self._drop = drop

    def cancel(self) -> None:
        """Close its connection, if its answer has not arrived. Does nothing after the end."""
        self._drop(self)


class _Connections(Protocol):
    """What connections tell."""

    def arrived(self, connection: _Connection, exchange: Exchange) -> None:
        """An answer is there. It is not read before `read` of the connection."""

    def over(self, connection: _Connection, exchange: Exchange, error: ExchangeError | None) -> None:
        """An exchange has ended."""


class _Connection(asyncio.Protocol):
    """One connection. It sends a request when the answer to the one before has arrived, if not read."""

    __slots__ = (
        *("_client", "_content_type", "_exchanges", "_has_head", "_has_length", "_is_chunked", "_is_first", "_may_end"),
        *("_may_wait", "_now_s", "_parser", "_transport", "_unread", "_whole", "is_free", "is_open", "may_be_stale"),
    )

    def __init__(self, client: _Connections) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._exchanges: deque[Exchange] = deque()
        """Those whose answers have not been read to the end; the last one is under way, or has arrived too."""
        self._whole: list[Exchange] = []
        """Those whose answers have just been read to the end."""
        self._unread: list[tuple[float, bytes]] = []
        """What has arrived, with its times."""
        # Of what arrives:
        self._is_first = False
        """Whether nothing of the answer has arrived."""
        self._may_wait = False
        """Whether its pieces need not be read at once."""
        self._may_end = False
        """Nor its end."""
        # Of the answer that is read:
        self._now_s = 0.0
        self._content_type = ""
        self._has_length = False
        self._has_head = False
        self._is_chunked = False
        self.is_open = False
        self.is_free = True
        """Whether it may send a request."""
        self.may_be_stale = False
        """Whether the server may have closed it before the request: it was kept, and nothing has arrived since."""

    def start(self, exchange: Exchange, is_kept: bool) -> None:
        """Send a request. `is_kept`: not the first one."""
        assert self._transport is not None
        exchange.connection = self
        self._exchanges.append(exchange)
        self._is_first = True
        self._may_wait = self._may_end = self.is_free = False
        self.may_be_stale = is_kept
        self._transport.write(exchange.request)

    def fail(self, error: ExchangeError) -> None:
        """End what is under way, and close."""
        failed = list(self._exchanges)
        self.close()
        for exchange in failed:
            self._client.over(self, exchange, error)

    def close(self) -> None:
        """Close at once. Exchanges do not learn of it."""
        self.is_open = False
        self._exchanges.clear()
        self._unread.clear()
        if self._transport is not None:
            self._transport.abort()

    def read(self) -> None:
        """Read what has arrived."""
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        feed = self._parser.feed_data
        problem: ExchangeError | None = None
        try:
            for now_s, piece in unread:
                self._now_s = now_s
                feed(piece)
        except httptools.HttpParserUpgrade:
            problem = ExchangeError("malformed", "the server changes to another protocol, for which it was not asked")
        except httptools.HttpParserError as error:
            cause = error.__context__ or error
            problem = ExchangeError("malformed", f"the answer is not valid: {str(cause)[:300]}")
        if not self._exchanges:
            self._may_wait = False
        whole, self._whole = self._whole, []
        for exchange in whole:
            self._client.over(self, exchange, None)
        if problem is not None:
            self.fail(problem)

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        unread = self._unread
        unread.append((_now(), data))
        self.may_be_stale = False
        if self._may_wait:
            if len(unread) < _MAX_UNREAD:
                if data.endswith(_CHUNK_ENDS):
                    return
                if self._may_end and data.endswith(_LAST_CHUNK):
                    self._may_wait = False
                    self._client.arrived(self, self._exchanges[-1])
                    return
        elif self._is_first and _is_head_of_chunks(data):
            self._is_first = False
            self._may_wait = True
            self._may_end = self._exchanges[-1].may_wait
            return
        self._is_first = False
        self.read()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self.read()
        if self._has_head and not self._has_length and exc is None and self._exchanges:
            self._client.over(self, self._exchanges.popleft(), None)
        elif self._exchanges:
            self.fail(ExchangeError("disconnected", "the server closed the connection before the end of the answer"))

    # httptools' side

    def on_message_begin(self) -> None:
        self._content_type = ""
        self._has_length = self._has_head = self._is_chunked = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(name) in _LENGTHS:
            lower = name.lower()
            if lower == _CONTENT_TYPE:
                self._content_type = value.decode("latin-1").lower()
            elif lower == _CONTENT_LENGTH:
                self._has_length = True
            elif lower == _TRANSFER_ENCODING:
                self._has_length = True
                self._is_chunked = value.lower().endswith(b"chunked")

    def on_headers_complete(self) -> None:
        if self._is_interim():
            return
        self._has_head = True
        if not self.is_free:
            self._may_wait = self._is_chunked
        if self._exchanges:
            self._exchanges[0].listener.began(self._parser.get_status_code(), self._content_type)

    def on_body(self, body: bytes) -> None:
        if self._exchanges:
            self._exchanges[0].listener.received(body, self._now_s)

    def on_message_complete(self) -> None:
        if self._is_interim():
            return
        if not self._parser.should_keep_alive():
            self.is_open = False
        if self._exchanges:
            self._whole.append(self._exchanges.popleft())

    def _is_interim(self) -> bool:
        """Whether this is a message before the answer, such as 103 Early Hints: a head alone."""
        return bool(self._parser.get_status_code() < 200)


class Client:
    """Exchanges with one server, each over an idle connection or a new one. `timeout_s` bounds a whole exchange."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self.target = target
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []
        self._address: tuple[str, int] | None = None
        self._open: set[Exchange] = set()
        self._num_arrived = 0
        """Exchanges of these whose answers are there."""
        self._arrivals: list[_Connection] = []
        """Their connections."""
        self._is_watching = False

    def start(self, request: bytes, listener: Listener, may_wait: bool = False) -> Exchange:
        """Send a request, at once if a connection is idle. Its answer and its end go to `listener`, later.

        `may_wait`: nothing waits for the end of the answer, which is told up to a second later, with others.
        """
        loop = asyncio.get_running_loop()
        exchange = Exchange(request, listener, may_wait, loop.time() + self._timeout_s, self._drop)
        self._open.add(exchange)
        if not self._is_watching:  # one timer watches all: a timer of each would cost more
            self._is_watching = True
            loop.call_later(min(_WATCH_S, self._timeout_s), self._watch)
        self._send(exchange)
        return exchange

    async def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """A short call: its status and body. Raises ExchangeError."""
        answer = _Body()
        exchange = self.start(self.target.request(method, path, body), answer)
        try:
            await answer.whole
        finally:
            exchange.cancel()
        return answer.status, bytes(answer.content)

    def read(self) -> None:
        """Read all that has arrived."""
        for exchange in list(self._open):
            if exchange.connection is not None:
                exchange.connection.read()

    def close(self) -> None:
        """Close all connections."""
        for exchange in list(self._open):
            exchange.cancel()
        while self._idle:
            self._idle.pop().close()

    def arrived(self, connection: _Connection, exchange: Exchange) -> None:
        """An answer of a connection is there."""
        exchange.has_arrived = connection.is_free = True
        self._idle.append(connection)
        self._arrivals.append(connection)
        self._num_arrived += 1
        if self._num_arrived >= _MAX_ARRIVED or self._num_arrived == len(self._open):
            self._read_arrivals()

    def over(self, connection: _Connection, exchange: Exchange, error: ExchangeError | None) -> None:
        """An exchange of a connection has ended."""
        exchange.connection = None
        if exchange.has_arrived:
            self._num_arrived -= 1
        elif connection.is_open:
            connection.is_free = True
            self._idle.append(connection)
        else:
            connection.close()
        if error is not None and error.kind == "disconnected" and connection.may_be_stale and not exchange.has_arrived:
            self._send(exchange)  # the server may close a kept connection just when it is used again
            return
        self._open.discard(exchange)
        exchange.listener.ended(error)
        if self._num_arrived and self._num_arrived == len(self._open):
            self._read_arrivals()

    def _read_arrivals(self) -> None:
        arrivals, self._arrivals = self._arrivals, []
        for connection in arrivals:
            connection.read()

    def _send(self, exchange: Exchange) -> None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                connection.start(exchange, is_kept=True)
                return
            connection.close()
        exchange.connecting = asyncio.get_running_loop().create_task(self._connect_for(exchange))

    def _drop(self, exchange: Exchange) -> None:
        connection = exchange.connection
        if connection is not None:
            connection.read()  # answers to requests before
        self._open.discard(exchange)
        connection, exchange.connection = exchange.connection, None
        if connection is not None:
            connection.close()
        if exchange.connecting is not None:
            exchange.connecting.cancel()

    def _watch(self) -> None:
        """Read what waits to be read, and fail exchanges whose time is over."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self.read()
        for exchange in list(self._open):
            if exchange.connection is not None and exchange.deadline_s <= now_s:
                exchange.connection.fail(ExchangeError("timeout", f"no whole answer within {self._timeout_s:g} s"))
        self._is_watching = bool(self._open)
        if self._is_watching:
            loop.call_later(min(_WATCH_S, self._timeout_s), self._watch)

    async def _connect_for(self, exchange: Exchange) -> None:
        try:
            connection = await self._connect()
        except Exception as error:  # whatever it is, the exchange must not stay open
            exchange.connecting = None
            self._open.discard(exchange)
            if not isinstance(error, ExchangeError):
                error = ExchangeError("connect", f"cannot connect to {self.target.url}: {error!r}")
            exchange.listener.ended(error)
        else:
            exchange.connecting = None
            if exchange not in self._open:  # cancelled just now
                connection.close()
                return
            connection.start(exchange, is_kept=False)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        target = self.target
        try:
            if self._address is None:
                found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
                host, port = found[0][4][:2]
                self._address = (str(host), int(port))
            name = target.host if target.tls is not None else None
            made = functools.partial(_Connection, self)
            _, connection = await asyncio.wait_for(
                loop.create_connection(made, *self._address, ssl=target.tls, server_hostname=name),
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
