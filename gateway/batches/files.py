"""The files of tenants, in the store.

TENANT/files/ID/content     the bytes
TENANT/files/ID/meta.json   the file object; written last, so a file without it is not there yet
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.gateway.batches.records import FileObject, new_id, now_s, tenant_folder
from headrace.gateway.batches.store import BatchStore
from headrace.gateway.edge.failures import HttpError
from headrace.gateway.edge.wire import encode
from headrace.protos.status import Reason, StatusError

MIB = 1 << 20
DAY_S = 24 * 3600
_MAX_SHOWN_CHARS = 64


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of files and batches. Those of a tenant hold for all its keys together."""

    max_file_bytes: int = 200 * MIB
    max_tenant_bytes: int = 2048 * MIB
    max_tenant_batches: int = 100
    """Batches of a tenant that have not ended."""
    max_lines: int = 50_000
    max_line_bytes: int = 16 * MIB
    retention_s: int = 30 * DAY_S


class Files:
    """The files of all tenants."""

    def __init__(self, store: BatchStore, bounds: Bounds) -> None:
        self._store = store
        self._bounds = bounds

    async def add(
        self,
        tenant: str,
        content: Path | bytes,
        num_bytes: int,
        filename: str,
        purpose: str,
        ttl_s: int | None = None,
        file_id: str = "",
    ) -> FileObject:
        """Keep a file for `ttl_s`, or as long as files are kept; with a new id if none is given. The tenant's room is
        checked before, see `check_room`. Raises `StatusError`."""
        now = now_s()
        kept_s = self._bounds.retention_s if ttl_s is None else min(ttl_s, self._bounds.retention_s)
        file = FileObject(
            id=file_id or new_id("file-"),
            bytes=num_bytes,
            created_at=now,
            expires_at=now + kept_s,
            filename=filename,
            purpose=purpose,
        )
        folder = self._folder(tenant, file.id)
        await self._store.put(f"{folder}/content", content)
        await self._store.put(f"{folder}/meta.json", encode(file))
        return file

    async def check_room(self, tenant: str, num_bytes: int) -> None:
        """Raises `HttpError` (413) if the tenant's files would exceed its bytes with a file of this size."""
        entries = await self._store.entries(f"{tenant_folder(tenant)}/files/")
        used = sum(entry.num_bytes for entry in entries)
        most = self._bounds.max_tenant_bytes
        if used + num_bytes > most:
            problem = f"your files have {used} bytes, and with this one more than {most}, the maximum of a tenant"
            raise HttpError(413, "storage_full", f"{problem}; delete files that you no longer need", param="file")

    async def find(self, tenant: str, file_id: str, field: str = "file_id") -> FileObject:
        """A file of this tenant. Raises `StatusError` (NOT_FOUND)."""
        file = None
        if _is_id(file_id):
            raw = await self._store.get(f"{self._folder(tenant, file_id)}/meta.json")
            file = None if raw is None else msgspec.json.decode(raw, type=FileObject)
        if file is None or file.expires_at <= now_s():
            problem = f"there is no file '{file_id[:_MAX_SHOWN_CHARS]}'; was it deleted, or has it expired?"
            raise StatusError(Reason.NOT_FOUND, problem, field=field)
        return file

    async def of_tenant(self, tenant: str) -> list[FileObject]:
        """All files of this tenant, the oldest first."""
        now = now_s()
        found = []
        for entry in await self._store.entries(f"{tenant_folder(tenant)}/files/"):
            if entry.name.endswith("/meta.json"):
                raw = await self._store.get(entry.name)
                file = None if raw is None else msgspec.json.decode(raw, type=FileObject)
                if file is not None and file.expires_at > now:
                    found.append(file)
        return sorted(found, key=lambda file: (file.created_at, file.id))

    def content(self, tenant: str, file_id: str) -> AsyncGenerator[bytes, None]:
        """The bytes of a file that was found, in pieces. Raises FileNotFoundError if it is deleted while it is read."""
        return self._store.stream(f"{self._folder(tenant, file_id)}/content")

    async def part(self, tenant: str, file_id: str, start: int, length: int) -> bytes:
        """Some bytes of a file. Raises FileNotFoundError."""
        return await self._store.get_range(f"{self._folder(tenant, file_id)}/content", start, length)

    async def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file that was found."""
        folder = self._folder(tenant, file_id)
        await self._store.delete([f"{folder}/meta.json"])
        await self._store.delete([f"{folder}/content"])

    async def sweep(self, folder: str, now: int) -> None:
        """Delete the files in a tenant's folder that have expired, and contents whose upload broke off."""
        entries = await self._store.entries(f"{folder}/files/")
        whole = {entry.name.removesuffix("/meta.json") for entry in entries if entry.name.endswith("/meta.json")}
        for entry in entries:
            file = entry.name.rpartition("/")[0]
            if file not in whole:
                if now - entry.written.timestamp() > DAY_S:
                    await self._store.delete([entry.name])
            elif entry.name.endswith("/meta.json"):
                raw = await self._store.get(entry.name)
                if raw is not None and msgspec.json.decode(raw, type=FileObject).expires_at <= now:
                    await self._store.delete([entry.name, f"{file}/content"])

    def _folder(self, tenant: str, file_id: str) -> str:
        return f"{tenant_folder(tenant)}/files/{file_id}"


def _is_id(text: str) -> bool:
    """Whether the text may be an id, so that it is safe in a name of the store."""
    digits = text.removeprefix("file-")
    return digits != text and 0 < len(digits) <= _MAX_SHOWN_CHARS and digits.isascii() and digits.isalnum()
