"""A record of each block's content, in memory that outlives the process. It is consistent even after a crash.

    states    one byte for each block: 1 if its record is valid
    used      when each block was last released, in nanoseconds of the monotonic clock
    records   hash, parent, checksum and tokens of each block

The order of the writes keeps the journal consistent. A block's state is cleared before anyone can write to the block.
It is set after the block's bytes are computed and its record is complete. While it is set, the block is written only
beyond the tokens of its record. The kernel keeps the writes of a killed process, even those still in a CPU cache.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from headrace.protos.block_hash import next_hash
from headrace.worker.kv.block_bytes import BlockBytes
from headrace.worker.kv.chain import TOKEN_BYTES, Content

_WHOLE = 1
_IS_FULL = 1
_IS_FIRST = 2


class Record(NamedTuple):
    """A block that can be restored: its content, and when it was last released."""

    block: int
    content: Content
    used_ns: int


class BlockJournal:
    """The journal of `num_blocks` blocks, in `memory`. Not thread-safe."""

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        num_blocks: int,
        block_size: int,
        contents: BlockBytes,
        on_growth: Callable[[int], int] | None = None,
    ) -> None:
        """`on_growth` is called when a block comes into use whose number is at least the callback's last result."""
        self._on_growth = on_growth
        self._grown = 0
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._contents = contents
        self._record = struct.Struct(f"<QQIHH{TOKEN_BYTES * block_size}sI")
        used, records, _ = _offsets(num_blocks, block_size)
        whole = memoryview(memory)  # type: ignore[arg-type]
        self._states = whole[:num_blocks]
        self._used = whole[used : used + 8 * num_blocks].cast("Q")
        self._records = whole[records:]
        self._unsealed: dict[int, Content] = {}

    @property
    def has_unsealed(self) -> bool:
        """Whether blocks wait for `seal`."""
        return bool(self._unsealed)

    def note(self, block: int, content: Content) -> None:
        """Record that the block has this content now. The next `seal` reads its bytes and writes the record."""
        self._unsealed[block] = content

    def drop(self, block: int) -> None:
        """Clear the block's record, before anyone writes to the block."""
        self._states[block] = 0
        self._unsealed.pop(block, None)

    def grow(self, block: int) -> None:
        """Note that the block with this number comes into use, so that huge pages are prepared for it and the next
        ones."""
        if self._on_growth is not None and block >= self._grown:
            self._grown = self._on_growth(block)

    def use(self, blocks: Iterable[int]) -> None:
        """Record that these blocks were released now, for the order of eviction in the next process."""
        now_ns = time.monotonic_ns()
        for block in blocks:
            self._used[block] = now_ns

    def seal(self) -> None:
        """Record the noted blocks. Reads their bytes, so none of them may be taken while this runs."""
        size = self._record.size
        for block, content in self._unsealed.items():
            num_tokens = len(content.token_bytes) // TOKEN_BYTES
            flags = _IS_FULL * (content.block_hash is not None) | _IS_FIRST * content.is_first
            parts = content.block_hash or 0, content.parent_hash, self._contents.checksum(block, num_tokens)
            raw = self._record.pack(*parts, num_tokens, flags, content.token_bytes, 0)
            self._states[block] = 0
            self._records[block * size : (block + 1) * size] = raw[:-4] + crc32(raw[:-4]).to_bytes(4, "little")
            self._states[block] = _WHOLE
        self._unsealed.clear()

    def clear(self) -> None:
        """Clear the records of all blocks."""
        self._unsealed.clear()
        self._states[:] = bytes(self._num_blocks)

    def holds(self, block: int) -> bool:
        """Whether the block's record is valid."""
        return self._states[block] == _WHOLE

    def recorded(self) -> list[int]:
        """The blocks whose state says that their record is valid. `read` checks the record itself."""
        return recorded_in(np.frombuffer(self._states, np.uint8))

    def read(self, block: int) -> Record | None:
        """The record of a block. None if the record or the block's bytes do not match their checksum."""
        raw = bytes(self._records[block * self._record.size : (block + 1) * self._record.size])
        *fields, crc = self._record.unpack(raw)
        block_hash, parent_hash, checksum, num_tokens, flags, tokens = fields
        if crc32(raw[:-4]) != crc or not 0 < num_tokens <= self._block_size:
            return None
        token_bytes = tokens[: TOKEN_BYTES * num_tokens]
        is_full = bool(flags & _IS_FULL)
        if is_full and (num_tokens != self._block_size or next_hash(parent_hash, token_bytes) != block_hash):
            return None
        if self._contents.checksum(block, num_tokens) != checksum:
            return None
        content = Content(block_hash if is_full else None, parent_hash, token_bytes, bool(flags & _IS_FIRST))
        return Record(block, content, self._used[block])


def recorded_in(memory: npt.NDArray[np.uint8], num_blocks: int | None = None) -> list[int]:
    """The blocks whose states, at the beginning of a journal in `memory`, say that their record is valid."""
    return np.flatnonzero(memory[:num_blocks] == _WHOLE).tolist()


def journal_bytes(num_blocks: int, block_size: int) -> int:
    """The size of a journal in bytes."""
    return _offsets(num_blocks, block_size)[2]


def _offsets(num_blocks: int, block_size: int) -> tuple[int, int, int]:
    """The offsets of the times, of the records, and of the journal's end."""
    used = -(-num_blocks // 8) * 8
    records = used + 8 * num_blocks
    size = struct.calcsize(f"<QQIHH{TOKEN_BYTES * block_size}sI")
    return used, records, records + size * num_blocks
