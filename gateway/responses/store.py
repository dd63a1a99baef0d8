"""Stored responses and conversations: callers continue and retrieve them, also while they run in the background.

A store maps keys to bytes for a limited time. Without Redis it is bounded memory of this process.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import msgspec

from headrace.gateway.responses.response import Response
from headrace.protos.router_pb2 import REDIS_STATE_UNSPECIFIED, RedisState
from headrace.protos.status import Reason, StatusError

DEFAULT_TTL_S = 24 * 3600.0
MAX_RESPONSES = 10_000
MAX_BYTES = 256 * 1024 * 1024
# Maximum of one tenant, so that it cannot displace the responses of others.
TENANT_BYTES = 64 * 1024 * 1024
# Larger responses are not stored.
MAX_RESPONSE_BYTES = 16 * 1024 * 1024
# The same before compression. The limit before compression. A conversation may be longer than any context if each turn
# drops its beginning, and repetitive text is compressed to a thousandth.
MAX_PLAIN_BYTES = 4 * MAX_RESPONSE_BYTES
# Compressing this much takes a millisecond or two; larger values are compressed in a thread.
MAX_INLINE_BYTES = 128 * 1024


_JSON = b"{"
_LOG = logging.getLogger(__name__)
_T = TypeVar("_T", bound=msgspec.Struct)


class StoreError(Exception):
    """The store is unreachable or refuses the value. The message is for logs."""


class TooLargeError(StoreError):
    """The value exceeds a bound of the store. The message is for logs."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"a value of {num_bytes} bytes is too large to be kept")


class Store(Protocol):
    """Stores values. All methods raise `StoreError` on failure."""

    is_shared: bool
    """Whether other gateways use the same store."""

    async def put(self, key: str, value: bytes, ttl_s: float | None = None, owner: str | None = None) -> None:
        """Store a value, replacing an older one, for `ttl_s` or as long as the store keeps responses.

        A value with an owner counts against the bytes of that tenant; the tenant's own oldest values are deleted first.
        """

    async def swap(self, key: str, old: bytes, value: bytes, owner: str) -> bool:
        """As `put`, if the value is still the old one. Returns whether it was, so that no change of others is lost."""

    async def get(self, key: str) -> bytes | None:
        """The value; None if it does not exist or has expired."""

    async def delete(self, key: str, owner: str | None = None) -> bool:
        """Delete a value of this owner. Returns whether it existed."""

    @property
    def redis(self) -> RedisState:
        """The state of its Redis a few seconds ago; unspecified without one, or before the first look."""

    async def watch(self) -> None:
        """Watch the state of its Redis until cancelled."""

    async def close(self) -> None:
        """End the connection."""


class StoredResponse(msgspec.Struct):
    """A response, and the conversation that is needed to continue it."""

    owner: str
    """The tenant that may see it; empty without keys."""
    response: Response
    """As the API shows it."""
    items: list[dict[str, Any]]
    """The conversation before its output: that of `previous_response_id`, and its own input."""
    events: list[bytes] | None = None
    """The events of its stream, by their numbers, if it was created as one in the background."""


_ENCODER = msgspec.msgpack.Encoder()


async def packed(stored: msgspec.Struct) -> bytes:
    """The stored bytes. Raises `StoreError` if there are too many."""
    try:
        plain = _ENCODER.encode(stored)
    except OverflowError:  # an integer of more than 64 bits, as schemas and arguments may have
        plain = msgspec.json.encode(stored)
    if len(plain) > MAX_PLAIN_BYTES:
        raise TooLargeError(len(plain))
    value = _compressed(plain) if len(plain) <= MAX_INLINE_BYTES else await asyncio.to_thread(_compressed, plain)
    if len(value) > MAX_RESPONSE_BYTES:
        raise TooLargeError(len(value))
    return value


async def unpacked(value: bytes, kind: type[_T]) -> _T:
    """Decode stored bytes."""
    is_short = len(value) <= MAX_INLINE_BYTES // 8
    plain = zlib.decompress(value) if is_short else await asyncio.to_thread(zlib.decompress, value)
    # In msgpack, an object begins with another byte.
    decode = msgspec.json.decode if plain.startswith(_JSON) else msgspec.msgpack.decode
    return decode(plain, type=kind)


def _compressed(plain: bytes) -> bytes:
    return zlib.compress(plain, 1)


def unavailable(error: StoreError) -> StatusError:
    """The error for a caller who needs what is stored."""
    _LOG.warning("stored responses cannot be looked up: %s", error)
    return StatusError(Reason.NO_CAPACITY, "responses cannot be looked up now; try again", retry_after_s=1.0)


class MemoryStore:
    """Keeps the newest values within bounds of count, bytes, bytes of one owner, and time."""

    is_shared = False
    redis = REDIS_STATE_UNSPECIFIED

    def __init__(
        self,
        ttl_s: float = DEFAULT_TTL_S,
        max_values: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
        tenant_bytes: int = TENANT_BYTES,
    ) -> None:
        self._ttl_s = ttl_s
        self._max_values = max_values
        self._max_bytes = max_bytes
        self._tenant_bytes = tenant_bytes
        self._clock = clock
        # Key -> value, the time at which it ends, and its owner; oldest first.
        self._values: OrderedDict[str, tuple[bytes, float, str | None]] = OrderedDict()
        # Owner -> keys, oldest first, and bytes.
        self._keys: dict[str, OrderedDict[str, None]] = {}
        self._bytes: dict[str, int] = {}
        self.num_bytes = 0
        """Bytes of all values."""

    def __len__(self) -> int:
        return len(self._values)

    async def put(self, key: str, value: bytes, ttl_s: float | None = None, owner: str | None = None) -> None:
        """As `Store.put`. Older values are removed to make room; the key's own stays if the new one is too large."""
        if len(value) > min(self._max_bytes, self._max_bytes if owner is None else self._tenant_bytes):
            raise TooLargeError(len(value))
        self._forget(key)
        self._values[key] = value, self._clock() + (self._ttl_s if ttl_s is None else ttl_s), owner
        self.num_bytes += len(value)
        if owner is not None:
            self._keys.setdefault(owner, OrderedDict())[key] = None
            self._bytes[owner] = self._bytes.get(owner, 0) + len(value)
            while self._bytes[owner] > self._tenant_bytes:
                self._forget(next(iter(self._keys[owner])))
        while len(self._values) > self._max_values or self.num_bytes > self._max_bytes:
            self._forget(next(iter(self._values)))

    async def swap(self, key: str, old: bytes, value: bytes, owner: str) -> bool:
        """As `Store.swap`."""
        if await self.get(key) != old:
            return False
        await self.put(key, value, owner=owner)
        return True

    async def get(self, key: str) -> bytes | None:
        """As `Store.get`."""
        found = self._values.get(key)
        if found is None:
            return None
        if self._clock() >= found[1]:
            self._forget(key)
            return None
        return found[0]

    async def delete(self, key: str, owner: str | None = None) -> bool:
        """As `Store.delete`."""
        ends_at_s = self._forget(key)
        return ends_at_s is not None and self._clock() < ends_at_s

    def _forget(self, key: str) -> float | None:
        """The time at which the value would have ended; None if there is none."""
        found = self._values.pop(key, None)
        if found is None:
            return None
        value, ends_at_s, owner = found
        self.num_bytes -= len(value)
        if owner is not None:
            self._bytes[owner] -= len(value)
            del self._keys[owner][key]
            if not self._keys[owner]:
                del self._keys[owner], self._bytes[owner]
        return ends_at_s

    async def watch(self) -> None:
        """As `Store.watch`, but never changes."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Forget everything."""
        self._values.clear()
        self._keys.clear()
        self._bytes.clear()
        self.num_bytes = 0
