"""The caller's end of sessions (see `sessions`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import grpc

from headrace.protos import sessions
from headrace.protos.inference_pb2 import BeginCall, CallPart, SessionRequest, SessionResponse
from headrace.protos.sessions import DETAILS_KEY, Call, Metadata, Turns

GENERATE = "/headrace.v1.Inference/Generate"
SESSION = "/headrace.v1.Inference/Session"
# Bytes of answers that came from one server and nobody has read. Beyond, the call with most of them is given up.
MAX_UNREAD_BYTES = 64 << 20
# New calls go to a new session after this time, so that routers behind one name that have joined get their share.
MAX_AGE_S = 60.0
# How long a peer that has no sessions is called without.
_WITHOUT_S = 60.0
# After so many heartbeats in silence a server hangs.
_LOST_HEARTBEATS = 5
# A timer that fires this late says that this process stood still, and nothing about the server.
_STALL_S = 0.25

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_LOG = logging.getLogger(__name__)


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
        self._turns = Turns(self._send)
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
                self._arm(self._client.heartbeat_s * _LOST_HEARTBEATS or sessions.HEARTBEAT_MS / 1000)
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
            self._arm(max(bound_s - silent_s, sessions.HEARTBEAT_MS / 2000))
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


def _of_call(failure: grpc.aio.AioRpcError | None) -> grpc.aio.AioRpcError:
    """What the failure of a session is for its calls: a server's own answer, such as to a missing join token, or a
    transport that broke, whatever gRPC calls it."""
    if failure is None:
        return _error(grpc.StatusCode.UNAVAILABLE, "the session ended before the call did")
    for key, value in cast("Metadata", tuple(failure.trailing_metadata() or ())):
        if key == DETAILS_KEY and isinstance(value, bytes):
            return _error(failure.code(), failure.details() or "", value)
    return _error(
        grpc.StatusCode.UNAVAILABLE, f"the session was lost: {failure.code().name}: {failure.details() or ''}"
    )


def _code(number: int) -> grpc.StatusCode:
    return _CODES.get(number, grpc.StatusCode.UNKNOWN)


def _error(code: grpc.StatusCode, message: str, details: bytes = b"") -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*([(DETAILS_KEY, details)] if details else []))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=message)
