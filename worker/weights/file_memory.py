"""Memory in an unlinked file, for values that are written once and seldom read again.

The kernel can write such pages to the disk and drop them, while pages without a file would stay in memory. Nothing is
unmapped before the process ends, because OpenVINO does not say when it has stopped reading.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

_ALIGNMENT = 64
# Arrays share pieces of at least this size, because each piece keeps a file open. Small arrays are not worth a file.
_PIECE_BYTES = 16 << 20
_SMALL_BYTES = 1 << 18
_SPARE_BYTES = 256 << 20
_MADV_DONTNEED = 4
# File systems that keep their files in memory.
_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}


_mapped_files: list[tuple[mmap.mmap, int]] = []
_ordinary_arrays: list[npt.NDArray[np.uint8]] = []


class FileMemory:
    """Arrays in files of a directory on a disk. Small arrays are in ordinary memory, and so are all arrays if no
    directory has room."""

    def __init__(self, directories: Sequence[Path] | None = None) -> None:
        wanted = default_directories() if directories is None else directories
        self._directories = [directory for directory in wanted if is_on_disk(directory)]
        self._rest = np.zeros(0, np.uint8)

    def array(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """New bytes, all 0. Their address is a multiple of 64."""
        if num_bytes < _SMALL_BYTES or not self._directories:
            return _ordinary(num_bytes)
        needed = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if needed > self._rest.size:
            self._rest = self._piece(max(needed, _PIECE_BYTES))
        found, self._rest = self._rest[:num_bytes], self._rest[needed:]
        return found

    def _piece(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        for directory in self._directories:
            try:
                return self._mapped(directory, num_bytes)
            except OSError as error:
                log.info("no memory in a file of %s: %s", directory, error.strerror)
        return _ordinary(num_bytes)

    def _mapped(self, directory: Path, num_bytes: int) -> npt.NDArray[np.uint8]:
        room = os.statvfs(directory)
        if room.f_bavail * room.f_frsize < num_bytes + _SPARE_BYTES:
            raise OSError(0, "the disk is nearly full")
        with tempfile.TemporaryFile(dir=directory, prefix="headrace-weights-") as file:
            # A full disk would otherwise end the process when a page is written.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            mapped = mmap.mmap(file.fileno(), num_bytes, mmap.MAP_SHARED)
        _mapped_files.append((mapped, num_bytes))
        return np.frombuffer(mapped, np.uint8)


def give_back_files() -> int:
    """Return the pages of all files to the kernel, which reads them again when they are used. Returns the number of
    bytes."""
    libc, given_back = ctypes.CDLL(None, use_errno=True), 0
    for mapped, num_bytes in _mapped_files:
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MADV_DONTNEED) == 0:
            given_back += num_bytes
    return given_back


def _ordinary(num_bytes: int) -> npt.NDArray[np.uint8]:
    whole = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    _ordinary_arrays.append(whole)
    start = -whole.ctypes.data % _ALIGNMENT
    return whole[start : start + num_bytes]


def default_directories() -> list[Path]:
    """TMPDIR if it is set, and the system's directory for large temporary files."""
    own = os.environ.get("TMPDIR")
    return [*([Path(own)] if own else []), Path("/var/tmp"), Path(tempfile.gettempdir())]


def is_on_disk(directory: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether files can be made in a directory and are on a disk. False if mounts cannot be read."""
    if not os.access(directory, os.W_OK | os.X_OK):
        return False
    try:
        lines = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return False
    place, best = f"{directory.resolve()}/", ("", "")
    for _device, point, kind, *_rest in lines:
        if place.startswith(point.rstrip("/") + "/") and len(point) >= len(best[0]):
            best = (point, kind)
    return bool(best[1]) and best[1] not in _IN_MEMORY
