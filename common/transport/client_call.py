"""The client's side of one call of a session (see `sessions`)."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from headrace.common.transport.sessions import Call, Metadata
from headrace.common.transport.wire_request import WireRequest
from headrace.protos.status import DETAILS_KEY


class CallOwner(Protocol):
    """The part of a session that a call uses."""

    def cancel(self, call_id: int) -> None:
        """Cancel the call at the server."""

    @property
    def count_unread(self) -> Callable[[ClientCall, int], None]:
        """Adds to the number of unread bytes that a call holds; negative numbers subtract."""


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
        self, session: CallOwner, call_id: int, wire: WireRequest, timeout: float | None, metadata: Metadata
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
        """Add a message."""
        self._retry = None
        self._pending.append(message)
        self._count(len(message))
        self._wake()

    def give_up(self) -> None:
        """End the call and discard its messages, because they are not read."""
        self._session.cancel(self._call_id)
        self._drop()
        self.finish(call_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "the answer was not read in time"))

    def _drop(self) -> None:
        """Discard the unread messages."""
        self._pending.clear()
        self._count(-self.num_unread_bytes)

    def _count(self, num_bytes: int) -> None:
        self.num_unread_bytes += num_bytes
        self._count_unread(self, num_bytes)

    def finish(self, error: grpc.aio.AioRpcError | None) -> None:
        """Record that no message follows."""
        self._end = error or grpc.aio.EOF
        self._close()

    def begin_alone(self, begin: Callable[[WireRequest, float | None, Metadata], Call]) -> None:
        """Continue as a separate RPC, if no message has arrived yet. Otherwise fail, so that the reader resumes the
        answer."""
        if self._retry is None:
            self.finish(call_error(grpc.StatusCode.UNAVAILABLE, "the session ended before the call did"))
            return
        wire, metadata = self._retry
        left_s = None if self._deadline_s is None else max(self._deadline_s - time.monotonic(), 0.0)
        self._single = begin(wire, left_s, metadata)
        self._close()

    def _expire(self) -> None:
        self._session.cancel(self._call_id)
        self.finish(call_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))

    def _close(self) -> None:
        self._retry = None
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def call_error(code: grpc.StatusCode, message: str, details: bytes = b"") -> grpc.aio.AioRpcError:
    """The error of a call that ends with this status."""
    trailing = grpc.aio.Metadata(*([(DETAILS_KEY, details)] if details else []))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=message)
