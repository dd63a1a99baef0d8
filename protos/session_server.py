"""The server's end of sessions (see `sessions`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from headrace.protos import sessions
from headrace.protos.inference_pb2 import (
    BeginCall,
    CallEnd,
    CallPart,
    GenerateRequest,
    GenerateResponse,
    SessionRequest,
    SessionResponse,
)
from headrace.protos.sessions import DETAILS_KEY, CallContext, Metadata, Turns
from headrace.protos.status import Reason, StatusError, abort

# Bytes of parts in one message.
MAX_MESSAGE_BYTES = 1 << 20
# Calls that are open on one session at a time, and sessions of one server; more are refused.
MAX_OPEN_CALLS = 16_384
MAX_SESSIONS = 512

Handler: TypeAlias = Callable[[bytes, CallContext], Awaitable[None]]
_LOG = logging.getLogger(__name__)


class SessionServer:
    """Serves sessions: each call of one is handed to `handler`, in a task of its own."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.is_ending = False
        self._sessions: set[_ServerSession] = set()

    def method(self) -> grpc.RpcMethodHandler[Any, Any]:
        """For a generic handler of the service."""
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
        if len(self._sessions) >= MAX_SESSIONS:
            problem = f"there are {MAX_SESSIONS} sessions, as many as this server takes"
            await abort(context, StatusError(Reason.QUEUE_FULL, problem, retry_after_s=1.0))
        session = _ServerSession(self, context)
        self._sessions.add(session)
        try:
            await session.run(requests)
        finally:
            self._sessions.discard(session)

    def end_when_idle(self) -> None:
        """End each session when no call is open on it, so that a server that stops waits for calls alone."""
        self.is_ending = True
        for session in self._sessions:
            session.end_if_idle()


def handler_of(generate: Callable[[GenerateRequest, CallContext], AsyncGenerator[GenerateResponse, None]]) -> Handler:
    """The handler that speaks in messages rather than bytes. INVALID_FIELD for bytes that are no request."""

    async def handle(raw: bytes, context: CallContext) -> None:
        try:
            request = GenerateRequest.FromString(raw)
        except DecodeError:
            problem = "the request of the call is not a GenerateRequest of headrace.v1"
            await abort(context, StatusError(Reason.INVALID_FIELD, problem, field="request"))
        async with contextlib.aclosing(generate(request, context)) as responses:
            async for response in responses:
                await context.write(response.SerializeToString())

    return handle


class _ServerSession:
    def __init__(self, server: SessionServer, context: Any) -> None:
        self._server = server
        self._context = context
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._turns = Turns(self._send)
        self._idle = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, requests: AsyncIterable[SessionRequest]) -> None:
        """Until the caller goes, or the server ends and no call is open."""
        self.end_if_idle()
        self._turns.put(None, 0)
        parts = [asyncio.create_task(part) for part in (self._read(requests), self._turns.run(), self._idle.wait())]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            if self._idle.is_set():
                await self._turns.flush()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            tasks = [*parts, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def end_if_idle(self) -> None:
        """See `SessionServer.end_when_idle`."""
        if self._server.is_ending and not self._tasks:
            self._idle.set()

    def put(self, part: CallPart, num_bytes: int) -> None:
        """Send a part soon."""
        self._turns.put(part, num_bytes)

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes of answers that wait to be sent."""
        return self._turns.num_bytes

    async def room(self) -> None:
        """Wait while too much is unsent."""
        await self._turns.room()

    async def _read(self, requests: AsyncIterable[SessionRequest]) -> None:
        async for message in requests:
            for begin in message.begins:
                self._begin(begin)
            for call_id in message.cancelled_call_ids:
                task = self._tasks.get(call_id)
                if task is not None:
                    task.cancel()

    def _begin(self, begin: BeginCall) -> None:
        if begin.call_id in self._tasks:
            raise ValueError(f"the call id {begin.call_id} is in use")
        if len(self._tasks) >= MAX_OPEN_CALLS:
            end = CallEnd(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="too many calls on one session")
            self.put(CallPart(call_id=begin.call_id, end=end), 0)
            return
        if self._timer is None:
            self._arm()
        context = _ServerContext(self, begin)
        task = self._tasks[begin.call_id] = asyncio.create_task(self._serve(begin.request, context))
        task.add_done_callback(lambda _: self._ended(context))
        context.arm(task)

    def _ended(self, context: _ServerContext) -> None:
        # Not within the task: one that is cancelled in the turn in which it was made never runs at all.
        context.disarm()
        del self._tasks[context.call_id]
        self.end_if_idle()

    async def _serve(self, request: bytes, context: _ServerContext) -> None:
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
        # Twice within the time that is promised: what was said right behind a look may be the last for two of them.
        self._timer = asyncio.get_running_loop().call_later(sessions.HEARTBEAT_MS / 2000, self._beat)

    def _beat(self) -> None:
        """Say something if nothing was said, for as long as calls are open."""
        self._timer = None
        if not self._tasks:
            return
        if not self._turns.has_sent and self._turns.is_empty:
            self._turns.put(None, 0)
        self._turns.has_sent = False
        self._arm()

    async def _send(self, items: list[CallPart | None]) -> None:
        parts = [part for part in items if part is not None]
        if not parts:
            await self._context.write(SessionResponse(heartbeat_ms=sessions.HEARTBEAT_MS))
        start, num_bytes = 0, 0
        for index, part in enumerate(parts):
            num_bytes += len(part.response)
            if num_bytes >= MAX_MESSAGE_BYTES:
                await self._context.write(
                    SessionResponse(parts=parts[start : index + 1], heartbeat_ms=sessions.HEARTBEAT_MS)
                )
                start, num_bytes = index + 1, 0
        if start < len(parts):
            await self._context.write(SessionResponse(parts=parts[start:], heartbeat_ms=sessions.HEARTBEAT_MS))


class _AbortedError(Exception):
    """A handler ended its call."""

    def __init__(self, end: CallEnd) -> None:
        super().__init__(end.message)
        self.end = end


class _ServerContext:
    """A `CallContext` of a session."""

    __slots__ = ("_deadline_s", "_metadata", "_session", "_timer", "call_id", "is_late")

    def __init__(self, session: _ServerSession, begin: BeginCall) -> None:
        self.call_id = begin.call_id
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
        """The call has ended."""
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
        session = self._session
        session.put(CallPart(call_id=self.call_id, response=message), len(message))
        await session.room()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """See `CallContext`."""
        end = CallEnd(code=code.value[0], message=details)
        for key, value in trailing_metadata:
            if key == DETAILS_KEY and isinstance(value, bytes):
                end.details = value
        raise _AbortedError(end)
