"""The client's side of sessions (see `sessions`)."""

from __future__ import annotations

import time
from typing import Any, cast

import grpc

from headrace.common.transport.client_call import ClientCall
from headrace.common.transport.client_session import ClientSession
from headrace.common.transport.sessions import Call, Metadata
from headrace.common.transport.silence import Silences
from headrace.common.transport.wire_request import SharedPart, WireRequest
from headrace.protos.inference_pb2 import SessionRequest, SessionResponse

GENERATE = "/headrace.v1.Inference/Generate"
SESSION = "/headrace.v1.Inference/Session"
# Maximum of unread bytes of answers from one server. Beyond it, the call with most unread bytes is ended.
MAX_UNREAD_BYTES = 64 << 20
# If one name stands for several servers, new calls go to a new session after this time, so that new servers get their
# share.
MAX_AGE_S = 60.0
# A larger request gets its own session, so that it cannot delay or break other calls.
LARGE_BYTES = 256 << 10


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
        """A session is over."""
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
        """A session was given up for silence. Begin another one, to notice when the server answers again."""
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
        """Use no sessions for this time."""
        self._without_until_s = max(self._without_until_s, time.monotonic() + seconds)

    def begin_alone(self, wire: WireRequest, timeout: float | None, metadata: Metadata) -> Call:
        """Begin a call as a separate RPC."""
        return cast("Call", self._begin_single(wire.joined(), timeout=timeout, metadata=tuple(metadata)))
