"""Files that clients of Ollama upload before they create a model from them.

    POST /api/blobs/sha256:...    ->  DIR/sha256-...               checked against its digest
    POST /api/create {"files"}    ->  DIR/models/NAME-DIGEST.gguf  a link, by which the host finds and converts the file

A file is removed when a model has been made of it, since the model's own files are then in the host's cache, or when a
day has passed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

from headrace.gateway.checks import invalid
from headrace.gateway.edge.failures import HttpError
from headrace.protos.status import Reason, StatusError

KEPT_S = 24 * 3600.0
# A file that arrives grows at least this often. One that did not is of a gateway that has ended.
_GROWS_S = 3600.0
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,199}\.gguf")
_PIECE = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_MAGIC = b"GGUF"
# Written by a thread at a time.
_WRITE_BYTES = 1 << 20
# Of the disk, left for others.
_SPARE_BYTES = 1 << 30


class Blobs:
    """The uploads of all gateways that have this folder, which their model host can read. `max_bytes` is the most that
    they may have together, those that arrive included."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Makes the folder. Raises OSError."""
        self._folder = folder
        self._max_bytes = max_bytes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def has(self, digest: str) -> bool:
        """Whether the file of this digest is there. Raises `StatusError`."""
        return self._path(digest, "digest").is_file()

    @property
    def num_free_bytes(self) -> int:
        """How many more bytes may be uploaded now."""
        left = self._max_bytes - sum(found.st_size for _, found in self._files())
        return max(min(left, shutil.disk_usage(self._folder).free - _SPARE_BYTES), 0)

    async def take(self, digest: str, pieces: AsyncIterator[bytes]) -> None:
        """Keep a file. Raises `StatusError` if it has another digest, `HttpError` if there is no room for it, and what
        `pieces` raises."""
        path = self._path(digest, "digest")
        self._remove_old()
        found, arriving = hashlib.sha256(), self._folder / f".{secrets.token_hex(16)}"
        held = bytearray()

        def write() -> None:
            if len(held) > (num_free := self.num_free_bytes):
                raise too_many_bytes(num_free)
            found.update(held)
            file.write(held)
            file.flush()
            held.clear()

        try:
            with arriving.open("xb") as file:
                async for piece in pieces:
                    held += piece
                    if len(held) >= _WRITE_BYTES:
                        await asyncio.to_thread(write)
                write()
            if f"sha256-{found.hexdigest()}" != path.name:
                raise invalid("digest", f"digest: the file has the digest sha256:{found.hexdigest()}; send it again")
            arriving.rename(path)
        finally:
            arriving.unlink(missing_ok=True)

    @contextlib.contextmanager
    def laid_out(self, name: str, files: Mapping[str, str]) -> Iterator[Path]:
        """Context manager: the GGUF file that these files are, by name and digest, as the host reads it; of one in
        pieces, the first. Raises `StatusError`."""
        where = self._where(files)
        names = _names(f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)}-{self.content_of(files)}", files)
        for file, path in where.items():
            _check(file, path)
        with contextlib.ExitStack() as stack:
            links = self._folder / "models"
            links.mkdir(exist_ok=True)
            for file, path in where.items():
                link = links / names[file]
                link.unlink(missing_ok=True)
                os.link(path, link)
                stack.callback(link.unlink, missing_ok=True)
            yield links / min(names.values())

    def content_of(self, files: Mapping[str, str]) -> str:
        """A short digest of all files: no other content has the same. Raises `StatusError`."""
        names = sorted(path.name for path in self._where(files).values())
        return hashlib.sha256("".join(names).encode()).hexdigest()[:12]

    def _where(self, files: Mapping[str, str]) -> dict[str, Path]:
        return {file: self._path(digest, f"files[{file[:64]!r}]") for file, digest in files.items()}

    def forget(self, files: Mapping[str, str]) -> None:
        """Remove files from which a model was made."""
        for digest in files.values():
            self._path(digest, "files").unlink(missing_ok=True)

    def _remove_old(self) -> None:
        for path, found in self._files():
            kept_s = _GROWS_S if path.name.startswith(".") else KEPT_S
            if found.st_mtime < time.time() - kept_s:
                path.unlink(missing_ok=True)

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """All uploads. Other gateways may rename and remove theirs at any time."""
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                if stat.S_ISREG(found.st_mode):
                    yield path, found

    def _path(self, digest: str, field: str) -> Path:
        matched = _DIGEST.fullmatch(digest)
        if matched is None:
            raise invalid(field, f"{field} must be sha256: and 64 hexadecimal digits in lower case")
        return self._folder / f"sha256-{matched[1]}"


def too_many_bytes(num_bytes: int) -> HttpError:
    """An upload is over the bound."""
    remedy = "ask the operator for headrace models load FILE, or for a larger --ollama-blobs-gb"
    problem = f"there is room for {num_bytes} bytes of uploads here; {remedy}"
    return HttpError(413, "file_too_large", problem, [(b"connection", b"close")])


def _names(stem: str, files: Mapping[str, str]) -> dict[str, str]:
    """The name of each file for the host. Raises `StatusError` unless they are one GGUF file, or all pieces of one."""
    remedy = "export other formats with headrace pull, and ask the operator to serve them"
    for file in files:
        if _FILE.fullmatch(file) is None:
            raise invalid("files", f"files: {file[:64]!r} is not the name of a GGUF file, such as model.gguf; {remedy}")
    if len(files) == 1 and not any(map(_PIECE.search, files)):
        return dict.fromkeys(files, f"{stem}.gguf")
    pieces = {file: matched for file in files if (matched := _PIECE.search(file)) is not None}
    numbers = sorted(int(matched[1]) for matched in pieces.values())
    totals = {int(matched[2]) for matched in pieces.values()}
    if len(pieces) != len(files) or totals != {len(files)} or numbers != [*range(1, len(files) + 1)]:
        problem = "files must be one GGUF file, or all pieces of one (NAME-00001-of-00002.gguf)"
        raise invalid("files", f"{problem}; leave out others, such as projectors for images")
    return {file: f"{stem}{matched[0]}" for file, matched in pieces.items()}


def _check(file: str, path: Path) -> None:
    try:
        with path.open("rb") as opened:
            beginning = opened.read(len(_MAGIC))
    except FileNotFoundError:
        problem = f"files: no blob was uploaded for {file[:64]!r}; send it to POST /api/blobs/{path.name} first"
        raise StatusError(Reason.NOT_FOUND, problem, field="files") from None
    if beginning != _MAGIC:
        raise invalid("files", f"files: {file[:64]!r} is no GGUF file")
