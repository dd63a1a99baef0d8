"""KV blocks in a file of fixed slots with an index by hash. All workers of a host share it.

    headrace-kv-ID.blocks   for each slot: a record (hash, parent, tokens, checksum), then the bytes of a block
    headrace-kv-ID.index    for each slot: its hash, and how valuable its block is (`disk_index.py`)

ID identifies the model and the layout of its cache. All workers map the index, and assign slots under a file lock. The
index is only a hint: a block that was read is used only if the slot's record and checksum match the request. This
detects torn writes, slots that another process has replaced, and damaged files; such a block is computed again. The
space is reserved when the file is created, so a full disk is reported at the start.

With a key, record and bytes are encrypted together, and the index has keyed hashes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

from headrace.worker.config import ConfigurationError
from headrace.worker.kv.chain import TOKEN_BYTES
from headrace.worker.kv.disk_cipher import CHECK_BYTES, BlockCipher
from headrace.worker.kv.disk_files import StoreFiles, starting, write_fully
from headrace.worker.kv.disk_index import Change, SlotIndex, index_bytes

_PAGE_BYTES = 4096


class DiskStore:
    """The slots for one model's blocks. Any thread may call `has` and `take_changes`. Only the tier's thread calls the
    other methods, because a store to the mapped index may wait for the disk.

    A block has `block_bytes` bytes, and its record `block_size` tokens.
    """

    def __init__(
        self,
        directory: Path,
        identity: str,
        size_bytes: int,
        block_bytes: int,
        block_size: int,
        key: bytes | None = None,
    ) -> None:
        """Open or create the store, encrypted if there is a `key`. Raises ConfigurationError if that fails."""
        self._record = struct.Struct(f"<QQI{TOKEN_BYTES * block_size}s")
        self._block_bytes = block_bytes
        self._cipher = None if key is None else BlockCipher(key, identity)
        record_bytes = _whole_pages(self._record.size + 4)
        self._data_offset = record_bytes
        self._slot_bytes = record_bytes + _whole_pages(block_bytes)
        if self._cipher is not None:
            self._sealed_bytes = self._record.size + 4 + block_bytes + self._cipher.OVERHEAD_BYTES
            self._slot_bytes = _whole_pages(self._sealed_bytes)
        self.num_slots = size_bytes // self._slot_bytes
        if not self.num_slots:
            raise ConfigurationError(
                f"--kv-disk-gb {size_bytes / 2**30:g} is too small for a block of {self._slot_bytes / 2**20:.1f} MiB; "
                "choose a larger size"
            )
        self._files = self._opened(directory, identity)
        self._blocks = self._files.blocks
        self._index = SlotIndex(self._files.index, self.num_slots)
        self._slot_of: dict[int, int] = {}
        self._changes: dict[int, bool] = {}
        self._changing = threading.Lock()
        self._known: dict[int, int] = {}  # with a key: the name of each block whose hash is known -> hash
        self.refresh()

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the index."""
        return len(self._slot_of)

    def has(self, block_hash: int) -> bool:
        """Whether the block was in the index at this process's last refresh."""
        name = self._name_of(block_hash)
        if name not in self._slot_of:
            return False
        self._learn(name, block_hash)
        return True

    def take_changes(self) -> dict[int, bool]:
        """The hashes that have come to the disk (True) or left it since the last call, as far as this process knows.
        With a key, a process knows only blocks that it has written or looked for. Any thread may call it."""
        with self._changing:
            changes, self._changes = self._changes, {}
        return changes

    def touch(self, block_hash: int) -> None:
        """Record that the block was in use until now. Of blocks used in the same second, the one touched last is the
        most valuable."""
        name = self._name_of(block_hash)
        slot = self._slot_of.get(name)
        if slot is not None:
            self._index.touch(slot, name)

    def count_hits(self, block_hashes: Sequence[int]) -> None:
        """Requests have found these blocks of one chain, given in their order, and use them. They stay longer on the
        disk."""
        for block_hash in reversed(block_hashes):
            name = self._name_of(block_hash)
            slot = self._slot_of.get(name)
            if slot is not None:
                self._index.count_hit(slot, name)

    def refresh(self) -> bool:
        """Read the changes that other processes made in the index. Returns whether there were any."""
        changes = self._index.take_changes()
        for change in changes:
            self._apply(change)
        return bool(changes)

    def write(self, block_hash: int, parent_hash: int, token_bytes: bytes, data: npt.NDArray[np.uint8]) -> bool:
        """Store a block in place of the least valuable one. Returns False if the store already had it, or if others
        write all slots. Raises OSError."""
        name = self._name_of(block_hash)
        self._index.prepare()
        with self._files.locked():
            self.refresh()
            if name in self._slot_of or not name:
                return False
            reservation = self._index.reserve()
            if reservation is None:
                return False
            self._apply(self._index.rename(reservation.slot, 0))
        is_written = False
        try:
            self._put(reservation.slot, self._record_of(block_hash, parent_hash, token_bytes, data), data)
            is_written = True
        finally:
            with self._files.locked():
                self.refresh()
                if self._index.release(reservation) and is_written and name not in self._slot_of:
                    self._apply(self._index.rename(reservation.slot, name))
                    self._learn(name, block_hash)
        return True

    def read(self, block_hash: int, parent_hash: int, token_bytes: bytes, data: npt.NDArray[np.uint8]) -> bool:
        """Read a block into `data`. Returns False if it is missing or damaged. A block that is damaged or cannot be
        read is removed from the index. Raises OSError."""
        name = self._name_of(block_hash)
        slot = self._slot_of.get(name)
        if slot is None:
            return False
        try:
            record = self._get(slot, data)
        except OSError:
            self._drop(name, slot)
            raise
        if record == self._record_of(block_hash, parent_hash, token_bytes, data):
            return True
        self._drop(name, slot)
        return False

    def flush(self) -> None:
        """Wait until all writes are on the disk, and free their pages in the page cache. Raises OSError."""
        os.fdatasync(self._blocks)
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._blocks, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Let other workers remove the store if they need room. It cannot be used any more."""
        self._files.close()

    def _name_of(self, block_hash: int) -> int:
        return block_hash if self._cipher is None else self._cipher.name_of(block_hash)

    def _record_of(self, block_hash: int, parent_hash: int, token_bytes: bytes, data: npt.NDArray[np.uint8]) -> bytes:
        raw = self._record.pack(block_hash, parent_hash, crc32(data.data), token_bytes)
        return raw + crc32(raw).to_bytes(4, "little")

    def _put(self, slot: int, record: bytes, data: npt.NDArray[np.uint8]) -> None:
        start = slot * self._slot_bytes
        if self._cipher is not None:
            write_fully(self._blocks, self._cipher.seal(record, data).data, start)
            return
        write_fully(self._blocks, record, start)
        write_fully(self._blocks, data.data, start + self._data_offset)

    def _get(self, slot: int, data: npt.NDArray[np.uint8]) -> bytes | None:
        """Read a slot's bytes into `data`. Returns its record; None if it is damaged."""
        start, num_bytes = slot * self._slot_bytes, self._record.size + 4
        if self._cipher is None:
            record = os.pread(self._blocks, num_bytes, start)
            is_whole = os.preadv(self._blocks, [data.data], start + self._data_offset) == len(data)
            return record if is_whole else None
        return self._cipher.open(os.pread(self._blocks, self._sealed_bytes, start), data)

    def _drop(self, name: int, slot: int) -> None:
        with self._files.locked():
            self.refresh()
            if self._slot_of.get(name) == slot:
                self._apply(self._index.rename(slot, 0))

    def _apply(self, change: Change) -> None:
        """Record that a slot has another block now, or none."""
        if self._slot_of.get(change.before) == change.slot:
            del self._slot_of[change.before]
            self._note(change.before, is_there=False)
        if change.after:
            self._slot_of[change.after] = change.slot
            self._note(change.after, is_there=True)

    def _note(self, name: int, *, is_there: bool) -> None:
        block_hash = name if self._cipher is None else self._known.get(name, 0)
        if self._cipher is not None and not is_there:
            self._known.pop(name, None)
        if block_hash:
            with self._changing:
                self._changes[block_hash] = is_there

    def _learn(self, name: int, block_hash: int) -> None:
        """Record the hash of a block on an encrypted disk, because it is known now."""
        if self._cipher is not None and name not in self._known:
            self._known[name] = block_hash
            with self._changing:
                self._changes[block_hash] = True

    def _opened(self, directory: Path, identity: str) -> StoreFiles:
        """Open the files, and reserve their space."""
        check = bytes(CHECK_BYTES) if self._cipher is None else self._cipher.check
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with starting(directory):
                files = StoreFiles(directory, identity)
                try:
                    with files.locked():
                        files.reserve(self.num_slots * self._slot_bytes, index_bytes(self.num_slots), check)
                except BaseException:
                    files.close()
                    raise
        except OSError as error:
            what = "has too little room for --kv-disk-gb" if error.errno == errno.ENOSPC else "fails"
            reason = f"{error.filename or directory}: {error.strerror}"
            raise ConfigurationError(f"--kv-disk {what} ({reason}); choose another size or directory") from None
        return files


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
