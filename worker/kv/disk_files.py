"""The two files of a store of KV blocks: opened, reserved in full, and removed when nobody uses them.

A worker holds a shared lock on its `.blocks` file for as long as it uses the store. Workers that lack room when they
start remove the stores that they can lock alone, the oldest first. These belong to models or layouts of the cache that
are not served now.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from headrace.common.host_memory import GIB
from headrace.worker.config import ConfigurationError
from headrace.worker.kv.disk_cipher import CHECK_BYTES
from headrace.worker.kv.disk_index import CHECK_OFFSET
from headrace.worker.kv.host_memory import is_private

log = logging.getLogger(__name__)

_PREFIX = "headrace-kv-"
_NAME = re.compile(rf"{_PREFIX}([0-9a-f]{{16}})\.(?:blocks|index)")


class StoreFiles:
    """The open files of one store: the descriptors `blocks` and `index`. No other worker removes them before
    `close`."""

    def __init__(self, directory: Path, identity: str) -> None:
        """Open or create the files. Raises OSError, or ConfigurationError if others may have changed them."""
        self._blocks_path, self._index_path = paths_of(directory, identity)
        self.blocks = _in_use(self._blocks_path)
        try:
            self.index = _own(self._index_path)
        except (OSError, ConfigurationError):
            os.close(self.blocks)
            raise
        # Stores are removed in the order of their last use.
        os.utime(self.index)

    def close(self) -> None:
        """Close the files. Other workers may remove them now, if nobody else uses them."""
        os.close(self.index)
        os.close(self.blocks)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Wait until no other worker changes the index. Raises OSError."""
        fcntl.flock(self.index, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.index, fcntl.LOCK_UN)

    def reserve(self, blocks_bytes: int, index_bytes: int, check: bytes) -> None:
        """Reserve the space of both files. `check` identifies the key of a new store, and is compared with that of an
        old one. The caller holds the lock. An earlier process may have been killed while it did this. Raises
        ConfigurationError or OSError."""
        num_bytes = os.fstat(self.blocks).st_size
        if num_bytes:
            self._check_first_use(num_bytes, blocks_bytes, index_bytes, check)
        if num_bytes < blocks_bytes:
            self._make_room(blocks_bytes + index_bytes - 512 * os.fstat(self.blocks).st_blocks)
        if not num_bytes:
            self._clear_index(index_bytes, check)
        # A store to a mapped page for which the disk has no room kills the process.
        os.posix_fallocate(self.index, 0, index_bytes)
        if num_bytes < blocks_bytes:
            try:
                os.posix_fallocate(self.blocks, 0, blocks_bytes)
            except OSError:
                os.ftruncate(self.blocks, num_bytes)
                raise

    def _make_room(self, num_bytes: int) -> None:
        """Remove stores that nobody uses until there is room for this many bytes. Raises ConfigurationError."""
        directory = self._blocks_path.parent
        others = [identity for identity in _identities(directory) if self._blocks_path.name != _blocks_name(identity)]
        while (free_bytes := _free_bytes(self.blocks)) < num_bytes:
            if not others:
                raise ConfigurationError(
                    f"--kv-disk {directory} has too little room for --kv-disk-gb: {free_bytes / GIB:.1f} GiB are free, "
                    f"and {num_bytes / GIB:.1f} GiB are needed{_remaining(directory, self._blocks_path)}; choose "
                    "another size or directory"
                )
            _remove_unused(directory, others.pop(0))

    def _check_first_use(self, num_bytes: int, blocks_bytes: int, index_bytes: int, check: bytes) -> None:
        """Check that the files are used with their first key and size. Raises ConfigurationError."""
        if num_bytes == blocks_bytes and os.fstat(self.index).st_size != index_bytes:
            self._clear_index(index_bytes, check)
        found = os.pread(self.index, CHECK_BYTES, CHECK_OFFSET).ljust(CHECK_BYTES, b"\0")
        if found != check:
            what = "with another key" if any(found) and any(check) else "without a key" if any(check) else "with a key"
            remedy = "name that one with --kv-disk-key" if any(found) else "leave --kv-disk-key out"
            raise ConfigurationError(f"{self._blocks_path} was created {what}; {remedy}, or remove the file")
        if num_bytes > blocks_bytes or os.fstat(self.index).st_size != index_bytes:
            raise ConfigurationError(
                f"{self._blocks_path} was created with another --kv-disk-gb; use the same size, or remove the file"
            )

    def _clear_index(self, index_bytes: int, check: bytes) -> None:
        # Set the right size last. Do not truncate the file first, because others may have mapped it.
        write_fully(self.index, (bytes(CHECK_OFFSET) + check).ljust(index_bytes, b"\0"), 0)
        os.ftruncate(self.index, index_bytes)


def paths_of(directory: Path, identity: str) -> tuple[Path, Path]:
    """The paths of a store's files in `directory`: that of the blocks, and that of the index."""
    return directory / _blocks_name(identity), directory / f"{_PREFIX}{identity}.index"


@contextlib.contextmanager
def starting(directory: Path) -> Iterator[None]:
    """Wait until no other worker reserves space in the directory. Where directories cannot be locked, two workers may
    count the same room, and one of them gets an OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_fully(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """pwrite(2) until everything is written. Raises OSError."""
    left = memoryview(data)
    while left:
        num_written = os.pwrite(descriptor, left, offset)
        left, offset = left[num_written:], offset + num_written


def _blocks_name(identity: str) -> str:
    return f"{_PREFIX}{identity}.blocks"


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _own(path: Path) -> int:
    """Open the file. ConfigurationError if other users can read or change it, because its blocks might then come from
    them."""
    descriptor = _opened(path)
    found = os.fstat(descriptor)
    if not is_private(found) or found.st_nlink > 1:
        os.close(descriptor)
        raise ConfigurationError(
            f"{path} must be a file with one name that only this user can read (mode 0600); remove it"
        )
    return descriptor


def _in_use(path: Path) -> int:
    """Open the file, and lock it against removal."""
    while True:
        descriptor = _own(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_at(path, descriptor):
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        # It was removed before it was locked.
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _free_bytes(descriptor: int) -> int:
    found = os.fstatvfs(descriptor)
    return found.f_bavail * found.f_frsize


def _identities(directory: Path) -> list[str]:
    """The stores in the directory that belong to this user, the least recently used first."""
    used_s: dict[str, float] = {}
    for entry in os.scandir(directory):
        name = _NAME.fullmatch(entry.name)
        if name is None:
            continue
        with contextlib.suppress(OSError):
            found = entry.stat(follow_symlinks=False)
            if _is_own(found):
                used_s[name[1]] = max(found.st_mtime, used_s.get(name[1], 0.0))
    return sorted(used_s, key=lambda identity: used_s[identity])


def _is_own(found: os.stat_result) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1


def _remove_unused(directory: Path, identity: str) -> None:
    """Remove a store if nobody uses it."""
    blocks_path, index_path = paths_of(directory, identity)
    with contextlib.suppress(OSError):
        # If only the index is left, the new file serves as the lock.
        descriptor = _opened(blocks_path)
        try:
            found = os.fstat(descriptor)
            if not _is_own(found):
                return
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(blocks_path, descriptor) or (index_path.exists() and not _is_own(index_path.lstat())):
                return
            # Whoever comes after a kill in between makes a new index.
            index_path.unlink(missing_ok=True)
            # This frees the space even if another program, such as a backup, has the file open.
            os.ftruncate(descriptor, 0)
            blocks_path.unlink()
        finally:
            os.close(descriptor)
        log.warning(
            "removed %s (%.1f GiB), which no worker uses, because --kv-disk had too little room",
            blocks_path,
            512 * found.st_blocks / GIB,
        )


def _remaining(directory: Path, own: Path) -> str:
    """Describe the size of the stores that remain in the directory, for an error message."""
    found = []
    for path in sorted(directory.glob(f"{_PREFIX}*.blocks")):
        with contextlib.suppress(OSError):
            about = path.lstat()
            if path != own:
                why = "in use" if about.st_uid == os.geteuid() else "another user's"
                found.append(f"{path.name} ({512 * about.st_blocks / GIB:.1f} GiB, {why})")
    return f", beside {', '.join(found)}" if found else ""
