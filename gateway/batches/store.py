"""The store of files and batches: a directory, or a bucket of an object store.

Every object appears whole. Of several callers that `create` one name, one succeeds: leases and journals need no more
(docs/decisions/batches.md#journal).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.protos.status import Reason, StatusError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3://", "gs://", "az://", "memory://")
_READ_BYTES = 1 << 20
_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Entry:
    """An object: its name, size in bytes, and when it was written by the clock of the store."""

    name: str
    num_bytes: int
    written: datetime


class BatchStore:
    """Objects by name. Names have slashes. Every method but `create` raises `StatusError` (NO_CAPACITY) if the store
    cannot be used now."""

    def __init__(self, place: str) -> None:
        """`place` is a directory, which is made at the first write if it is missing, or a URL with one of `SCHEMES`;
        credentials come from the environment. Raises ValueError."""
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        self._directory: Path | None = None
        self._opened: ObjectStore | None = None
        if place.startswith(SCHEMES):
            try:
                self._opened = from_url(place)
            except BaseError as error:
                raise ValueError(_first_line(error)) from None
        elif "://" in place:
            raise ValueError(f"{place.partition('://')[0]}:// is none of {', '.join(SCHEMES)}")
        else:
            self._directory = Path(place).absolute()
            existing = next(path for path in (self._directory, *self._directory.parents) if path.exists())
            if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
                raise ValueError(f"{existing} is no directory in which this process may write")

    @property
    def _objects(self) -> ObjectStore:
        if self._opened is None:
            from obstore.store import LocalStore

            assert self._directory is not None
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._opened = LocalStore(prefix=self._directory)
        return self._opened

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written, for a directory that is not there."""
        return self._opened is None and self._directory is not None and not self._directory.exists()

    async def create(self, name: str, content: bytes) -> bool:
        """Write an object if there is none of this name. Returns whether it was written. Raises as the others."""
        from obstore.exceptions import AlreadyExistsError

        try:
            await self._objects.put_async(name, content, mode="create")
        except AlreadyExistsError:
            return False
        except Exception as error:
            raise _unusable(error) from error
        return True

    async def put(self, name: str, content: bytes | Path) -> None:
        """Write an object, or a copy of a file, in place of an older one."""
        try:
            await self._objects.put_async(name, content)
        except Exception as error:
            raise _unusable(error) from error

    async def get(self, name: str) -> bytes | None:
        """The content of an object; None if there is none."""
        try:
            found = await self._objects.get_async(name)
            return bytes(await found.bytes_async())
        except FileNotFoundError:
            return None
        except Exception as error:
            raise _unusable(error) from error

    async def get_range(self, name: str, start: int, length: int) -> bytes:
        """A part of an object. Raises FileNotFoundError if there is none of this name."""
        try:
            return bytes(await self._objects.get_range_async(name, start=start, length=length))
        except FileNotFoundError:
            raise
        except Exception as error:
            raise _unusable(error) from error

    async def stream(self, name: str) -> AsyncGenerator[bytes, None]:
        """The content of an object, in pieces. Raises FileNotFoundError."""
        try:
            found = await self._objects.get_async(name)
            async for piece in found.stream(min_chunk_size=_READ_BYTES):
                yield bytes(piece)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise _unusable(error) from error

    async def entries(self, prefix: str) -> list[Entry]:
        """All objects below a prefix, which ends at a slash, in order of their names."""
        found: list[Entry] = []
        try:
            async for page in self._objects.list(prefix):
                found += [_entry(meta) for meta in page]
        except Exception as error:
            raise _unusable(error) from error
        return sorted(found, key=lambda entry: entry.name)

    async def folders(self, prefix: str) -> list[str]:
        """The names of the folders right below a prefix, in order."""
        try:
            found = await self._objects.list_with_delimiter_async(prefix)
        except Exception as error:
            raise _unusable(error) from error
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found["common_prefixes"])

    async def delete(self, names: Iterable[str]) -> None:
        """Delete these objects, those that exist."""
        limit = asyncio.Semaphore(_AT_ONCE)

        async def delete(name: str) -> None:
            async with limit:
                try:
                    await self._objects.delete_async(name)
                except FileNotFoundError:
                    pass
                except Exception as error:
                    raise _unusable(error) from error

        await asyncio.gather(*map(delete, names))

    async def delete_below(self, prefix: str) -> None:
        """Delete all objects below a prefix."""
        await self.delete(entry.name for entry in await self.entries(prefix))


def _entry(meta: Any) -> Entry:
    return Entry(meta["path"], meta["size"], meta["last_modified"])


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _unusable(error: Exception) -> StatusError:
    """The error for callers. The store's own words are for the log: they may name hosts and paths."""
    return StatusError(Reason.NO_CAPACITY, "the store of files and batches cannot be used now", retry_after_s=5.0)
