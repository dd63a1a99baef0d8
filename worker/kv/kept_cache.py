"""The KV cache in memory that outlives the process. A new process restores the blocks of the previous one.

    0         header: format of the cache, as JSON with a checksum
    56 KiB    fingerprint of the model, 64 bytes and a checksum; empty until it is known
    60 KiB    number of starts since the worker was last ready, 4 bytes
    64 KiB    journal of the blocks
    ...       journal of the parts of blocks in slots, for layers with a window
    ...       arena, at the next huge page boundary

The previous process's blocks are checked while the model is loaded. They are restored if the format of the cache and
the fingerprint of the model are the same.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from headrace.common.host_memory import GIB
from headrace.worker.config import ConfigurationError
from headrace.worker.kv.arena import KVArena, arena_bytes
from headrace.worker.kv.block_bytes import BlockBytes, BlockShape
from headrace.worker.kv.cache import KVCache
from headrace.worker.kv.host_memory import HUGE_PAGE_BYTES, HostMemory
from headrace.worker.kv.huge_pages import HugePages
from headrace.worker.kv.journal import BlockJournal, Record, journal_bytes, recorded_in

log = logging.getLogger(__name__)

_MAGIC = b"hrkv0002"
_FINGERPRINT = 56 << 10
_STARTS = 60 << 10
_JOURNAL = 64 << 10
_HEADER = struct.Struct("<8sII")
_FINGERPRINT_BYTES = 64
# After this many starts without becoming ready, a worker starts with an empty cache.
MAX_STARTS = 3
_BLOCKS_AT_A_TIME = 64


@dataclass(frozen=True)
class CacheFormat:
    """The format of a cache. Blocks are restored only into a cache of the same format.

    `numerics` names everything else that the bytes of a block depend on, except the model (see `worker.numerics`).
    `sizing` is the size that the user requested. `num_blocks` includes the padding block. `in_slots` says which caches
    have parts of blocks in slots, of which there are `num_slots` with the one for padding.
    """

    numerics: str
    sizing: str
    num_blocks: int
    block_size: int
    shapes: tuple[BlockShape, ...]
    num_slots: int = 0
    in_slots: tuple[bool, ...] = ()

    @property
    def part_journal_offset(self) -> int:
        """The offset of the journal of parts in bytes."""
        return _JOURNAL + -(-journal_bytes(self.num_blocks, self.block_size) // 8) * 8

    @property
    def arena_offset(self) -> int:
        """The offset of the arena in bytes."""
        end = self.part_journal_offset + journal_bytes(self.num_slots, self.block_size)
        return -(-end // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES

    @property
    def counts(self) -> list[int]:
        """For each cache, the number of its blocks or slots, padding included."""
        return [self.num_slots if self._is_in_slots(number) else self.num_blocks for number in range(len(self.shapes))]

    @property
    def cache_bytes(self) -> int:
        """The size of all caches in bytes, without the alignment between them."""
        return sum(count * shape.num_bytes for count, shape in zip(self.counts, self.shapes, strict=True))

    def caches(self, arena: KVArena) -> tuple[BlockBytes, BlockBytes]:
        """The caches of blocks in an arena from which nothing was taken, and those of slots."""
        taken = [arena.take(count * shape.num_bytes) for count, shape in zip(self.counts, self.shapes, strict=True)]
        return self._caches_in(taken, in_slots=False), self._caches_in(taken, in_slots=True)

    def _caches_in(self, taken: Sequence[npt.NDArray[np.uint8]], *, in_slots: bool) -> BlockBytes:
        numbers = [number for number in range(len(taken)) if self._is_in_slots(number) is in_slots]
        return BlockBytes([taken[number] for number in numbers], [self.shapes[number] for number in numbers])

    def _is_in_slots(self, number: int) -> bool:
        return bool(self.in_slots) and self.in_slots[number]

    @property
    def total_bytes(self) -> int:
        """The size of the file in bytes: header, journals and caches."""
        return self.arena_offset + arena_bytes(self.cache_bytes, len(self.shapes))

    def pack(self) -> bytes:
        """The header of the file, as `unpack` reads it."""
        raw = json.dumps(asdict(self)).encode()
        return _HEADER.pack(_MAGIC, len(raw), crc32(raw)) + raw

    @staticmethod
    def unpack(header: bytes) -> CacheFormat | None:
        """The format in a header. None if the header is damaged or has another version."""
        magic, length, crc = _HEADER.unpack_from(header)
        raw = header[_HEADER.size : _HEADER.size + length]
        if magic != _MAGIC or len(raw) != length or crc32(raw) != crc:
            return None
        try:
            fields = json.loads(raw)
            shapes = tuple(BlockShape(*shape) for shape in fields["shapes"])
            return CacheFormat(**{**fields, "shapes": shapes, "in_slots": tuple(fields["in_slots"])})
        except (TypeError, KeyError, ValueError):
            return None  # of a version with other fields


class _Mapped(NamedTuple):
    """The mapped memory, and in it the journal of blocks and that of parts in slots, if there are any."""

    memory: npt.NDArray[np.uint8]
    journal: BlockJournal
    part_journal: BlockJournal | None


class KeptCache:
    """Owns the memory of one worker's KV cache. Call `adopt`, then `restore` once the fingerprint is known, then
    `note_ready`."""

    def __init__(self, memory: HostMemory, threads: int, *, huge_pages: bool = True) -> None:
        """Start to check the previous process's blocks, with `threads` threads. `huge_pages` asks the kernel for huge
        pages."""
        self.memory = memory
        self._huge_pages = huge_pages
        self.format = self._read_format()
        self._mapped: _Mapped | None = None
        self._checked: list[Record] = []
        self._checked_parts: list[Record] = []
        self._is_unwanted = False
        self._checking: threading.Thread | None = None
        self._num_recorded = 0
        if self.format is None:
            memory.clear()
            return
        if self._lacks_room() or (mapped := self._map_found(self.format)) is None:
            self.format = None  # its memory is freed when there is a new cache
            return
        self._mapped = mapped
        if self._count_start() > MAX_STARTS:
            log.warning("the worker was not ready in its last %d starts; its KV cache starts empty", MAX_STARTS)
            self.discard()
            return
        self._checking = threading.Thread(target=self._check, args=(mapped, threads), name="check-kv")
        self._checking.start()

    def format_like(self, wanted: CacheFormat) -> CacheFormat | None:
        """The format of the previous process's cache, if only the numbers of blocks and slots differ, and it still has
        room to grow; else None."""
        found = self.format
        if found is None or replace(found, num_blocks=0, num_slots=0) != replace(wanted, num_blocks=0, num_slots=0):
            return None
        return None if self._lacks_room() else found

    def adopt(self, wanted: CacheFormat) -> KVArena:
        """Return the arena for a cache of this format. It keeps the previous process's blocks if that cache had the
        same format. Raises OSError and ConfigurationError."""
        self.memory.check_room(wanted.total_bytes)
        if wanted != self.format:
            self.discard()
            if len(wanted.pack()) > _FINGERPRINT:
                raise ConfigurationError("the model has too many layers for a KV cache that outlives the worker")
            self.memory.resize(wanted.total_bytes)
            self._mapped = self._map(wanted)
            self.format = wanted
            self._write(0, wanted.pack())
            self._count_start()
        assert self._mapped is not None
        return self._arena_in(self._mapped.memory, wanted)

    @property
    def journal(self) -> BlockJournal:
        """The journal of the adopted arena."""
        assert self._mapped is not None, "adopt must be called first"
        return self._mapped.journal

    @property
    def part_journal(self) -> BlockJournal | None:
        """The journal of the adopted arena's parts in slots; None without slots."""
        assert self._mapped is not None, "adopt must be called first"
        return self._mapped.part_journal

    def old_blocks(self) -> list[int]:
        """Wait for the check, and return the blocks that can be restored, least recently used first."""
        if self._checking is not None:
            self._checking.join()
        return [record.block for record in _by_use(self._checked)]

    def old_slots(self) -> list[int]:
        """As `old_blocks`, the slots whose parts of blocks can be restored."""
        if self._checking is not None:
            self._checking.join()
        return [record.block for record in _by_use(self._checked_parts)]

    def restore(self, kv_cache: KVCache, fingerprint: str) -> None:
        """Make the previous process's blocks findable, except those that have been overwritten. Discard all of them if
        they belong to a model with another fingerprint."""
        start_s = time.monotonic()
        self.old_blocks()
        kept = [record for record in self._checked if self.journal.holds(record.block)]
        if self._fingerprint() != fingerprint:
            kept = []
        chains = in_chains(kept)
        _keep_only(self.journal, {record.block for record in chains})
        parts = self._parts_of(chains)
        if self.part_journal is not None:
            _keep_only(self.part_journal, set(parts.values()))
        blocks = [(record.block, record.content) for record in chains]
        kv_cache.restore(blocks, eviction_order(chains), list(parts.items()))
        self._write_fingerprint(fingerprint)
        if self._num_recorded:
            took_ms = 1000 * (time.monotonic() - start_s)
            log.info("restored %d of %d KV blocks in %.0f ms", len(chains), self._num_recorded, took_ms)
        self._checked = []
        self._checked_parts = []

    def _parts_of(self, chains: Sequence[Record]) -> dict[int, int]:
        """The slots that have the parts of these blocks, by block, least recently used first."""
        block_of = {record.content: record.block for record in chains}
        found: dict[int, int] = {}
        for record in _by_use(self._checked_parts):
            block = block_of.get(record.content)
            if block is not None and self.part_journal is not None and self.part_journal.holds(record.block):
                found.pop(block, None)  # the latest of several comes last
                found[block] = record.block
        return found

    def note_ready(self) -> None:
        """Reset the count of starts: the worker is ready."""
        self._write(_STARTS, bytes(4))

    def discard(self) -> None:
        """Discard the previous process's blocks and free their memory."""
        self._is_unwanted = True
        if self._checking is not None:
            self._checking.join()
            self._checking = None
        self._checked = []
        self._checked_parts = []
        self._num_recorded = 0
        self._mapped = self.format = None
        self.memory.clear()

    def _check(self, mapped: _Mapped, threads: int) -> None:
        if not self._fingerprint():
            return
        self._num_recorded = len(mapped.journal.recorded())
        with ThreadPoolExecutor(threads, "check-kv") as executor:
            self._checked = self._read(mapped.journal, executor)
            if mapped.part_journal is not None:
                self._checked_parts = self._read(mapped.part_journal, executor)

    def _read(self, journal: BlockJournal, executor: ThreadPoolExecutor) -> list[Record]:
        """The records of a journal whose content is whole."""
        blocks = journal.recorded()

        def read(some: Iterable[int]) -> list[Record]:
            found = [] if self._is_unwanted else [journal.read(block) for block in some]
            return [record for record in found if record is not None]

        starts = range(0, len(blocks), _BLOCKS_AT_A_TIME)
        return list(chain.from_iterable(executor.map(read, [blocks[at : at + _BLOCKS_AT_A_TIME] for at in starts])))

    def _read_format(self) -> CacheFormat | None:
        if self.memory.size_bytes < _JOURNAL:
            return None
        # Not through a mapping, where even reading takes memory for pages that were never written.
        found = CacheFormat.unpack(os.pread(self.memory.descriptor, _FINGERPRINT, 0))
        return found if found is not None and self.memory.size_bytes >= found.total_bytes else None

    def _lacks_room(self) -> bool:
        """Whether the cache could outgrow its file system. If so, its old content cannot be used, because touching a
        page for which there is no room ends the process."""
        room, size = self.memory.room_bytes, self.memory.size_bytes
        if room is None or size <= room:
            return False
        log.warning(
            "the file system of %s has room for %.2f GiB beside other workers; the KV cache of the previous process is "
            "not taken back, because it may grow to %.2f GiB",
            *(self.memory.path, room / GIB, size / GIB),
        )
        return True

    def _map_found(self, found: CacheFormat) -> _Mapped | None:
        try:
            return self._map(found)
        except OSError as error:  # huge pages of a hugetlbfs are reserved when they are mapped
            log.warning("the KV cache of the previous process is not taken back: %s", error.strerror)
            return None

    def _map(self, wanted: CacheFormat) -> _Mapped:
        memory = self.memory.map()
        arena = self._arena_in(memory, wanted)
        blocks, parts = wanted.caches(arena)
        size, of_blocks = wanted.block_size, memory[_JOURNAL : wanted.part_journal_offset]
        journal = self._journal_in(of_blocks, wanted.num_blocks, size, blocks)
        if not wanted.num_slots:
            return _Mapped(memory, journal, None)
        of_parts = memory[wanted.part_journal_offset : wanted.arena_offset]
        return _Mapped(memory, journal, self._journal_in(of_parts, wanted.num_slots, size, parts))

    def _arena_in(self, memory: npt.NDArray[np.uint8], wanted: CacheFormat) -> KVArena:
        return KVArena(
            wanted.cache_bytes,
            len(wanted.shapes),
            huge_pages=self._huge_pages,
            memory=memory,
            offset=wanted.arena_offset,
            descriptor=self.memory.descriptor,
        )

    def _journal_in(
        self, memory: npt.NDArray[np.uint8], count: int, block_size: int, contents: BlockBytes
    ) -> BlockJournal:
        """The journal of the `count` blocks of `block_size` tokens, or slots, with these contents."""
        on_growth = None
        if self._huge_pages and contents.caches:
            begun = max(recorded_in(memory, count), default=-1) + 1
            on_growth = HugePages(contents.caches, count, begun).reach
        return BlockJournal(memory, count, block_size, contents, on_growth)

    def _fingerprint(self) -> str:
        assert self._mapped is not None
        raw = self._mapped.memory[_FINGERPRINT : _FINGERPRINT + _FINGERPRINT_BYTES + 4].tobytes()
        text, crc = raw[:_FINGERPRINT_BYTES], int.from_bytes(raw[_FINGERPRINT_BYTES:], "little")
        return text.rstrip(b"\0").decode("ascii", "replace") if crc32(text) == crc else ""

    def _write_fingerprint(self, fingerprint: str) -> None:
        text = fingerprint.encode().ljust(_FINGERPRINT_BYTES, b"\0")
        assert len(text) == _FINGERPRINT_BYTES, "the fingerprint is too long"
        self._write(_FINGERPRINT, text + crc32(text).to_bytes(4, "little"))

    def _count_start(self) -> int:
        assert self._mapped is not None
        starts = int.from_bytes(self._mapped.memory[_STARTS : _STARTS + 4].tobytes(), "little") + 1
        self._write(_STARTS, starts.to_bytes(4, "little"))
        return starts

    def _write(self, offset: int, raw: bytes) -> None:
        assert self._mapped is not None
        self._mapped.memory[offset : offset + len(raw)] = np.frombuffer(raw, np.uint8)


def in_chains(records: Sequence[Record]) -> list[Record]:
    """Those records from which a chain leads back to a first block, each after its predecessor. Of several with the
    same hash, the first found."""
    behind: dict[int, list[Record]] = {}
    first: dict[int, list[Record]] = {}
    for record in records:
        (first if record.content.is_first else behind).setdefault(record.content.parent_hash, []).append(record)
    found: list[Record] = []
    seen: set[int] = set()
    ready = [record for group in first.values() for record in group]
    while ready:
        following = []
        for record in ready:
            block_hash = record.content.block_hash
            if block_hash is None:
                found.append(record)
            elif block_hash not in seen:
                seen.add(block_hash)
                found.append(record)
                following += behind.get(block_hash, [])
        ready = following
    return found


def eviction_order(chains: Sequence[Record]) -> list[int]:
    """The blocks of `chains`, least recently used first, and each before its predecessor in the chain."""
    used: dict[int, int] = {}
    keys: dict[int, tuple[int, int]] = {}
    for depth, record in reversed(list(enumerate(chains))):
        block_hash, parent = record.content.block_hash, record.content.parent_hash
        latest = record.used_ns if block_hash is None else max(record.used_ns, used.get(block_hash, 0))
        keys[record.block] = latest, -depth
        used[parent] = max(used.get(parent, 0), latest)
    return sorted(keys, key=lambda block: keys[block])


def _by_use(records: Sequence[Record]) -> list[Record]:
    """These records, least recently used first."""
    return sorted(records, key=lambda record: record.used_ns)


def _keep_only(journal: BlockJournal, blocks: Collection[int]) -> None:
    """Drop the records of other blocks."""
    for block in journal.recorded():
        if block not in blocks:
            journal.drop(block)
