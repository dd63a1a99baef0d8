"""The client's side of sessions (see `sessions`): one client for each channel, its sessions, and their calls."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import grpc

from headrace.common.transport import sessions
from headrace.common.transport.sessions import Call, Metadata, Turns
from headrace.common.transport.silence import LOST_HEARTBEATS, Peer, Silences
from headrace.common.transport.wire_request import SharedPart, WireRequest
from headrace.protos.inference_pb2 import BeginCall, CallPart, SessionRequest, SessionResponse
from headrace.protos.status import DETAILS_KEY, Reason, details_of, error_of, is_peer_lost

GENERATE = "/headrace.v1.Inference/Generate"
SESSION = "/headrace.v1.Inference/Session"
# Maximum of unread bytes of answers from one server. Beyond it, the call with most unread bytes is ended.
MAX_UNREAD_BYTES = 64 << 20
# If one name stands for several servers, new calls go to a new session after this time, so that new servers get their
# share.
MAX_AGE_S = 60.0
# A larger request gets its own session, so that it cannot delay or break other calls.
LARGE_BYTES = 256 << 10
# How long calls are separate RPCs: if the peer has no sessions, and if one of its calls may have broken a session.
_WITHOUT_S = 60.0
_BROKEN_S = 5.0

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class SessionClient:
    """Makes Generate calls through one channel, over `num_sessions` sessions in turn. Use it in one event loop."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        num_sessions: int = 1,
        *,
        plain_grpc: bool = False,
        silences: Silences | None = None,
        peer: str | None = None,
    ) -> None:
        """If the channel balances over several servers, each session has one of them as its server.

        `plain_grpc` turns sessions off, so that each call is a separate RPC. `silences` covers all peers of this
        process. `peer` is the server's name in it, if the server is also heard elsewhere.
        """
        self.silences = silences or Silences()
        self.peer = peer
        self._plain_grpc = plain_grpc
        self._begin_single: Any = channel.unary_stream(GENERATE)
        self._begin_session: Any = channel.stream_stream(
            SESSION,
            request_serializer=SessionRequest.SerializeToString,
            response_deserializer=SessionResponse.FromString,
        )
        self._sessions: list[ClientSession | None] = [None] * num_sessions
        self._retired: set[ClientSession] = set()  # sessions that take no new calls and wait for the end of their calls
        self._alone: dict[SharedPart, ClientSession] = {}  # sessions of large requests, by the first shared part
        self._turn = 0
        self._without_until_s = 0.0
        self.num_unread_bytes = 0
        self._unread: dict[ClientCall, None] = {}  # calls that hold some of these bytes
        self.heartbeat_s = 0.0  # as last promised; also applies to a new session, whose server may already hang

    @property
    def is_silent(self) -> bool:
        """Whether the server was given up for its silence and is still silent. The client keeps listening, so it
        notices without a call when the server answers again."""
        return all(session is not None and session.is_silent for session in self._sessions)

    def generate(self, request: WireRequest | bytes, *, timeout: float | None = None, metadata: Metadata = ()) -> Call:
        """Begin a call: `request` is a GenerateRequest on the wire. Each message that is read is bytes of the wire
        too."""
        wire = WireRequest(request) if isinstance(request, bytes) else request
        if self._plain_grpc or time.monotonic() < self._without_until_s:
            return self.begin_alone(wire, timeout, metadata)
        return self._session_for(wire).begin(wire, timeout, metadata)

    def retire(self) -> None:
        """End each session with its last call. A later call begins another session."""
        for session in self._sessions:
            if session is not None and not session.is_over:
                self._retired.add(session)
                session.retire()

    def _session_for(self, wire: WireRequest) -> ClientSession:
        """The session for a new call: the next in turn, or a separate one for a large request. Requests with the same
        first part use the same session."""
        if wire.num_bytes > LARGE_BYTES:
            alone = self._alone.get(wire.shared[0]) if wire.shared else None
            if alone is None or alone.is_over:
                alone = ClientSession(self, self._begin_session())
                if wire.shared:
                    self._alone[wire.shared[0]] = alone
            alone.retire_soon()
            return alone
        self._turn = self._next_turn()
        open_session = self._sessions[self._turn]
        if open_session is None or open_session.is_over or self._is_due(open_session):
            if open_session is not None and not open_session.is_over:
                self._retired.add(open_session)
                open_session.retire()
            open_session = self._sessions[self._turn] = ClientSession(self, self._begin_session())
        return open_session

    def _is_due(self, session: ClientSession) -> bool:
        """Whether another session replaces this one. There are at most as many old sessions as new ones, so that long
        answers cannot accumulate them."""
        if len(self._sessions) == 1 or time.monotonic() - session.born_s <= MAX_AGE_S:
            return False
        return len(self._retired) < len(self._sessions)

    def ended(self, session: ClientSession) -> None:
        """Forget a session that has ended. The next call opens another."""
        self._retired.discard(session)
        self._alone = {shared: alone for shared, alone in self._alone.items() if alone is not session}

    def _next_turn(self) -> int:
        """The next session in turn. Sessions with a silent server are skipped if there are others."""
        count = len(self._sessions)
        turns = [(self._turn + step) % count for step in range(1, count + 1)]
        for turn in turns:
            session = self._sessions[turn]
            if session is None or not session.is_silent:
                return turn
        return turns[0]

    def listen(self, silent: ClientSession) -> None:
        """Begin another session after one was given up for silence, to notice when the server answers again."""
        if silent in self._sessions:
            session = ClientSession(self, self._begin_session(), is_silent=True)
            self._sessions[self._sessions.index(silent)] = session

    def count_unread(self, call: ClientCall, num_bytes: int) -> None:
        """Add to the number of unread bytes that a call holds; negative numbers subtract.

        gRPC cannot hold back single calls. If too many bytes are unread, the call with the most is ended.
        """
        self.num_unread_bytes += num_bytes
        if call.num_unread_bytes:
            self._unread[call] = None
        else:
            self._unread.pop(call, None)
        if num_bytes > 0 and self.num_unread_bytes > MAX_UNREAD_BYTES:
            max(self._unread, key=lambda call: call.num_unread_bytes).give_up()

    def do_without(self, seconds: float) -> None:
        """Make each call as a separate RPC for `seconds`, because the server has no sessions or does not answer
        them."""
        self._without_until_s = max(self._without_until_s, time.monotonic() + seconds)

    def begin_alone(self, wire: WireRequest, timeout: float | None, metadata: Metadata) -> Call:
        """Begin a call as a separate RPC."""
        return cast("Call", self._begin_single(wire.joined(), timeout=timeout, metadata=tuple(metadata)))


class ClientSession:
    """One stream of SessionRequests and SessionResponses."""

    def __init__(self, client: SessionClient, stream: Any, *, is_silent: bool = False) -> None:
        """`is_silent`: the server was given up, and only gets calls if there is no other session."""
        self.born_s = time.monotonic()
        self.is_over = False
        self.count_unread = client.count_unread
        self._client = client
        self._stream = stream
        self._was_silent = is_silent
        self._failure: grpc.aio.AioRpcError | None = None
        self._name: Hashable = client.peer or self  # of the server, if known
        self._peer: Peer | None = None  # while calls are open
        self._timer: asyncio.TimerHandle | None = None
        self._calls: dict[int, ClientCall] = {}
        self._num_begun = 0
        self._is_retired = False
        self._has_spoken = False
        self._turns = Turns(self._send)
        self._sender = asyncio.create_task(self._run_sender())
        self._receiver = asyncio.create_task(self._receive())

    def begin(self, wire: WireRequest, timeout: float | None, metadata: Metadata) -> ClientCall:
        """Open a call."""
        self._num_begun += 1
        call_id = self._num_begun
        begin = BeginCall(call_id=call_id)
        for key, value in metadata:
            assert isinstance(value, str), f"the metadata {key} of a call is no text"
            begin.metadata[key] = value
        if timeout is not None:
            begin.timeout_ms = max(0, round(1000 * timeout))
        if self._peer is None:  # until now, no heartbeat was expected
            self._peer = self._client.silences.watch(self._name, self._bound_s or math.inf)
            self._arm(self._bound_s or sessions.HEARTBEAT_MS / 1000)
        call = self._calls[call_id] = ClientCall(self, call_id, wire, timeout, metadata)
        self._turns.put((begin, wire), len(wire.own), wire.shared)
        return call

    @property
    def is_silent(self) -> bool:
        """Whether the server has sent nothing in this session, and was given up for silence before it."""
        return self._was_silent and not self.is_over

    def cancel(self, call_id: int) -> None:
        """Cancel the call at the server."""
        if self._calls.pop(call_id, None) is not None:
            self._turns.put(call_id, 0)
            self._end_if_idle()

    def retire_soon(self) -> None:
        """End with the last call, including calls that begin from now on."""
        self._is_retired = True

    def retire(self) -> None:
        """Begin no new calls, and close after the last one has ended."""
        self._is_retired = True
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if not self._calls:
            self._listen_no_more()
        if self._is_retired and not self._calls and not self.is_over:
            self.is_over = True
            self._client.ended(self)
            asyncio.get_running_loop().call_later(1.0, self._stream.cancel)  # after the last cancellations

    @property
    def _bound_s(self) -> float:
        """The allowed silence of the server in seconds; 0 if it has promised no heartbeats."""
        return LOST_HEARTBEATS * self._client.heartbeat_s

    def _arm(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        """Check that the server is alive while calls are open."""
        peer = self._peer
        if peer is None or not self._calls or self.is_over:
            self._listen_no_more()
            return
        peer.bound_s = self._bound_s or math.inf
        again_s = peer.judge()
        if again_s:
            self._arm(max(min(again_s, self._bound_s), sessions.HEARTBEAT_MS / 2000))
            return
        problem = f"the server has been silent for {peer.silent_s:.1f} s"
        self._failure = _call_error(grpc.StatusCode.UNAVAILABLE, problem)
        self.is_over = True
        self._stream.cancel()
        self._client.listen(self)

    def _listen_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._peer is not None:
            self._peer.close()
        self._timer = self._peer = None

    def _heard(self, message: SessionResponse) -> None:
        if message.server_id and self._client.peer is None:
            self._name = message.server_id
        if self._peer is not None:
            self._peer.heard(self._name)
        self._was_silent = False
        self._client.heartbeat_s = message.heartbeat_ms / 1000

    async def _run_sender(self) -> None:
        # An error that ends sending also ends receiving, which handles it.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            await self._turns.run()

    async def _send(self, items: list[Any]) -> None:
        await self._stream.write(_message(items))

    async def _receive(self) -> None:
        try:
            while (message := await self._stream.read()) is not grpc.aio.EOF:
                self._has_spoken = True
                self._heard(message)
                for part in message.parts:
                    self._take(part)
            self._failure = self._failure or _call_error(grpc.StatusCode.UNKNOWN, "the server ended the session")
        except grpc.aio.AioRpcError as error:
            self._failure = self._failure or error
        except asyncio.CancelledError:
            pass  # the stream was given up, its channel was closed, or the event loop ends
        finally:
            failure = self._failure
            self.is_over = True
            self._client.ended(self)
            self._listen_no_more()
            self._sender.cancel()
            self._stream.cancel()
            calls, self._calls = self._calls, {}
            without_s = self._without_s(failure)
            if without_s is not None:
                self._client.do_without(without_s)
            for call in calls.values():
                if without_s is not None:
                    call.begin_alone(self._client.begin_alone)
                else:
                    call.finish(_of_call(failure))

    def _without_s(self, failure: grpc.aio.AioRpcError | None) -> float | None:
        """The time in seconds for which to call the server without sessions. None if calls would fail like the session,
        because the server is lost or has refused this caller.

        Separate calls do not affect one another, so a call that broke the session then fails alone.
        """
        if failure is None or is_peer_lost(failure):
            return None
        if details_of(failure) is not None:
            has_no_room = error_of(failure).reason is Reason.QUEUE_FULL
            return _BROKEN_S if has_no_room else None
        # If a server without sessions refuses while this end is still writing, gRPC turns that into an error of its own
        # core.
        core_failed = failure.code() is grpc.StatusCode.INTERNAL and not self._has_spoken
        is_unknown = failure.code() is grpc.StatusCode.UNIMPLEMENTED or core_failed
        return _WITHOUT_S if is_unknown else _BROKEN_S

    def _take(self, part: CallPart) -> None:
        call = self._calls.get(part.call_id)
        if call is None:
            return  # cancelled a moment ago
        if part.HasField("end"):
            del self._calls[part.call_id]
            end = part.end
            call.finish(None if end.code == 0 else _call_error(_code(end.code), end.message, end.details))
            self._end_if_idle()
        else:
            call.push(part.response)


class ClientCall:
    """One call of a session, for one reader."""

    __slots__ = (
        "_call_id",
        "_count_unread",
        "_deadline_s",
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
        self, session: ClientSession, call_id: int, wire: WireRequest, timeout: float | None, metadata: Metadata
    ) -> None:
        self._session = session
        self._count_unread = session.count_unread
        self._call_id = call_id
        self._retry: tuple[WireRequest, Metadata] | None = (wire, metadata)
        self._deadline_s = None if timeout is None else time.monotonic() + timeout
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
        """Add a message of the answer, for the reader."""
        self._retry = None
        self._pending.append(message)
        self._count(len(message))
        self._wake()

    def give_up(self) -> None:
        """End the call and discard its messages, because they are not read."""
        self._session.cancel(self._call_id)
        self._drop()
        self.finish(_call_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "the answer was not read in time"))

    def _drop(self) -> None:
        """Discard the unread messages."""
        self._pending.clear()
        self._count(-self.num_unread_bytes)

    def _count(self, num_bytes: int) -> None:
        self.num_unread_bytes += num_bytes
        self._count_unread(self, num_bytes)

    def finish(self, error: grpc.aio.AioRpcError | None) -> None:
        """End the answer after the messages that have arrived: with `error`, or successfully if it is None."""
        self._end = error or grpc.aio.EOF
        self._close()

    def begin_alone(self, begin: Callable[[WireRequest, float | None, Metadata], Call]) -> None:
        """Continue as a separate RPC, if no message has arrived yet. Otherwise fail, so that the reader resumes the
        answer."""
        if self._retry is None:
            self.finish(_call_error(grpc.StatusCode.UNAVAILABLE, "the session ended before the call did"))
            return
        wire, metadata = self._retry
        left_s = None if self._deadline_s is None else max(self._deadline_s - time.monotonic(), 0.0)
        self._single = begin(wire, left_s, metadata)
        self._close()

    def _expire(self) -> None:
        self._session.cancel(self._call_id)
        self.finish(_call_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _close(self) -> None:
        self._retry = None
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _message(items: Sequence[Any]) -> SessionRequest:
    """A message that cancels calls by id, and begins calls together with their shared parts."""
    message = SessionRequest()
    positions: dict[SharedPart, int] = {}
    for item in items:
        if isinstance(item, int):
            message.cancelled_call_ids.append(item)
            continue
        begin, wire = item
        begin.shared.extend(positions.setdefault(part, len(positions)) for part in wire.shared)
        message.begins.append(begin)
        message.begins[-1].request = wire.own  # not before: appending encodes and decodes a message
    message.shared.extend(part.raw for part in positions)
    return message


def _of_call(failure: grpc.aio.AioRpcError | None) -> grpc.aio.AioRpcError:
    """Convert a session's error to an error of its calls: the server's own status, for example for a missing join
    token, or a lost transport, which may have any gRPC status."""
    if failure is None:
        return _call_error(grpc.StatusCode.UNAVAILABLE, "the session ended before the call did")
    details = details_of(failure)
    if details is not None:
        return _call_error(failure.code(), failure.details() or "", details)
    return _call_error(
        grpc.StatusCode.UNAVAILABLE, f"the session was lost: {failure.code().name}: {failure.details() or ''}"
    )


def _code(number: int) -> grpc.StatusCode:
    return _CODES.get(number, grpc.StatusCode.UNKNOWN)


def _call_error(code: grpc.StatusCode, message: str, details: bytes = b"") -> grpc.aio.AioRpcError:
    """The error of a call that ends with this status."""
    trailing = grpc.aio.Metadata(*([(DETAILS_KEY, details)] if details else []))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=message)
