"""KV blocks in a file of fixed slots with an index by hash. All workers of a host share it.

    headrace-kv-ID.blocks   for each slot: a record (hash, parent, tokens, checksum), then the bytes of a block
    headrace-kv-ID.index    for each slot: its hash, time of last use, and number of hits

ID identifies the model and the layout of its cache. All workers map the index, and assign slots under a file lock. The
index is only a hint: a block that was read is used only if the slot's record and checksum match the request. This
detects torn writes, slots that another process has replaced, and damaged files; such a block is computed again. The
space is reserved when the file is created, so a full disk is reported at the start.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from headrace.worker.config import ConfigurationError
from headrace.worker.kv.block_pool import TOKEN_BYTES

_PREFIX = "headrace-kv-"
_PAGE_BYTES = 4096
# In the choice of the slot to replace, one hit counts as much as a last use that is this many seconds later.
_FOUND_WORTH_S = 600
_ENTRY = np.dtype([("hash", "<u8"), ("used_s", "<u4"), ("found", "<u4")])


class DiskStore:
    """The slots for one model's blocks. Only the tier's thread reads and writes; any thread may call `has`.

    A block has `block_bytes` bytes, and its record `block_size` tokens.
    """

    def __init__(self, directory: Path, identity: str, size_bytes: int, block_bytes: int, block_size: int) -> None:
        """Open or create the store. Raises ConfigurationError if that fails."""
        self._record = struct.Struct(f"<QQI{TOKEN_BYTES * block_size}s")
        self._block_bytes = block_bytes
        record_bytes = -(-(self._record.size + 4) // _PAGE_BYTES) * _PAGE_BYTES
        self._data_offset = record_bytes
        self._slot_bytes = record_bytes + -(-block_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self.num_slots = size_bytes // self._slot_bytes
        if not self.num_slots:
            raise ConfigurationError(
                f"--kv-disk-gb {size_bytes / 2**30:g} is too small for a block of {self._slot_bytes / 2**20:.1f} MiB; "
                "choose a larger size"
            )
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._blocks = _opened(directory / f"{_PREFIX}{identity}.blocks")
            self._index_file = _opened(directory / f"{_PREFIX}{identity}.index")
            with self._locked():
                self._reserve(directory)
        except OSError as error:
            what = "has too little room for --kv-disk-gb" if error.errno == errno.ENOSPC else f"fails: {error.strerror}"
            raise ConfigurationError(f"--kv-disk {directory} {what}; choose another size or directory") from None
        mapped = mmap.mmap(self._index_file, self.num_slots * _ENTRY.itemsize)
        self._entries = np.frombuffer(mapped, _ENTRY)
        self._seen: npt.NDArray[np.uint64] = np.zeros(self.num_slots, np.uint64)
        self._slot_of: dict[int, int] = {}
        self.refresh()

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the index."""
        return len(self._slot_of)

    def has(self, block_hash: int) -> bool:
        """Whether the block was in the index at this process's last refresh."""
        return block_hash in self._slot_of

    def refresh(self) -> None:
        """Read the changes of other processes from the index."""
        now = self._entries["hash"].copy()
        for slot in np.flatnonzero(now != self._seen).tolist():
            before, after = int(self._seen[slot]), int(now[slot])
            if self._slot_of.get(before) == slot:
                del self._slot_of[before]
            if after:
                self._slot_of[after] = slot
        self._seen = now

    def write(self, block_hash: int, parent_hash: int, token_bytes: bytes, data: npt.NDArray[np.uint8]) -> bool:
        """Store a block in place of the least valuable one. Returns False if the store already had it. Raises
        OSError."""
        with self._locked():
            self.refresh()
            if block_hash in self._slot_of or not block_hash:
                return False
            slot = self._least_valuable()
            self._enter(slot, 0)
            # A recent time of use keeps other processes from choosing this slot while it is written.
            self._entries["used_s"][slot] = int(time.time())
        raw = self._record.pack(block_hash, parent_hash, crc32(data.data), token_bytes)
        record = raw + crc32(raw).to_bytes(4, "little")
        _write(self._blocks, record, slot * self._slot_bytes)
        _write(self._blocks, data.data, slot * self._slot_bytes + self._data_offset)
        with self._locked():
            self.refresh()
            if block_hash not in self._slot_of:
                self._entries["found"][slot] = 0
                self._enter(slot, block_hash)
        return True

    def read(self, block_hash: int, parent_hash: int, token_bytes: bytes, data: npt.NDArray[np.uint8]) -> bool:
        """Read a block into `data`. Returns False if it is missing or damaged, and removes a damaged one from the
        index. Raises OSError."""
        slot = self._slot_of.get(block_hash)
        if slot is None:
            return False
        raw = os.pread(self._blocks, self._record.size + 4, slot * self._slot_bytes)
        is_read = os.preadv(self._blocks, [data.data], slot * self._slot_bytes + self._data_offset) == len(data)
        wanted = self._record.pack(block_hash, parent_hash, crc32(data.data), token_bytes)
        if is_read and raw == wanted + crc32(wanted).to_bytes(4, "little"):
            self._entries["used_s"][slot] = int(time.time())
            self._entries["found"][slot] += 1
            return True
        with self._locked():
            self.refresh()
            if self._slot_of.get(block_hash) == slot:
                self._enter(slot, 0)
        return False

    def flush(self) -> None:
        """Wait until all writes are on the disk, and free their pages in the page cache. Raises OSError."""
        os.fdatasync(self._blocks)
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._blocks, 0, 0, os.POSIX_FADV_DONTNEED)

    def _enter(self, slot: int, block_hash: int) -> None:
        before = int(self._seen[slot])
        if self._slot_of.get(before) == slot:
            del self._slot_of[before]
        self._entries["hash"][slot] = self._seen[slot] = block_hash
        if block_hash:
            self._slot_of[block_hash] = slot

    def _least_valuable(self) -> int:
        worth = self._entries["used_s"] + np.int64(_FOUND_WORTH_S) * np.minimum(self._entries["found"], 100)
        return int(np.argmin(worth))

    def _reserve(self, directory: Path) -> None:
        wanted = self.num_slots * self._slot_bytes
        if os.fstat(self._blocks).st_size != wanted:
            if os.fstat(self._blocks).st_size:
                raise ConfigurationError(
                    f"the files in --kv-disk {directory} were created with another --kv-disk-gb; use the same size, or "
                    "remove the files"
                )
            found = os.fstatvfs(self._blocks)
            if found.f_bavail * found.f_frsize < wanted:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            try:
                os.posix_fallocate(self._blocks, 0, wanted)
            except OSError:
                os.ftruncate(self._blocks, 0)
                raise
        os.ftruncate(self._index_file, self.num_slots * _ENTRY.itemsize)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._index_file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._index_file, fcntl.LOCK_UN)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _write(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    left = memoryview(data)
    while left:
        num_written = os.pwrite(descriptor, left, offset)
        left, offset = left[num_written:], offset + num_written
