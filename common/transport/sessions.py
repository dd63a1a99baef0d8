"""Many Generate calls over one stream between two processes (`Inference.Session`): what both ends share.

A message costs grpc.aio some 30 us at each end, whatever is in it. A worker's step gives a token to each of its streams
at the same time, so what all of them write in one turn of the event loop goes out as one message:

    call 1: write --+                                        +--> call 1: read
    call 2: write --+--> parts, sent by one task --> parts --+--> call 2: read
    call 3: write --+                                        +--> call 3: read

While calls are open the server is never silent for long, so a server that hangs is noticed by its silence, long before
gRPC's own keepalive would.

The caller's end is `session_client`, the server's `session_server`. `SessionClient.generate` gives what grpc.aio's call
would be, and a server's handler gets what its context would be, so both are written as for single calls. Servers that
have no sessions are called with Generate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, TypeAlias

import grpc

from headrace.common.transport.wire_request import SharedPart

# Bytes that wait to be sent, beyond which writers wait.
MAX_UNSENT_BYTES = 4 << 20
# Bytes of requests or answers in one message of a session. What is larger by itself travels in a message of its own.
MAX_MESSAGE_BYTES = 1 << 20
# What a server promises: a message at least this often while calls are open.
HEARTBEAT_MS = 500

Metadata: TypeAlias = "Sequence[tuple[str, str | bytes]]"


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


class Call(Protocol):
    """What a caller needs of grpc.aio's UnaryStreamCall."""

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF. Raises AioRpcError, or CancelledError after `cancel`."""

    def cancel(self) -> bool:
        """End the call; whether it was still running."""


class Turns:
    """Collects what is to be sent, and sends all of one turn of the event loop together, `MAX_MESSAGE_BYTES` at a
    time."""

    def __init__(self, send: Callable[[list[Any]], Awaitable[None]]) -> None:
        self._send = send
        self._unsent: list[tuple[Any, int, tuple[SharedPart, ...]]] = []
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

    def put(self, item: Any, num_bytes: int, shared: tuple[SharedPart, ...] = ()) -> None:
        """Send it soon. A message has what its items share once."""
        self._unsent.append((item, num_bytes, shared))
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
            for batch in _batches(items):
                await self._send(batch)
                self.has_sent = True


def _batches(items: Sequence[tuple[Any, int, tuple[SharedPart, ...]]]) -> Iterator[list[Any]]:
    """The items in their order, in runs of at most `MAX_MESSAGE_BYTES`. A larger item is a run by itself, with those
    that share its parts and bring little of their own."""
    batch: list[Any] = []
    present: set[SharedPart] = set()
    num_own_bytes = num_shared_bytes = 0
    for item, size, shared in items:
        fresh = sum(len(part.raw) for part in shared if part not in present)
        num_bytes = num_own_bytes + size + (num_shared_bytes + fresh if fresh or not shared else 0)
        if batch and num_bytes > MAX_MESSAGE_BYTES:
            yield batch
            batch, present, num_own_bytes, num_shared_bytes = [], set(), 0, 0
            fresh = sum(len(part.raw) for part in shared)
        batch.append(item)
        present.update(shared)
        num_own_bytes += size
        num_shared_bytes += fresh
    if batch:
        yield batch
