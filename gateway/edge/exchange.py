"""One HTTP request and its response, on the bare ASGI messages.

It has what all endpoints need: the request's id, the bounded body, errors, server-sent events with keep-alive comments,
and cancellation of the endpoint when the client disconnects or the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.common.telemetry.logs import request_id_var
from headrace.gateway.access.admission import Authorization
from headrace.gateway.access.caller import Caller, authorization_var, deadline_var
from headrace.gateway.edge.failures import ErrorShape, Headers, HttpError, failure_of
from headrace.gateway.hints import Hints, hints_var
from headrace.protos.status import Reason, StatusError

MAX_BODY_BYTES = 32 * 1024 * 1024
KEEP_ALIVE_S = 15.0
TIMEOUT_HEADER = "x-request-timeout"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
COMMENT = b": keep-alive\n\n"
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_SECONDS = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}[\x21-\x7e]{0,64}")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass(slots=True)
class Bodies:
    """Bounds of request bodies: the size of each, the size of all together, and the time for one to arrive; and the
    bytes that all requests hold now. For one event loop."""

    max_bytes: int = MAX_BODY_BYTES
    timeout_s: float = 60.0
    max_total_bytes: int = 1024 * 1024 * 1024
    num_bytes: int = 0

    def take(self, num_bytes: int) -> None:
        """Count bytes that are kept until `give_back`. Raises StatusError (QUEUE_FULL)."""
        if self.num_bytes + num_bytes > self.max_total_bytes:
            problem = f"the requests at the gateway have {self.max_total_bytes} bytes in their bodies, the maximum"
            raise StatusError(Reason.QUEUE_FULL, problem, retry_after_s=1.0)
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Note that the bytes are no longer kept."""
        self.num_bytes -= num_bytes


class Exchange:
    """A request being answered by the current task."""

    def __init__(
        self,
        scope: Message,
        receive: Receive,
        send: Send,
        errors: ErrorShape,
        bodies: Bodies | None = None,
        early_headers_s: float | None = None,
        *,
        request_id_header: bytes = b"",
    ) -> None:
        """After `early_headers_s`, the response to a streaming request begins even if there is no event yet. Its
        status is then 200, and later errors are events. None: never. The response has the request's id in
        `request_id_header`, if there is one, besides x-request-id."""
        self._request_id_headers = [b"x-request-id", *([request_id_header] if request_id_header else [])]
        self._early_headers_s = early_headers_s
        self._bodies = Bodies() if bodies is None else bodies
        self._num_body_bytes = 0
        self.errors = errors
        """The format of errors. A stream that has begun may have another format."""
        self.scope = scope
        self._receive = receive
        self._send = send
        self._task = asyncio.current_task()
        self._watch: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._started = False
        self._ended = False
        self._failing = False  # the error is being sent; only the end of the connection interrupts that
        self._last_write_s = 0.0
        self._headers = headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")
        traceparent = headers.get(b"traceparent", b"")
        self.caller = Caller(
            request_id.decode() if _REQUEST_ID.fullmatch(request_id) else f"req_{secrets.token_hex(16)}",
            traceparent.decode() if _TRACEPARENT.fullmatch(traceparent) else "",
            time.monotonic(),
        )
        self._hints = Hints()
        hints_var.set(self._hints)
        self.owner = ""
        """The tenant of the request's key, who owns what the request stores. Empty without keys."""
        self.status = 0
        """Of the response, once it has begun."""
        self.keep_alive_event = COMMENT
        """The event that keeps an idle stream alive."""
        self.stream_type = EVENT_STREAM
        """The content type of a stream."""
        self.disconnected = False
        """Whether the client has disconnected, which cancels the task."""
        self.interrupted = False
        """Whether the server stops, which cancels the task."""

    def name_request(self, request_id: str | None) -> None:
        """Take the request's id from its body, if it is there and the header x-request-id has none. Raises
        `StatusError`."""
        if request_id is None:
            return
        if not (request_id.isascii() and _REQUEST_ID.fullmatch(request_id.encode())):
            problem = "request_id must have 1 to 128 printable ASCII characters without spaces"
            raise StatusError(Reason.INVALID_FIELD, problem, field="request_id")
        if not _REQUEST_ID.fullmatch(self._headers.get(b"x-request-id", b"")):
            self.caller = replace(self.caller, request_id=request_id)
            request_id_var.set(request_id)

    def header(self, name: str) -> str:
        """A header of the request, by its name in lower case; empty if there is none."""
        found: bytes = self._headers.get(name.encode(), b"")
        return found.decode("latin-1")

    @property
    def has_certificate(self) -> bool:
        """Whether the client has shown a certificate that was accepted."""
        return bool(self.scope.get("extensions", {}).get("tls", {}).get("client_cert_chain"))

    def timeout_s(self) -> float | None:
        """The client's time limit for the answer in seconds; None if it has none. Raises `StatusError`."""
        text = self.header(TIMEOUT_HEADER)
        if not text:
            return None
        seconds = float(text) if _SECONDS.fullmatch(text) else math.nan
        if not 0 < seconds < math.inf:
            problem = f"{TIMEOUT_HEADER} must be a number of seconds greater than 0, such as 30 or 2.5"
            raise StatusError(Reason.INVALID_FIELD, problem, field=TIMEOUT_HEADER)
        return seconds

    def enter(self, authorization: Authorization | None, timeout_s: float | None = None) -> None:
        """Note that the request is authorized, with a key or without one; `timeout_s` counts from its arrival."""
        if timeout_s is not None:
            self.caller = replace(self.caller, deadline_s=self.caller.arrived_s + timeout_s)
            deadline_var.set(self.caller.deadline_s)
        if authorization is not None:
            self.caller = replace(self.caller, authorization=authorization)
            authorization_var.set(authorization)
            self.owner = authorization.key.tenant

    async def body(self) -> bytes:
        """Read the whole body. From then on, the task is cancelled when the client disconnects.

        Raises `HttpError` (413, 408, 415), or `StatusError` when all bodies together are too large.
        """
        timeout = asyncio.timeout(self._bodies.timeout_s)
        try:
            async with timeout:
                body = await self._read_body()
        except TimeoutError:
            if not timeout.expired():
                raise
            raise self._too_late("the body") from None
        self._check_encoding()
        self._watch = asyncio.create_task(self._watch_for_disconnect())
        return body

    async def body_pieces(self, max_bytes: int, too_large: HttpError) -> AsyncIterator[bytes]:
        """The body of an upload as it arrives, at most `max_bytes`; nothing of it is kept. It has the time of a body
        for each `Bodies.max_bytes` of it. Raises `HttpError`: `too_large`, 408, 415."""
        self._check_encoding()
        num_bytes = num_in_time = 0
        until_s = time.monotonic() + self._bodies.timeout_s
        more = True
        while more:
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + until_s - time.monotonic()):
                    piece, more = await self._receive_piece()
            except TimeoutError:
                raise self._too_late(f"{self._bodies.max_bytes} bytes of the body") from None
            num_bytes += len(piece)
            num_in_time += len(piece)
            if num_in_time >= self._bodies.max_bytes:
                num_in_time, until_s = 0, time.monotonic() + self._bodies.timeout_s
            if num_bytes > max_bytes:
                raise too_large
            yield piece

    async def _read_body(self) -> bytes:
        parts: list[bytes] = []
        most = self._bodies.max_bytes
        more = True
        if int(self.header("content-length") or 0) > most:
            raise self._too_large()
        while more:
            part, more = await self._receive_piece()
            if self._num_body_bytes + len(part) > most:
                raise self._too_large()
            self._bodies.take(len(part))
            self._num_body_bytes += len(part)
            parts.append(part)
        return b"".join(parts)

    async def _receive_piece(self) -> tuple[bytes, bool]:
        """The next piece of the body, and whether more follows."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.disconnected = True
            raise asyncio.CancelledError
        return message.get("body", b""), message.get("more_body", False)

    def _check_encoding(self) -> None:
        encoding = self.header("content-encoding")
        if encoding.lower() not in ("", "identity", "utf-8", "utf8"):  # some clients name the charset here
            problem = f"the body has the content-encoding {encoding[:32]!r}; send it uncompressed"
            raise HttpError(415, "encoding_not_supported", problem, param="content-encoding")

    def _too_late(self, what: str) -> HttpError:
        message = f"{what} did not come within {self._bodies.timeout_s:g} s"
        return HttpError(408, "request_timeout", message, [(b"connection", b"close")])

    def _too_large(self) -> HttpError:
        most = self._bodies.max_bytes
        message = f"the body is larger than {most} bytes: send less, or have --max-body-mb of the gateway raised"
        return HttpError(413, "body_too_large", message, [(b"connection", b"close")])

    async def _watch_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._ended:
            self.disconnected = True
            self._cancel()

    def interrupt(self) -> None:
        """Cancel the endpoint because the server stops, and send the client an error that says so."""
        if not self._ended and not self.disconnected:
            self.interrupted = True
            self._cancel()

    def _cancel(self) -> None:
        if self._task is not None and not self._failing:
            self._task.cancel()

    async def close(self) -> None:
        """End the tasks that accompany the request."""
        self._ended = True
        self._bodies.give_back(self._num_body_bytes)
        self._num_body_bytes = 0
        if self._watch is not None:
            self._watch.cancel()

    # --- whole responses --------------------------------------------------------------------------------------------

    async def respond(
        self,
        body: bytes,
        *,
        status: int = 200,
        content_type: bytes = b"application/json",
        headers: Headers | None = None,
    ) -> None:
        """Send the whole response."""
        assert not self._started, "there is a response already"
        self.status = status
        start = [
            (b"content-type", content_type),
            # In a 304, this would be the length of a body that is not sent.
            *([] if status == 304 else [(b"content-length", b"%d" % len(body))]),
            *self._names(),
            *(headers or ()),
        ]
        # It may wait for a slow reader of the previous response. If that wait is interrupted, there is no response yet.
        await self._send({"type": "http.response.start", "status": status, "headers": start})
        self._started = self._ended = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _names(self) -> Headers:
        """The headers with the request's id, the state of its key's limits, and the hints."""
        request_id = self.caller.request_id.encode()
        authorization = self.caller.authorization
        return [
            *((name, request_id) for name in self._request_id_headers),
            *(() if authorization is None else authorization.headers()),
            *self._hints.headers(),
        ]

    async def fail(self, error: StatusError | HttpError) -> None:
        """Send an error: as the response, or as the last event if a stream has begun."""
        self._failing = True
        failure = failure_of(error)
        if self._started:
            await self.write(self.errors.event(failure), last=True)
        else:
            status = self.errors.status(failure)
            await self.respond(self.errors.whole(failure), status=status, headers=failure.headers)

    # --- streams ------------------------------------------------------------------------------------------------------

    async def write(self, events: bytes, *, last: bool = False) -> None:
        """Send events at once. The first events begin the response; nothing may be written after the last ones."""
        async with self._lock:
            if self._ended:
                return
            if not self._started:
                self.status = 200
                headers = [
                    (b"content-type", self.stream_type),
                    (b"cache-control", b"no-cache"),
                    (b"x-accel-buffering", b"no"),
                    *self._names(),
                ]
                await self._send({"type": "http.response.start", "status": 200, "headers": headers})
                self._started = True
            self._last_write_s = time.monotonic()
            self._ended = last
            await self._send({"type": "http.response.body", "body": events, "more_body": not last})

    async def keep_alive(self, begun: asyncio.Event | None = None) -> None:
        """Run until cancelled: send `keep_alive_event` whenever nothing was written for `KEEP_ALIVE_S`.

        The first event begins the response, after which an error can no longer be an HTTP status. So wait for `begun`,
        if given.
        """
        self._last_write_s = time.monotonic()
        if begun is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._early_headers_s):
                    await begun.wait()
            if not begun.is_set():
                await self.write(self.keep_alive_event)
        while True:
            idle_s = time.monotonic() - self._last_write_s
            if idle_s >= KEEP_ALIVE_S:
                await self.write(self.keep_alive_event)
                idle_s = 0.0
            await asyncio.sleep(KEEP_ALIVE_S - idle_s)
