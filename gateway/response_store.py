"""Responses that are kept: for `previous_response_id`, to be retrieved, and while they run in the background.

A store maps keys to bytes for a while. Without Redis it is this process's memory, within bounds.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

DEFAULT_TTL_S = 24 * 3600.0
MAX_RESPONSES = 10_000
MAX_BYTES = 256 * 1024 * 1024
# More than this of one response is not kept; what is compressed here came within the bounds of bodies and contexts.
MAX_RESPONSE_BYTES = 16 * 1024 * 1024
# Compressing this much takes a millisecond or two; more is done by a thread, beside running streams.
MAX_INLINE_BYTES = 128 * 1024


class StoreError(Exception):
    """The store cannot be reached, or does not take the value. The message is for logs."""


class Store(Protocol):
    """Keeps values. Everything raises `StoreError` when it cannot be done."""

    is_shared: bool
    """Other gateways keep theirs here too."""

    async def put(self, key: str, value: bytes, ttl_s: float | None = None) -> None:
        """Keep a value, in place of what was there, for `ttl_s` or as long as the store keeps responses."""

    async def get(self, key: str) -> bytes | None:
        """The value; None if there is none any more."""

    async def delete(self, key: str) -> bool:
        """Forget the value; whether there was one."""

    async def close(self) -> None:
        """End the connection."""


class StoredResponse(msgspec.Struct):
    """A response, and what it takes to go on from it."""

    owner: str
    """Who may see it: the key of who created it; empty where there are no keys."""
    response: dict[str, Any]
    """As the API shows it."""
    items: list[dict[str, Any]]
    """The conversation before its output: what came from `previous_response_id`, and its own input."""
    events: list[bytes] | None = None
    """The events of its stream, by their numbers, if it was created as one in the background."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StoredResponse)


async def packed(stored: StoredResponse) -> bytes:
    """The bytes that are kept. Raises `StoreError` if they are too many."""
    plain = _ENCODER.encode(stored)
    value = _compressed(plain) if len(plain) <= MAX_INLINE_BYTES else await asyncio.to_thread(_compressed, plain)
    if len(value) > MAX_RESPONSE_BYTES:
        raise StoreError(f"a response of {len(value)} bytes is too large to be kept")
    return value


async def unpacked(value: bytes) -> StoredResponse:
    """The response of these bytes."""
    is_short = len(value) <= MAX_INLINE_BYTES // 8
    return _DECODER.decode(zlib.decompress(value) if is_short else await asyncio.to_thread(zlib.decompress, value))


def _compressed(plain: bytes) -> bytes:
    return zlib.compress(plain, 1)


class MemoryStore:
    """Keeps the newest values within bounds of count, bytes and time."""

    is_shared = False

    def __init__(
        self,
        ttl_s: float = DEFAULT_TTL_S,
        max_values: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_s = ttl_s
        self._max_values = max_values
        self._max_bytes = max_bytes
        self._clock = clock
        # Key -> value and the time at which it ends; oldest first.
        self._values: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self.num_bytes = 0
        """Of all values."""

    def __len__(self) -> int:
        return len(self._values)

    async def put(self, key: str, value: bytes, ttl_s: float | None = None) -> None:
        """As `Store.put`; older values give way."""
        await self.delete(key)
        if len(value) > self._max_bytes:
            raise StoreError(f"a response of {len(value)} bytes is too large to be kept")
        self._values[key] = value, self._clock() + (self._ttl_s if ttl_s is None else ttl_s)
        self.num_bytes += len(value)
        while len(self._values) > self._max_values or self.num_bytes > self._max_bytes:
            _, (oldest, _) = self._values.popitem(last=False)
            self.num_bytes -= len(oldest)

    async def get(self, key: str) -> bytes | None:
        """As `Store.get`."""
        found = self._values.get(key)
        if found is None:
            return None
        value, ends_at_s = found
        if self._clock() >= ends_at_s:
            await self.delete(key)
            return None
        return value

    async def delete(self, key: str) -> bool:
        """As `Store.delete`."""
        found = self._values.pop(key, None)
        if found is None:
            return False
        value, ends_at_s = found
        self.num_bytes -= len(value)
        return self._clock() < ends_at_s

    async def close(self) -> None:
        """Forget everything."""
        self._values.clear()
        self.num_bytes = 0
