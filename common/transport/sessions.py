"""Many Generate calls over one stream between two processes (`Inference.Session`): the code shared by both ends.

Each message costs grpc.aio about 30 us at each end, regardless of its size. A worker's step produces a token for each
of its streams at the same time. So all writes in one turn of the event loop are sent together as one message:

    call 1: write --+                                        +--> call 1: read
    call 2: write --+--> parts, sent by one task --> parts --+--> call 2: read
    call 3: write --+                                        +--> call 3: read

While calls are open, and before the first one, the server sends heartbeats. So a client detects a hanging server by its
silence, long before gRPC's own keepalive would, and a server is not silent while a large request is on its way.

`session_client` is the caller's end, `session_server` the server's. `SessionClient.generate` returns the equivalent of
a grpc.aio call, and a server's handler gets the equivalent of a grpc.aio context. So both sides are written as for
single calls. For a server without sessions, the client falls back to Generate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol, TypeAlias

import grpc

from headrace.common.transport.wire_request import SharedPart

# Writers wait while more than this many bytes are unsent.
MAX_UNSENT_BYTES = 4 << 20
# The maximum size of a message of a session. A larger request or answer is sent in a message of its own.
MAX_MESSAGE_BYTES = 1 << 20
# While calls are open, and before the first one, a server sends a message at least this often.
HEARTBEAT_MS = 500

Metadata: TypeAlias = "Sequence[tuple[str, str | bytes]]"


class CallContext(Protocol):
    """The part of grpc.aio's ServicerContext that handlers use."""

    def invocation_metadata(self) -> Metadata:
        """The caller's metadata."""

    def time_remaining(self) -> float | None:
        """Seconds until the deadline; None without a deadline."""

    async def write(self, message: bytes) -> None:
        """Send a message of the answer."""

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call with a status: `code`, `details` and trailing metadata. Raises, so it does not return."""


class Call(Protocol):
    """The part of grpc.aio's UnaryStreamCall that callers use."""

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF. Raises AioRpcError, or CancelledError after `cancel`."""

    def cancel(self) -> bool:
        """Cancel the call. Returns whether it was still running."""


class Turns:
    """Collects items and sends all items of one turn of the event loop together, in messages of at most
    `MAX_MESSAGE_BYTES`."""

    def __init__(self, send: Callable[[list[Any]], Awaitable[None]]) -> None:
        self._send = send
        self._unsent: list[tuple[Any, int, tuple[SharedPart, ...]]] = []
        self._num_bytes = 0
        self._has_shared = False
        self.has_sent = False
        self._sending = asyncio.Lock()
        self._something = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def num_bytes(self) -> int:
        """Size of the unsent items in bytes."""
        return self._num_bytes

    @property
    def is_empty(self) -> bool:
        """Whether all items are sent."""
        return not self._unsent and not self._sending.locked()

    def put(self, item: Any, num_bytes: int, shared: tuple[SharedPart, ...] = ()) -> None:
        """Queue an item for sending. A message contains the `shared` parts of its items only once."""
        self._unsent.append((item, num_bytes, shared))
        self._num_bytes += num_bytes
        if shared:
            self._has_shared = True
        self._something.set()

    @property
    def has_room(self) -> bool:
        """Whether fewer than `MAX_UNSENT_BYTES` are unsent."""
        return self._num_bytes < MAX_UNSENT_BYTES

    async def room(self) -> None:
        """Wait until fewer than `MAX_UNSENT_BYTES` are unsent."""
        while not self.has_room:
            self._room.clear()
            await self._room.wait()

    async def run(self) -> None:
        """Send until cancelled, or until sending fails."""
        while True:
            await self._something.wait()
            await self.flush()

    async def flush(self) -> None:
        """Send all items that are queued now."""
        async with self._sending:
            self._something.clear()
            items, self._unsent = self._unsent, []
            batches: Iterable[list[Any]] = _batches(items)
            if items and not self._has_shared and self._num_bytes <= MAX_MESSAGE_BYTES:
                batches = [[item for item, _, _ in items]]  # the answers of a step need not be counted one by one
            self._num_bytes = 0
            self._has_shared = False
            self._room.set()
            for batch in batches:
                await self._send(batch)
                self.has_sent = True


def _batches(items: Sequence[tuple[Any, int, tuple[SharedPart, ...]]]) -> Iterator[list[Any]]:
    """Split the items, in order, into batches of at most `MAX_MESSAGE_BYTES`. A larger item forms a batch of its own,
    together with items that share its parts and add few bytes."""
    batch: list[Any] = []
    present: set[SharedPart] = set()
    num_own_bytes = num_shared_bytes = 0
    for item, size, shared in items:
        fresh = sum(len(part.raw) for part in shared if part not in present)
        num_bytes = num_own_bytes + size + (num_shared_bytes + fresh if fresh or not shared else 0)
        if batch and num_bytes > MAX_MESSAGE_BYTES:
            yield batch
            batch = []
            present = set()
            num_own_bytes = 0
            num_shared_bytes = 0
            fresh = sum(len(part.raw) for part in shared)
        batch.append(item)
        present.update(shared)
        num_own_bytes += size
        num_shared_bytes += fresh
    if batch:
        yield batch
