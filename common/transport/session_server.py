"""The server's side of sessions (see `sessions`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import DecodeError

from headrace.common.tasks import end_tasks
from headrace.common.transport import channels as transport
from headrace.common.transport import sessions
from headrace.common.transport.sessions import CallContext, Metadata, Turns
from headrace.common.transport.wire_request import HeldBytes, SharedPart, WireRequest
from headrace.protos.inference_pb2 import (
    BeginCall,
    CallEnd,
    CallPart,
    GenerateRequest,
    GenerateResponse,
    SessionRequest,
    SessionResponse,
)
from headrace.protos.status import DETAILS_KEY, Reason, StatusError, abort

# Maximum of open calls on one session, on all sessions of one host, and of one server; more are refused.
MAX_OPEN_CALLS = 4096
MAX_OPEN_CALLS_OF_HOST = 8192
MAX_OPEN_CALLS_OF_SERVER = 32_768
# Bytes of the requests of a server's open calls.
MAX_REQUEST_BYTES = 256 << 20
# Sessions of one host and of one server; more are refused, and their callers fall back to Generate.
MAX_SESSIONS_OF_HOST = 128
MAX_SESSIONS = 512
# Number of calls of one message that begin in one turn of the event loop: about a millisecond.
BEGUN_AT_ONCE = 16
# Maximum bytes of one message of an answer: gRPC's maximum, minus the overhead of a session's message.
MAX_RESPONSE_BYTES = transport.MAX_MESSAGE_BYTES - 4096

_Request = TypeVar("_Request")
Handler: TypeAlias = Callable[[WireRequest, CallContext], Awaitable[None]]
_LOG = logging.getLogger(__name__)


class SessionServer:
    """Serves sessions. Each call of a session runs `handler` in its own task."""

    def __init__(self, handler: Handler, max_request_bytes: float = MAX_REQUEST_BYTES) -> None:
        """`max_request_bytes` bounds the requests of open calls; infinity if the handler does that."""
        self.handler = handler
        self._max_request_bytes = max_request_bytes
        self.is_ending = False
        self.server_id = secrets.token_hex(8)
        self.held = HeldBytes()
        """Of open calls."""
        self.num_open_calls = 0
        self._sessions: set[_ServerSession] = set()
        self._num_sessions_of: Counter[str] = Counter()
        self._num_calls_of: Counter[str] = Counter()
        self._shared: WeakValueDictionary[bytes, SharedPart] = WeakValueDictionary()

    def method(self) -> grpc.RpcMethodHandler[Any, Any]:
        """The handler of the method Session, for a generic handler of the service."""
        return grpc.stream_stream_rpc_method_handler(
            self.serve,
            request_deserializer=SessionRequest.FromString,
            response_serializer=SessionResponse.SerializeToString,
        )

    @property
    def num_sessions(self) -> int:
        """Sessions that are open."""
        return len(self._sessions)

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes of answers that wait to be sent."""
        return sum(session.num_unsent_bytes for session in self._sessions)

    async def serve(self, requests: AsyncIterable[SessionRequest], context: Any) -> None:
        """Serve one session."""
        host = _host_of(context.peer())
        most = MAX_SESSIONS if len(self._sessions) >= MAX_SESSIONS else MAX_SESSIONS_OF_HOST
        if most == MAX_SESSIONS or self._num_sessions_of[host] >= most:
            problem = f"there are {most} sessions, the maximum of this server"
            await abort(context, StatusError(Reason.QUEUE_FULL, problem, retry_after_s=1.0))
        session = _ServerSession(self, context, host)
        self._sessions.add(session)
        self._num_sessions_of[host] += 1
        try:
            await session.run(requests)
        finally:
            self._sessions.discard(session)
            _subtract(self._num_sessions_of, host)

    def begin(self, host: str, num_on_session: int, request: WireRequest) -> StatusError | None:
        """Count a call that begins on a session of `host`. Returns the reason of a refusal if there are too many."""
        if num_on_session >= MAX_OPEN_CALLS:
            problem = f"there are {MAX_OPEN_CALLS} calls on one session, its maximum"
        elif self._num_calls_of[host] >= MAX_OPEN_CALLS_OF_HOST:
            problem = f"{MAX_OPEN_CALLS_OF_HOST} calls come from one host, the maximum of this server"
        elif self.num_open_calls >= MAX_OPEN_CALLS_OF_SERVER:
            problem = f"there are {MAX_OPEN_CALLS_OF_SERVER} calls, the maximum of this server"
        elif self.held.total and self.held.total + self.held.added_by(request) > self._max_request_bytes:
            problem = f"the requests in flight have {self._max_request_bytes} bytes, the maximum of this server"
        else:
            self._num_calls_of[host] += 1
            self.num_open_calls += 1
            self.held.hold(request)
            return None
        return StatusError(Reason.QUEUE_FULL, problem, retry_after_s=1.0)

    def shared_part(self, raw: bytes) -> SharedPart:
        """The part with these bytes. A caller sends it with each message that begins calls with it. While any of these
        calls is open, they share one object."""
        part = self._shared.get(raw)
        if part is None:
            part = self._shared[raw] = SharedPart(raw)
        return part

    def ended(self, host: str, request: WireRequest) -> None:
        """Stop counting a call of `host`, which has ended."""
        _subtract(self._num_calls_of, host)
        self.num_open_calls -= 1
        self.held.release(request)

    def end_when_idle(self) -> None:
        """End each session when no call is open on it, so that a stopping server waits only for calls."""
        self.is_ending = True
        for session in self._sessions:
            session.end_if_idle()


def whole(wire: WireRequest) -> GenerateRequest:
    """Decode a request with all of its parts. DecodeError if it is not a message."""
    return GenerateRequest.FromString(wire.joined())


def handler_of(
    generate: Callable[[_Request, CallContext], AsyncGenerator[GenerateResponse, None]],
    read: Callable[[WireRequest], _Request],
) -> Handler:
    """A handler that uses messages instead of bytes; `read` decodes a request. INVALID_FIELD for bytes that are not a
    request."""

    async def handle(wire: WireRequest, context: CallContext) -> None:
        try:
            request = read(wire)
        except DecodeError:
            problem = "the request of the call is not a GenerateRequest of headrace.v1"
            await abort(context, StatusError(Reason.INVALID_FIELD, problem, field="request"))
        async with contextlib.aclosing(generate(request, context)) as responses:
            async for response in responses:
                await context.write(response.SerializeToString())

    return handle


def _host_of(peer: str) -> str:
    """The host of a peer as gRPC names it (ipv4:10.0.0.7:41234); all peers of a unix socket are one host."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


def _subtract(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


class _ServerSession:
    def __init__(self, server: SessionServer, context: Any, host: str) -> None:
        self._server = server
        self._context = context
        self._host = host
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.turns = Turns(self._send)
        self._idle = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._has_begun = False
        self._has_named = False

    async def run(self, requests: AsyncIterable[SessionRequest]) -> None:
        """Serve until the caller disconnects, or until the server stops and no call is open."""
        self.end_if_idle()
        self.turns.put(None, 0)
        self._arm()
        parts = [asyncio.create_task(part) for part in (self._read(requests), self.turns.run(), self._idle.wait())]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            if parts[0].done() and (problem := parts[0].exception()) is not None:
                _LOG.error("a session broke: %r", problem)
            if self._idle.is_set():
                await self.turns.flush()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            tasks = [*parts, *self._tasks.values()]
            await end_tasks(*tasks)

    def end_if_idle(self) -> None:
        """See `SessionServer.end_when_idle`."""
        if self._server.is_ending and not self._tasks:
            self._idle.set()

    def put(self, part: CallPart, num_bytes: int) -> None:
        """Send a part soon."""
        self.turns.put(part, num_bytes)

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes of answers that wait to be sent."""
        return self.turns.num_bytes

    async def _read(self, requests: AsyncIterable[SessionRequest]) -> None:
        async for message in requests:
            await self._begin_all(message)
            for call_id in message.cancelled_call_ids:
                task = self._tasks.get(call_id)
                if task is not None:
                    task.cancel()

    async def _begin_all(self, message: SessionRequest) -> None:
        """Begin the calls of a message, a few in each turn of the event loop."""
        shared = [self._server.shared_part(raw) for raw in message.shared]
        for number, begin in enumerate(message.begins):
            if number and number % BEGUN_AT_ONCE == 0:
                await asyncio.sleep(0)
            self._begin(begin, shared)

    def _begin(self, begin: BeginCall, shared: Sequence[SharedPart]) -> None:
        if begin.call_id in self._tasks:
            raise ValueError(f"the call id {begin.call_id} is in use")
        if any(position >= len(shared) for position in begin.shared):
            raise ValueError(f"the call {begin.call_id} names a shared part that its message does not have")
        wire = WireRequest(begin.request, tuple(shared[i] for i in begin.shared))
        self._has_begun = True
        refusal = self._server.begin(self._host, len(self._tasks), wire)
        if refusal is not None:
            self.put(CallPart(call_id=begin.call_id, end=_end_of(refusal)), 0)
            return
        if self._timer is None:
            self._arm()
        context = _ServerContext(self, begin, wire)
        task = self._tasks[begin.call_id] = asyncio.create_task(self._serve(wire, context))
        task.add_done_callback(lambda _: self._ended(context))
        context.arm(task)

    def _ended(self, context: _ServerContext) -> None:
        # Not within the task, because a task that is cancelled in the turn of its creation never runs.
        context.disarm()
        del self._tasks[context.call_id]
        self._server.ended(self._host, context.request)
        self.end_if_idle()

    async def _serve(self, request: WireRequest, context: _ServerContext) -> None:
        end = CallEnd()
        try:
            await self._server.handler(request, context)
        except _AbortedError as aborted:
            end = aborted.end
        except asyncio.CancelledError:
            late = context.is_late
            code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
            end = CallEnd(code=code.value[0], message="Deadline Exceeded" if late else "cancelled")
        except Exception as error:
            _LOG.exception("a call of a session failed")
            end = CallEnd(code=grpc.StatusCode.UNKNOWN.value[0], message=f"Unexpected {type(error).__name__}")
        self.put(CallPart(call_id=context.call_id, end=end), 0)

    def _arm(self) -> None:
        # Check twice per promised interval: a message right after one check may be the last one for two checks.
        self._timer = asyncio.get_running_loop().call_later(sessions.HEARTBEAT_MS / 2000, self._beat)

    def _beat(self) -> None:
        """Send a heartbeat if nothing was sent, while calls are open. Also before the first call: its request may be
        large and on its way, and the caller listens meanwhile."""
        self._timer = None
        if not self._tasks and self._has_begun:
            return
        if not self.turns.has_sent and self.turns.is_empty:
            self.turns.put(None, 0)
        self.turns.has_sent = False
        self._arm()

    async def _send(self, items: list[CallPart | None]) -> None:
        parts = [part for part in items if part is not None]
        response = SessionResponse(parts=parts, heartbeat_ms=sessions.HEARTBEAT_MS)
        if not self._has_named:
            response.server_id = self._server.server_id
            self._has_named = True
        await self._context.write(response)


def _end_of(error: StatusError) -> CallEnd:
    return CallEnd(
        code=error.row.grpc_code.value[0], message=error.message, details=error.to_status().SerializeToString()
    )


class _AbortedError(Exception):
    """A handler ended its call."""

    def __init__(self, end: CallEnd) -> None:
        super().__init__(end.message)
        self.end = end


class _ServerContext:
    """A `CallContext` of a session."""

    __slots__ = ("_deadline_s", "_metadata", "_session", "_timer", "call_id", "is_late", "request")

    def __init__(self, session: _ServerSession, begin: BeginCall, request: WireRequest) -> None:
        self.call_id = begin.call_id
        self.request = request
        self.is_late = False
        self._session = session
        self._metadata = tuple(begin.metadata.items())
        self._deadline_s = time.monotonic() + begin.timeout_ms / 1000 if begin.HasField("timeout_ms") else None
        self._timer: asyncio.TimerHandle | None = None

    def arm(self, task: asyncio.Task[None]) -> None:
        """Cancel the call's task at its deadline."""
        left_s = self.time_remaining()
        if left_s is not None:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._expire, task)

    def disarm(self) -> None:
        """Stop the timer of the deadline, because the call has ended."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self, task: asyncio.Task[None]) -> None:
        self.is_late = True
        task.cancel()

    def invocation_metadata(self) -> Metadata:
        """See `CallContext`."""
        return self._metadata

    def time_remaining(self) -> float | None:
        """See `CallContext`."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    async def write(self, message: bytes) -> None:
        """See `CallContext`."""
        if len(message) > MAX_RESPONSE_BYTES:
            problem = (
                f"a message of the answer has {len(message)} bytes, more than the {MAX_RESPONSE_BYTES} that one may "
                "have; ask for less in it, such as fewer log-probabilities of the prompt"
            )
            await abort(self, StatusError(Reason.INVALID_FIELD, problem))
        turns = self._session.turns
        turns.put(CallPart(call_id=self.call_id, response=message), len(message))
        if not turns.has_room:
            await turns.room()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """See `CallContext`."""
        end = CallEnd(code=code.value[0], message=details)
        for key, value in trailing_metadata:
            if key == DETAILS_KEY and isinstance(value, bytes):
                end.details = value
        raise _AbortedError(end)
