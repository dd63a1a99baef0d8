"""Memory that outlives the worker's process: an in-memory file that the next process opens again.

`headrace serve` creates the file (memfd) and passes its descriptor to each process of a worker in turn. Elsewhere the
worker finds its file by name in a directory on a tmpfs or hugetlbfs. The contents survive a SIGKILL.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import logging
import mmap
import os
import re
import stat
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.worker.config import ConfigurationError

log = logging.getLogger(__name__)

_PREFIX = "headrace-kv-"
# The names of workers' files. Other files of the directory, such as those of a disk store, begin in the same way.
_NAME = re.compile(_PREFIX + "[0-9a-f]{16}")
# The size of a huge page on x86-64, and on ARM with 4 KiB pages.
HUGE_PAGE_BYTES = 2 << 20
# Workers remove files in their directory that have no owner and were not used for this long.
STALE_AFTER_S = 900.0
# How long to wait for the file's lock: the kernel may still be ending the previous process.
_LOCK_PATIENCE_S = 5.0
# How long to wait for workers that make their caches. To free the memory of a large old cache takes a minute.
_SIZING_PATIENCE_S = 300.0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


class HostMemory:
    """An open in-memory file. `path` is None if the file came as an inherited descriptor."""

    def __init__(self, descriptor: int, path: Path | None = None) -> None:
        self.descriptor = descriptor
        self.path = path
        self._page_bytes = max(os.fstat(descriptor).st_blksize, HUGE_PAGE_BYTES)

    @property
    def size_bytes(self) -> int:
        """The size of the file in bytes."""
        return os.fstat(self.descriptor).st_size

    @property
    def resident_bytes(self) -> int:
        """Memory that the file occupies now. cgroups charge it to the process that touched it first."""
        return os.fstat(self.descriptor).st_blocks * 512

    @property
    def room_bytes(self) -> int | None:
        """The largest size for which the file system has room, if the files of other workers grow to their full size;
        None without a limit. Touching a page beyond it ends the process with SIGBUS."""
        if self.path is None:
            return None
        found = os.fstatvfs(self.descriptor)
        if not found.f_blocks:
            return None
        return max(0, found.f_bavail * found.f_frsize - _promised_bytes(self.path)) + self.resident_bytes

    def clear(self) -> None:
        """Truncate the file and free its memory."""
        os.ftruncate(self.descriptor, 0)

    @contextlib.contextmanager
    def sizing(self) -> Iterator[None]:
        """Wait until no other worker of this user is between `room_bytes` and `resize` in the directory. Raises
        ConfigurationError if that takes minutes."""
        if self.path is None:
            yield
            return
        # Not the directory itself: in /dev/shm, anybody could lock it.
        path = self.path.parent / f"{_PREFIX}{os.geteuid()}.lock"
        descriptor = _locked_file(path)
        if descriptor is None:
            log.info("waits for %s: another worker makes its KV cache", path)
            descriptor = _locked_in_time(path, _SIZING_PATIENCE_S, "is locked; end the process that holds it")
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)

    def check_room(self, size_bytes: int) -> None:
        """Raise ConfigurationError if the file system has too little room for a file of this size."""
        size_bytes, room = self._in_pages(size_bytes), self.room_bytes
        if room is not None and size_bytes > room:
            raise ConfigurationError(
                f"--kv-memory: the file system of {self.path} has room for {room / 2**30:.2f} GiB beside other "
                f"workers, but the KV cache needs {size_bytes / 2**30:.2f} GiB; enlarge it, or choose a smaller "
                "--kv-cache-gb"
            )

    def resize(self, size_bytes: int) -> None:
        """Set the file's size to `size_bytes`, rounded up to whole pages. Raises ConfigurationError if the file system
        has too little room."""
        self.check_room(size_bytes)
        os.ftruncate(self.descriptor, self._in_pages(size_bytes))

    def map(self) -> npt.NDArray[np.uint8]:
        """Map the whole file, aligned for huge pages. It is unmapped when the last reference goes. Raises OSError."""
        size, reserved = self.size_bytes, self.size_bytes + self._page_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        start = _mmap(None, reserved, 0, flags, -1)
        aligned = start + -start % self._page_bytes
        _mmap(aligned, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, self.descriptor)
        memory = (ctypes.c_ubyte * size).from_address(aligned)
        weakref.finalize(memory, _libc().munmap, ctypes.c_void_p(start), ctypes.c_size_t(reserved)).atexit = False
        return np.frombuffer(memory, np.uint8)  # type: ignore[call-overload, no-any-return]

    def touch(self) -> None:
        """Update the file's time, which shows other workers that it is in use."""
        with contextlib.suppress(OSError):
            os.utime(self.descriptor)

    def remove(self) -> None:
        """Remove the file, if it has a name. Where that is not possible, another worker removes it later."""
        if self.path is not None:
            try:
                self.path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s cannot be removed: %s", self.path, error.strerror)

    def _in_pages(self, size_bytes: int) -> int:
        return -(-size_bytes // self._page_bytes) * self._page_bytes


def open_memory(where: str, worker_id: str) -> HostMemory:
    """Open the memory at `where`: `fd:N`, or a directory in which each worker has its own file. Raises
    ConfigurationError if it cannot be used."""
    if where.startswith("fd:"):
        return _inherited(where)
    directory = Path(where)
    try:
        if not directory.is_dir():
            raise ConfigurationError(f"--kv-memory {where} is not a directory; name one in a tmpfs, such as /dev/shm")
        name = _PREFIX + hashlib.sha256(worker_id.encode()).hexdigest()[:16]
        _prune(keep=directory / name)
        return _named(directory / name)
    except OSError as error:
        raise ConfigurationError(
            f"--kv-memory {where} cannot be used: {error.strerror}; choose another directory"
        ) from None


def _inherited(where: str) -> HostMemory:
    try:
        descriptor = int(where.removeprefix("fd:"))
        found = os.fstat(descriptor)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"--kv-memory {where} is not an open file ({error}); name a directory") from None
    if not stat.S_ISREG(found.st_mode):
        raise ConfigurationError(f"--kv-memory {where} is not a regular file; name a directory")
    os.set_inheritable(descriptor, False)
    return HostMemory(descriptor)


def _named(path: Path) -> HostMemory:
    problem = "is in use by another worker; give each worker its own --worker-id"
    memory = HostMemory(_locked_in_time(path, _LOCK_PATIENCE_S, problem), path)
    memory.touch()
    return memory


def _locked_in_time(path: Path, patience_s: float, problem: str) -> int:
    """Open and lock the file with this name. Raises ConfigurationError with the `problem` if it stays locked."""
    deadline_s = time.monotonic() + patience_s
    while (descriptor := _locked_file(path)) is None:
        if time.monotonic() > deadline_s:
            raise ConfigurationError(f"{path} {problem}")
        time.sleep(0.05)
    return descriptor


def is_private(found: os.stat_result) -> bool:
    """Whether this is a file that only this user can read."""
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _locked_file(path: Path, flags: int = os.O_CREAT) -> int | None:
    """Open and lock the file with this name. None if another process has locked it, or has just removed it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"--kv-memory: {path} cannot be opened: {error.strerror}; choose another directory"
        ) from None
    found = os.fstat(descriptor)
    if not is_private(found):
        os.close(descriptor)
        raise ConfigurationError(f"{path} must be a file that only this user can read (mode 0600); remove it")
    with contextlib.suppress(FileNotFoundError):
        if _locked(descriptor) and os.path.samestat(os.lstat(path), found):
            return descriptor
    os.close(descriptor)
    return None


def _others(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The files of other workers in the directory of `path`. Those of other users do not count, except root's: their
    size may be a lie, and what they really occupy is not free anyway."""
    for other in path.parent.glob(f"{_PREFIX}*"):
        if _NAME.fullmatch(other.name) and other.name != path.name:
            with contextlib.suppress(OSError):
                found = other.lstat()
                if stat.S_ISREG(found.st_mode) and found.st_uid in (0, os.geteuid()):
                    yield other, found


def _promised_bytes(path: Path) -> int:
    """The bytes by which the files of other workers in the directory of `path` may still grow."""
    return sum(max(0, found.st_size - 512 * found.st_blocks) for _, found in _others(path))


def _prune(keep: Path) -> None:
    """Remove the files of workers that have ended and not been restarted, in the directory of `keep`."""
    for path, found in _others(keep):
        if _is_stale(found):
            with contextlib.suppress(OSError, ConfigurationError):
                descriptor = _locked_file(path, flags=0)
                if descriptor is None:
                    continue
                try:
                    # The worker may have ended just now.
                    if _is_stale(os.fstat(descriptor)):
                        path.unlink()
                        log.info("removed %s, which no worker has used for %.0f s", path, time.time() - found.st_mtime)
                finally:
                    os.close(descriptor)


def _is_stale(found: os.stat_result) -> bool:
    return time.time() - found.st_mtime > STALE_AFTER_S


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
            raise
        return False
    return True


def advise(address: int, size_bytes: int, advice: int) -> None:
    """madvise(2). Raises OSError."""
    if _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), ctypes.c_int(advice)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    return libc


def _mmap(address: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
    """mmap(2) at a given address, which Python's mmap does not support. Raises OSError."""
    found = _libc().mmap(
        ctypes.c_void_p(address),
        ctypes.c_size_t(size),
        ctypes.c_int(protection),
        ctypes.c_int(flags),
        ctypes.c_int(descriptor),
        ctypes.c_long(0),
    )
    if found is None or found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(found)
