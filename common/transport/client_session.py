"""The client's side of one session (see `sessions`): a stream of SessionRequests and SessionResponses."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import grpc

from headrace.common.transport import sessions
from headrace.common.transport.client_call import ClientCall, call_error
from headrace.common.transport.sessions import Call, Metadata, Turns
from headrace.common.transport.silence import Peer, Silences
from headrace.common.transport.wire_request import SharedPart, WireRequest
from headrace.protos.inference_pb2 import BeginCall, CallPart, SessionRequest, SessionResponse
from headrace.protos.status import Reason, details_of, error_of, is_peer_lost

# How long calls are separate RPCs: if the peer has no sessions, and if one of its calls may have broken a session.
_WITHOUT_S = 60.0
_BROKEN_S = 5.0
# After this many missing heartbeats, a server counts as hanging.
_LOST_HEARTBEATS = 5

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class SessionOwner(Protocol):
    """The part of a client that a session uses."""

    silences: Silences
    peer: str | None
    heartbeat_s: float

    def ended(self, session: ClientSession) -> None:
        """A session is over."""

    def listen(self, silent: ClientSession) -> None:
        """Record that a session was given up because its server is silent."""

    def count_unread(self, call: ClientCall, num_bytes: int) -> None:
        """Add to the number of unread bytes that a call holds; negative numbers subtract."""

    def do_without(self, seconds: float) -> None:
        """Use no sessions for this time."""

    def begin_alone(self, wire: WireRequest, timeout: float | None, metadata: Metadata) -> Call:
        """Begin a call as a separate RPC."""


class ClientSession:
    """One stream of SessionRequests and SessionResponses."""

    def __init__(self, client: SessionOwner, stream: Any, *, is_silent: bool = False) -> None:
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
        begin = BeginCall(call_id=call_id, request=wire.own)
        for key, value in metadata:
            assert isinstance(value, str), f"the metadata {key} of a call is no text"
            begin.metadata[key] = value
        if timeout is not None:
            begin.timeout_ms = max(0, round(1000 * timeout))
        if self._peer is None:  # until now, no heartbeat was expected
            self._peer = self._client.silences.watch(self._name, self._bound_s or math.inf)
            self._arm(self._bound_s or sessions.HEARTBEAT_MS / 1000)
        call = self._calls[call_id] = ClientCall(self, call_id, wire, timeout, metadata)
        self._turns.put((begin, wire.shared), len(wire.own), wire.shared)
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
        return _LOST_HEARTBEATS * self._client.heartbeat_s

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
        self._failure = call_error(grpc.StatusCode.UNAVAILABLE, problem)
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
            self._failure = self._failure or call_error(grpc.StatusCode.UNKNOWN, "the server ended the session")
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
            call.finish(None if end.code == 0 else call_error(_code(end.code), end.message, end.details))
            self._end_if_idle()
        else:
            call.push(part.response)


def _message(items: Sequence[Any]) -> SessionRequest:
    """A message that cancels calls by id, and begins calls together with their shared parts."""
    message = SessionRequest()
    positions: dict[SharedPart, int] = {}
    for item in items:
        if isinstance(item, int):
            message.cancelled_call_ids.append(item)
            continue
        begin, shared = item
        begin.shared.extend(positions.setdefault(part, len(positions)) for part in shared)
        message.begins.append(begin)
    message.shared.extend(part.raw for part in positions)
    return message


def _of_call(failure: grpc.aio.AioRpcError | None) -> grpc.aio.AioRpcError:
    """Convert a session's error to an error of its calls: the server's own status, for example for a missing join
    token, or a lost transport, which may have any gRPC status."""
    if failure is None:
        return call_error(grpc.StatusCode.UNAVAILABLE, "the session ended before the call did")
    details = details_of(failure)
    if details is not None:
        return call_error(failure.code(), failure.details() or "", details)
    return call_error(
        grpc.StatusCode.UNAVAILABLE, f"the session was lost: {failure.code().name}: {failure.details() or ''}"
    )


def _code(number: int) -> grpc.StatusCode:
    return _CODES.get(number, grpc.StatusCode.UNKNOWN)
