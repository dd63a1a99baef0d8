"""Stores the API keys of `headrace keys` in a file or in Redis. Concurrent changes are safe."""

from __future__ import annotations

import contextlib
import fcntl
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, cast

from headrace.common.commands import CommandError, CommandFailed
from headrace.common.stores.api_keys import (
    REDIS_KEYS,
    REDIS_VERSION,
    ApiKey,
    checked,
    dump_key,
    load_key,
    read_keys,
    write_keys,
)
from headrace.common.stores.redis_link import secrets_for, sentinel_url

_TIMEOUT_S = 5.0


class KeyStore(Protocol):
    """A store of keys. Every failure is a CommandError."""

    def keys(self) -> Sequence[ApiKey]:
        """All keys."""

    def add(self, key: ApiKey) -> None:
        """Add a key."""

    def remove(self, key_id: str) -> None:
        """Remove a key; does nothing if it does not exist."""


class FileStore:
    """Keys in a file, which the first key creates. Writers take a lock in a file next to it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def keys(self) -> Sequence[ApiKey]:
        """As `KeyStore.keys`."""
        try:
            return read_keys(self._path)
        except FileNotFoundError:
            raise CommandError(
                f"there is no file {self._path}; name another with --file, or make its first key: headrace keys create"
            ) from None
        except OSError as error:
            raise CommandError(f"{self._path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise CommandError(f"{self._path} is not a file of keys: {error}") from None

    def add(self, key: ApiKey) -> None:
        """As `KeyStore.add`."""
        with self._locked():
            self._write([*(self.keys() if self._path.exists() else ()), key])

    def remove(self, key_id: str) -> None:
        """As `KeyStore.remove`."""
        with self._locked():
            self._write([key for key in self.keys() if key.id != key_id])

    def _write(self, keys: Sequence[ApiKey]) -> None:
        try:
            write_keys(self._path, keys)
        except (OSError, ValueError) as error:
            raise CommandError(f"{self._path} cannot be written: {error}") from None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            lock = self._path.with_name(f".{self._path.name}.lock").open("w")
        except OSError as error:
            raise CommandError(f"{self._path} cannot be written: {error.strerror}") from None
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class RedisStore:
    """Keys in Redis, under the names in `headrace.common.stores.api_keys`."""

    def __init__(self, url: str) -> None:
        from redis import Redis
        from redis.sentinel import Sentinel

        try:
            named = sentinel_url(url)
            if named is None:
                self._redis = Redis.from_url(
                    url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, **secrets_for(url)
                )
                return
            sentinel = Sentinel(named.addresses, sentinel_kwargs={"socket_timeout": _TIMEOUT_S})
            self._redis = sentinel.master_for(
                named.service,
                socket_timeout=_TIMEOUT_S,
                db=named.database,
                username=named.username,
                password=named.password or secrets_for(url).get("password"),
            )
        except ValueError as error:
            raise CommandError(f"--redis is not a Redis URL: {error}") from None

    def keys(self) -> Sequence[ApiKey]:
        """As `KeyStore.keys`."""
        with _failing():
            table = cast("dict[bytes, bytes]", self._redis.hgetall(REDIS_KEYS))
        try:
            return checked(map(load_key, table.values()))
        except ValueError as error:
            raise CommandError(f"Redis has no valid list of keys: {error}") from None

    def add(self, key: ApiKey) -> None:
        """As `KeyStore.add`."""
        with _failing(), self._redis.pipeline() as pipeline:
            pipeline.hset(REDIS_KEYS, key.id, dump_key(key))
            pipeline.set(REDIS_VERSION, secrets.token_hex(8))
            pipeline.execute()

    def remove(self, key_id: str) -> None:
        """As `KeyStore.remove`."""
        with _failing(), self._redis.pipeline() as pipeline:
            pipeline.hdel(REDIS_KEYS, key_id)
            pipeline.set(REDIS_VERSION, secrets.token_hex(8))
            pipeline.execute()


@contextlib.contextmanager
def _failing() -> Iterator[None]:
    from redis.exceptions import RedisError

    try:
        yield
    except (RedisError, OSError) as error:
        raise CommandFailed(f"Redis failed: {error or type(error).__name__}") from None
