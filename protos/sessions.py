"""Many Generate calls over one stream between two processes (`Inference.Session`), for both ends.

A message costs grpc.aio some 30 us at each end, whatever is in it. A worker's step gives a token to each of its streams
at the same time, so what all of them write in one turn of the event loop goes out as one message:

    call 1: write --+                                        +--> call 1: read
    call 2: write --+--> parts, sent by one task --> parts --+--> call 2: read
    call 3: write --+                                        +--> call 3: read

While calls are open the server is never silent for long, so a server that hangs is noticed by its silence, long before
gRPC's own keepalive would.

`SessionClient.generate` gives what grpc.aio's call would be, and a server's handler gets what its context would be, so
both are written as for single calls. Servers that have no sessions are called with Generate.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from typing import Any, NoReturn, Protocol, TypeAlias, cast

import grpc
from google.protobuf.message import DecodeError

from headrace.protos.inference_pb2 import (
    BeginCall,
    CallEnd,
    CallPart,
    GenerateRequest,
    GenerateResponse,
    SessionRequest,
    SessionResponse,
)
from headrace.protos.status import Reason, StatusError, abort

GENERATE = "/headrace.v1.Inference/Generate"
SESSION = "/headrace.v1.Inference/Session"
# Bytes that wait to be sent, beyond which writers wait; and so many go into one message.
MAX_UNSENT_BYTES = 4 << 20
MAX_MESSAGE_BYTES = 1 << 20
# Calls that are open on one session at a time, and sessions of one server; more are refused.
MAX_OPEN_CALLS = 16_384
MAX_SESSIONS = 512
# Bytes of answers that came from one server and nobody has read. Beyond, the call with most of them is given up.
MAX_UNREAD_BYTES = 64 << 20
# New calls go to a new session after this time, so that routers behind one name that have joined get their share.
MAX_AGE_S = 60.0
# How long a peer that has no sessions is called without.
_WITHOUT_S = 60.0
# What a server promises: a message at least this often while calls are open. After so many of them in silence it hangs.
HEARTBEAT_MS = 500
_LOST_HEARTBEATS = 5
# A timer that fires this late says that this process stood still, and nothing about the server.
_STALL_S = 0.25

Metadata: TypeAlias = "Sequence[tuple[str, str | bytes]]"
_DETAILS_KEY = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_LOG = logging.getLogger(__name__)


class CallContext(Protocol):
    """What a handler needs of grpc.aio's ServicerContext."""

    def invocation_metadata(self) -> Metadata:
        """The caller's metadata."""

    def time_remaining(self) -> float | None:
        """Seconds to the deadline; None without one."""

    async def write(self, message: bytes) -> None:
        """Send a message of the answer."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call with an error. Does not return."""


Handler: TypeAlias = Callable[[bytes, CallContext], Awaitable[None]]


class Call(Protocol):
    """What a caller needs of grpc.aio's UnaryStreamCall."""

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF. Raises AioRpcError, or CancelledError behind `cancel`."""

    def cancel(self) -> bool:
        """End the call; whether it was still running."""


class _Turns:
    """Collects what is to be sent, and sends all of one turn of the event loop together."""

    def __init__(self, send: Callable[[list[Any]], Awaitable[None]]) -> None:
        self._send = send
        self._unsent: list[Any] = []
        self._num_bytes = 0
        self.has_sent = False
        self._sending = asyncio.Lock()
        self._something = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def num_bytes(self) -> int:
        """Of what is unsent."""
        return self._num_bytes

    @property
    def is_empty(self) -> bool:
        """Whether nothing is unsent."""
        return not self._unsent and not self._sending.locked()

    def put(self, item: Any, num_bytes: int) -> None:
        """Send it soon."""
        self._unsent.append(item)
        self._num_bytes += num_bytes
        self._something.set()

    async def room(self) -> None:
        """Wait while too much is unsent."""
        while self._num_bytes >= MAX_UNSENT_BYTES:
            self._room.clear()
            await self._room.wait()

    async def run(self) -> None:
        """Send until cancelled, or until sending fails."""
        while True:
            await self._something.wait()
            await self.flush()

    async def flush(self) -> None:
        """Send what there is."""
        async with self._sending:
            self._something.clear()
            items, self._unsent, self._num_bytes = self._unsent, [], 0
            self._room.set()
            if items:
                await self._send(items)
                self.has_sent = True


# -- the caller's end -------------------------------------------------------------------------------------------------


class SessionClient:
    """Generate calls through one channel, over `num_sessions` sessions in turn. Made and used in one event loop."""

    def __init__(self, channel: grpc.aio.Channel, num_sessions: int = 1) -> None:
        """Where a channel balances over several servers, each session is with one of them."""
        self._begin_single: Any = channel.unary_stream(GENERATE)
        self._begin_session: Any = channel.stream_stream(
            SESSION,
            request_serializer=SessionRequest.SerializeToString,
            response_deserializer=SessionResponse.FromString,
        )
        self._sessions: list[_ClientSession | None] = [None] * num_sessions
        self._turn = 0
        self._without_until_s = 0.0
        self.num_unread_bytes = 0
        self._unread: dict[_ClientCall, None] = {}  # calls that keep some of that
        self.heartbeat_s = 0.0  # as promised last; it holds for a new session too, whose server may hang already

    @property
    def is_silent(self) -> bool:
        """Whether the server was given up for its silence and has not been heard since. It is listened to; that it can
        be called again is known without calling it."""
        return all(session is not None and session.is_silent for session in self._sessions)

    def generate(self, request: bytes, *, timeout: float | None = None, metadata: Metadata = ()) -> Call:
        """Begin a call: `request` is a GenerateRequest on the wire, and so is each message that is read."""
        now_s = time.monotonic()
        if now_s < self._without_until_s:
            return cast("Call", self._begin_single(request, timeout=timeout, metadata=tuple(metadata)))
        self._turn = self._next_turn()
        session = self._sessions[self._turn]
        if session is None or session.is_over or now_s - session.born_s > MAX_AGE_S:
            if session is not None:
                session.retire()
            session = self._sessions[self._turn] = _ClientSession(self, self._begin_session())
        return session.begin(request, timeout, metadata)

    def _next_turn(self) -> int:
        """The next session in turn, of those whose server is heard if there are any."""
        count = len(self._sessions)
        turns = [(self._turn + step) % count for step in range(1, count + 1)]
        for turn in turns:
            session = self._sessions[turn]
            if session is None or not session.is_silent:
                return turn
        return turns[0]

    def listen(self, silent: _ClientSession) -> None:
        """A session was given up for silence: begin one in its place, which is heard when the server goes on."""
        if silent in self._sessions:
            session = _ClientSession(self, self._begin_session(), is_silent=True)
            self._sessions[self._sessions.index(silent)] = session

    def took(self, call: _ClientCall, num_bytes: int) -> None:
        """So much was pushed to a call, or, below 0, is not kept any more."""
        self.num_unread_bytes += num_bytes
        if call.num_unread_bytes:
            self._unread[call] = None
        else:
            self._unread.pop(call, None)

    def give_up_slowest(self) -> None:
        """Too much is unread, and gRPC does not hold back single calls: end the one that keeps most of it."""
        max(self._unread, key=lambda call: call.num_unread_bytes).give_up()

    def begin_alone(self, request: bytes, timeout: float | None, metadata: Metadata) -> Call:
        """Begin a call that was begun in a session which the server does not have."""
        self._without_until_s = time.monotonic() + _WITHOUT_S
        return cast("Call", self._begin_single(request, timeout=timeout, metadata=tuple(metadata)))


class _ClientSession:
    """One stream of SessionRequests and SessionResponses."""

    def __init__(self, client: SessionClient, stream: Any, *, is_silent: bool = False) -> None:
        """`is_silent` says that the server was given up; calls come here only if there is no other."""
        self.born_s = time.monotonic()
        self.is_over = False
        self._client = client
        self._stream = stream
        self._was_silent = is_silent
        self._failure: grpc.aio.AioRpcError | None = None
        self._heard_s = self.born_s
        self._timer: asyncio.TimerHandle | None = None
        self._calls: dict[int, _ClientCall] = {}
        self._num_begun = 0
        self._is_retired = False
        self._has_spoken = False
        self._turns = _Turns(self._send)
        self._sender = asyncio.create_task(self._run_sender())
        self._receiver = asyncio.create_task(self._receive())

    def begin(self, request: bytes, timeout: float | None, metadata: Metadata) -> _ClientCall:
        """Open a call."""
        self._num_begun += 1
        call_id = self._num_begun
        begin = BeginCall(call_id=call_id, request=request)
        for key, value in metadata:
            assert isinstance(value, str), f"the metadata {key} of a call is no text"
            begin.metadata[key] = value
        if timeout is not None:
            begin.timeout_ms = max(0, round(1000 * timeout))
        if not self._calls:
            self._heard_s = time.monotonic()  # nothing had to be said until now
            if self._timer is None:
                self._arm(self._client.heartbeat_s * _LOST_HEARTBEATS or HEARTBEAT_MS / 1000)
        call = self._calls[call_id] = _ClientCall(self, call_id, request, timeout, metadata)
        self._turns.put(begin, len(request))
        return call

    @property
    def is_silent(self) -> bool:
        """Whether the server was given up before this session, and has not been heard in it."""
        return self._was_silent and not self.is_over

    def cancel(self, call_id: int) -> None:
        """Tell the server that nobody reads the call any more."""
        if self._calls.pop(call_id, None) is not None:
            self._turns.put(call_id, 0)
            self._end_if_idle()

    def retire(self) -> None:
        """Begin no more; end with the last call."""
        self._is_retired = True
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._is_retired and not self._calls and not self.is_over:
            self.is_over = True
            asyncio.get_running_loop().call_later(1.0, self._stream.cancel)  # behind the last cancellations

    def _arm(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(delay_s, self._look, loop.time() + delay_s)

    def _look(self, due_s: float) -> None:
        """See whether the server is there, for as long as calls are open."""
        self._timer = None
        if not self._calls or self.is_over:
            return
        silent_s = time.monotonic() - self._heard_s
        bound_s = _LOST_HEARTBEATS * self._client.heartbeat_s
        stood_still = asyncio.get_running_loop().time() - due_s > _STALL_S  # what was said meanwhile is unread
        if bound_s == 0 or silent_s < bound_s or stood_still:
            self._arm(max(bound_s - silent_s, HEARTBEAT_MS / 2000))
            return
        self._failure = _error(grpc.StatusCode.UNAVAILABLE, f"the server has been silent for {silent_s:.1f} s")
        self.is_over = True
        self._stream.cancel()
        self._client.listen(self)

    def _heard(self, message: SessionResponse) -> None:
        self._heard_s = time.monotonic()
        self._was_silent = False
        self._client.heartbeat_s = message.heartbeat_ms / 1000

    async def _run_sender(self) -> None:
        # What ends sending ends receiving too, and that is where it is told why.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            await self._turns.run()

    async def _send(self, items: list[Any]) -> None:
        message = SessionRequest()
        for item in items:
            if isinstance(item, int):
                message.cancelled_call_ids.append(item)
            else:
                message.begins.append(item)
        await self._stream.write(message)

    async def _receive(self) -> None:
        try:
            while (message := await self._stream.read()) is not grpc.aio.EOF:
                self._has_spoken = True
                self._heard(message)
                for part in message.parts:
                    self._take(part)
        except grpc.aio.AioRpcError as error:
            self._failure = self._failure or error
        except asyncio.CancelledError:
            pass  # the stream's, given up or with its channel closed, or the event loop's end
        finally:
            failure = self._failure
            self.is_over = True
            if self._timer is not None:
                self._timer.cancel()
            self._sender.cancel()
            self._stream.cancel()
            calls, self._calls = self._calls, {}
            for call in calls.values():
                if failure is not None and self._is_unknown(failure):
                    call.begin_alone(self._client.begin_alone)
                else:
                    call.finish(_of_call(failure))

    def _is_unknown(self, failure: grpc.aio.AioRpcError) -> bool:
        """Whether the server has no sessions. Where it says so while this end is still writing, gRPC makes an error of
        its own core of that."""
        core_failed = failure.code() is grpc.StatusCode.INTERNAL and not self._has_spoken
        return failure.code() is grpc.StatusCode.UNIMPLEMENTED or core_failed

    def _take(self, part: CallPart) -> None:
        call = self._calls.get(part.call_id)
        if call is None:
            return  # cancelled a moment ago
        if part.HasField("end"):
            del self._calls[part.call_id]
            end = part.end
            call.finish(None if end.code == 0 else _error(_code(end.code), end.message, end.details))
            self._end_if_idle()
        else:
            call.push(part.response)
            if self._client.num_unread_bytes > MAX_UNREAD_BYTES:
                self._client.give_up_slowest()

    def took(self, call: _ClientCall, num_bytes: int) -> None:
        """So much was pushed to a call, or, below 0, is not kept any more."""
        self._client.took(call, num_bytes)


class _ClientCall:
    """One call of a session, for one reader."""

    __slots__ = (
        "_call_id",
        "_end",
        "_is_cancelled",
        "_pending",
        "_retry",
        "_session",
        "_single",
        "_timer",
        "_waiter",
        "num_unread_bytes",
    )

    def __init__(
        self, session: _ClientSession, call_id: int, request: bytes, timeout: float | None, metadata: Metadata
    ) -> None:
        self._session = session
        self._call_id = call_id
        self._retry: tuple[bytes, float | None, Metadata] | None = (request, timeout, metadata)
        self.num_unread_bytes = 0
        self._pending: deque[bytes] = deque()
        self._end: Any = None  # grpc.aio.EOF or an AioRpcError
        self._is_cancelled = False
        self._single: Call | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer = None if timeout is None else asyncio.get_running_loop().call_later(timeout, self._expire)

    async def read(self) -> Any:
        """See `Call`."""
        while not self._pending:
            if self._single is not None:
                return await self._single.read()
            if self._is_cancelled:
                raise asyncio.CancelledError
            if self._end is not None:
                if self._end is grpc.aio.EOF:
                    return self._end
                raise self._end
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        message = self._pending.popleft()
        self._count(-len(message))
        return message

    def cancel(self) -> bool:
        """See `Call`."""
        if self._single is not None:
            return self._single.cancel()
        self._drop()
        if self._end is not None or self._is_cancelled:
            return False
        self._is_cancelled = True
        self._session.cancel(self._call_id)
        self._close()
        return True

    def push(self, message: bytes) -> None:
        """A message came."""
        self._retry = None
        self._pending.append(message)
        self._count(len(message))
        self._wake()

    def give_up(self) -> None:
        """It is not read: end it, with what it keeps."""
        self._session.cancel(self._call_id)
        self._drop()
        self.finish(_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "the answer was not read in time"))

    def _drop(self) -> None:
        """What is unread will not be read."""
        self._pending.clear()
        self._count(-self.num_unread_bytes)

    def _count(self, num_bytes: int) -> None:
        self.num_unread_bytes += num_bytes
        self._session.took(self, num_bytes)

    def finish(self, error: grpc.aio.AioRpcError | None) -> None:
        """Nothing follows."""
        self._end = error or grpc.aio.EOF
        self._close()

    def begin_alone(self, begin: Callable[[bytes, float | None, Metadata], Call]) -> None:
        """Go on as a call of its own, if nothing came yet."""
        if self._retry is None:
            self.finish(_error(grpc.StatusCode.UNAVAILABLE, "the session ended before the call did"))
            return
        self._single = begin(*self._retry)
        self._close()

    def _expire(self) -> None:
        self._session.cancel(self._call_id)
        self.finish(_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _close(self) -> None:
        self._retry = None
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


# -- the server's end -------------------------------------------------------------------------------------------------


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
        self._turns = _Turns(self._send)
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
        context.arm(task)

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
        finally:
            context.disarm()
            del self._tasks[context.call_id]
            self.put(CallPart(call_id=context.call_id, end=end), 0)
            self.end_if_idle()

    def _arm(self) -> None:
        # Twice within the time that is promised: what was said right behind a look may be the last for two of them.
        self._timer = asyncio.get_running_loop().call_later(HEARTBEAT_MS / 2000, self._beat)

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
            await self._context.write(SessionResponse(heartbeat_ms=HEARTBEAT_MS))
        start, num_bytes = 0, 0
        for index, part in enumerate(parts):
            num_bytes += len(part.response)
            if num_bytes >= MAX_MESSAGE_BYTES:
                await self._context.write(SessionResponse(parts=parts[start : index + 1], heartbeat_ms=HEARTBEAT_MS))
                start, num_bytes = index + 1, 0
        if start < len(parts):
            await self._context.write(SessionResponse(parts=parts[start:], heartbeat_ms=HEARTBEAT_MS))


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
            if key == _DETAILS_KEY and isinstance(value, bytes):
                end.details = value
        raise _AbortedError(end)


def _of_call(failure: grpc.aio.AioRpcError | None) -> grpc.aio.AioRpcError:
    """What the failure of a session is for its calls: a server's own answer, such as to a missing join token, or a
    transport that broke, whatever gRPC calls it."""
    if failure is None:
        return _error(grpc.StatusCode.UNAVAILABLE, "the session ended before the call did")
    for key, value in cast("Metadata", tuple(failure.trailing_metadata() or ())):
        if key == _DETAILS_KEY and isinstance(value, bytes):
            return _error(failure.code(), failure.details() or "", value)
    return _error(
        grpc.StatusCode.UNAVAILABLE, f"the session was lost: {failure.code().name}: {failure.details() or ''}"
    )


def _code(number: int) -> grpc.StatusCode:
    return _CODES.get(number, grpc.StatusCode.UNKNOWN)


def _error(code: grpc.StatusCode, message: str, details: bytes = b"") -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*([(_DETAILS_KEY, details)] if details else []))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=message)
