"""The API keys, from a file or from Redis, read again when they change.

If a change cannot be read, the known keys stay valid and the log says why. So a missing or broken file, or a Redis that
is unreachable or was restarted empty, neither locks callers out nor lets others in. To withdraw a key, revoke it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol, cast

from headrace.common.stores.api_keys import REDIS_KEYS, REDIS_VERSION, ApiKey, checked, load_key, read_keys, sha256_of
from headrace.common.stores.redis_link import RedisClient, connect, failures
from headrace.common.stores.watched_files import Stamp, stamp_of
from headrace.protos.status import Reason, StatusError

LOOK_S = 1.0
MAX_SECRET_BYTES = 512
_REDIS_TIMEOUT_S = 2.0
_READ_TIMEOUT_S = 10.0
_LOG = logging.getLogger(__name__)


class KeysError(Exception):
    """The keys cannot be read now. The message says why and contains no key."""


class KeySource(Protocol):
    """A store of keys."""

    async def read(self) -> Iterable[ApiKey] | None:
        """All keys; None if nothing has changed since they were read. Raises KeysError."""

    async def close(self) -> None:
        """Close all connections."""


class KeyFile:
    """Keys in a file, which is read again when its inode, time or size changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: Stamp | None = None

    async def read(self) -> Iterable[ApiKey] | None:
        """As `KeySource.read`."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> Iterable[ApiKey] | None:
        try:
            stamp = stamp_of(self._path)
            if stamp is not None and stamp == self._stamp:
                return None
            keys = read_keys(self._path)
        except OSError as error:
            raise KeysError(f"{self._path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise KeysError(f"{self._path} has no valid list of keys: {error}") from None
        self._stamp = stamp
        return keys

    async def close(self) -> None:
        """As `KeySource.close`."""


class KeyTable:
    """Keys in Redis, under the names in `headrace.common.stores.api_keys`."""

    def __init__(self, url: str) -> None:
        """Raises ValueError if `url` is not a Redis URL."""
        self._redis: RedisClient = connect(url, _REDIS_TIMEOUT_S)
        self._version: bytes | None = None
        self._was_read = False

    async def read(self) -> Iterable[ApiKey] | None:
        """As `KeySource.read`."""
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                version = cast("bytes | None", await self._redis.get(REDIS_VERSION))
                if self._was_read and version == self._version:
                    return None
                if version is None and self._version is not None:
                    raise KeysError("Redis has no keys any more, as if it had been emptied")
                table = await cast("asyncio.Future[dict[bytes, bytes]]", self._redis.hgetall(REDIS_KEYS))
        except failures() as error:
            raise KeysError(f"Redis cannot be read: {error or type(error).__name__}") from None
        try:
            keys = checked(map(load_key, table.values()))
        except (ValueError, TypeError) as error:
            raise KeysError(f"Redis has no valid list of keys: {error}") from None
        self._version, self._was_read = version, True
        return keys

    async def close(self) -> None:
        """As `KeySource.close`."""
        await self._redis.aclose()


class KeyRing:
    """The keys that are valid now."""

    def __init__(self, source: KeySource, on_change: Callable[[Collection[str]], None] = lambda key_ids: None) -> None:
        """`on_change` is called with the ids of all keys after they were read again."""
        self._source = source
        self._on_change = on_change
        self._by_sha256: Mapping[str, ApiKey] = {}
        self._is_known = False
        self._problem = ""

    def find(self, secret: str | bytes) -> ApiKey:
        """The key with this secret. Raises StatusError: UNAUTHENTICATED, or NO_CAPACITY before keys were read."""
        if not self._is_known:
            raise StatusError(Reason.NO_CAPACITY, "the API keys cannot be read at the moment", retry_after_s=1.0)
        # A lookup by hash takes the same time for all wrong guesses.
        key = self._by_sha256.get(sha256_of(secret)) if len(secret) <= MAX_SECRET_BYTES else None
        if key is None:
            raise StatusError(Reason.UNAUTHENTICATED, "the API key is not valid")
        return key

    def find_id(self, key_id: str) -> ApiKey:
        """The key of this id. Raises StatusError as `find`."""
        if not self._is_known:
            raise StatusError(Reason.NO_CAPACITY, "the API keys cannot be read at the moment", retry_after_s=1.0)
        for key in self._by_sha256.values():
            if key.id == key_id:
                return key
        raise StatusError(Reason.UNAUTHENTICATED, "the API key is not valid any more")

    async def refresh(self) -> None:
        """Read the changes since the last call. Raises KeysError."""
        keys = await self._source.read()
        if keys is not None:
            self._by_sha256 = {key.sha256: key for key in keys}
            self._on_change({key.id for key in self._by_sha256.values()})
            self._is_known = True
            _LOG.info("%d API keys are valid", len(self._by_sha256))

    async def run(self) -> None:
        """Follow changes until cancelled."""
        while True:
            try:
                await self.refresh()
            except KeysError as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    _LOG.warning("the known API keys stay valid: %s", error)
            else:
                self._problem = ""
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Close all connections."""
        await self._source.close()
