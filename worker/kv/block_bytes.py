"""Access to the bytes of KV blocks: copies of a block across all layers, and checksums."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

# The width of the widest vector registers.
ALIGNMENT_BYTES = 64


def aligned(num_bytes: int) -> int:
    """Round up, so that the next cache in an arena is aligned for vector instructions."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class BlockShape(NamedTuple):
    """The shape of one block in one cache (the keys or the values of a layer): `heads` x `tokens` x `token_bytes`."""

    heads: int
    tokens: int
    token_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one block in this cache."""
        return self.heads * self.tokens * self.token_bytes


class BlockBytes:
    """The bytes of all blocks in `caches`. Each cache is an array of bytes that stores its blocks one after another."""

    def __init__(self, caches: Sequence[npt.NDArray[np.uint8]], shapes: Sequence[BlockShape]) -> None:
        self.caches = caches
        self.block_size = shapes[0].tokens if shapes else 0
        self.num_bytes = sum(shape.num_bytes for shape in shapes)
        """Bytes of one block."""
        self._shapes = shapes
        self._views = [cache.reshape(-1, *shape) for cache, shape in zip(caches, shapes, strict=True)]
        self._groups = [
            _Group([cache for cache, _ in group], shape)
            for shape, group in groupby(zip(caches, shapes, strict=True), key=lambda pair: pair[1])
        ]

    def gather(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy the bytes of a block from all layers, one after another, into `data`, an array of `num_bytes`."""
        offset = 0
        for view in self._views:
            part = view[block].reshape(-1)
            data[offset : offset + len(part)] = part
            offset += len(part)

    def scatter(self, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Copy `data`, an array of `num_bytes` that `gather` wrote, into a block of all layers."""
        offset = 0
        for view in self._views:
            part = view[block].reshape(-1)
            part[:] = data[offset : offset + len(part)]
            offset += len(part)

    def private_block(self) -> BlockBytes:
        """Other memory, for a single block of these shapes with number 0. The same bytes have the same checksum."""
        num_bytes = sum(aligned(shape.num_bytes) for shape in self._shapes)
        memory = np.empty(num_bytes + ALIGNMENT_BYTES, np.uint8)
        offsets = self.offsets(-memory.ctypes.data % ALIGNMENT_BYTES, 1)
        caches = [memory[start:][: shape.num_bytes] for start, shape in zip(offsets, self._shapes, strict=True)]
        return BlockBytes(caches, self._shapes)

    def copy_from(self, source: BlockBytes, block: int) -> None:
        """Copy the block of `source`, which `private_block` made, into a block."""
        for part, data in zip(self.parts(block), source.parts(0), strict=True):
            part[:] = data

    def parts(self, block: int) -> list[npt.NDArray[np.uint8]]:
        """The bytes of a block in each cache. They can be written."""
        return [view[block].reshape(-1) for view in self._views]

    def offsets(self, start: int, num_blocks: int) -> list[int]:
        """Where the caches begin in an arena of `num_blocks` blocks of these shapes that begins at `start`."""
        found = []
        for shape in self._shapes:
            found.append(start)
            start += aligned(num_blocks * shape.num_bytes)
        return found

    def checksum(self, block: int, num_tokens: int) -> int:
        """A 32-bit checksum of the block's first `num_tokens` tokens. It detects damage, not forgery: a change to a
        single word always changes it."""
        found = 0
        for group in self._groups:
            found = crc32(group.digest(block, num_tokens), found)
        return found


class _Group:
    """Caches of one shape. If they are at equal distances in memory, they are read as one array."""

    def __init__(self, caches: Sequence[npt.NDArray[np.uint8]], shape: BlockShape) -> None:
        self._shape = shape
        self._views = [cache.reshape(-1, *shape) for cache in caches]
        addresses = [cache.ctypes.data for cache in caches]
        distances = set(np.diff(addresses).tolist())
        first = self._views[0]
        is_regular = len(distances) <= 1 and min(distances, default=8) > 0 and min(distances, default=8) % 8 == 0
        self._words: npt.NDArray[np.uint64] | None = None
        if is_regular and shape.num_bytes % 8 == 0 and addresses[0] % 8 == 0:
            words = first.reshape(len(first), -1).view(np.uint64)
            self._words = np.lib.stride_tricks.as_strided(
                words, (len(caches), *words.shape), (min(distances, default=0), *words.strides), writeable=False
            )
            # as_strided keeps only the first cache alive.
            self._kept = caches

    def digest(self, block: int, num_tokens: int) -> bytes:
        """A digest of the block's first `num_tokens` tokens. Whole blocks are read at memory bandwidth."""
        if self._words is not None and num_tokens == self._shape.tokens:
            sums: npt.NDArray[np.uint64] = self._words[:, block].sum(axis=1, dtype=np.uint64)
            return sums.tobytes()
        parts = (view[block, :, :num_tokens].tobytes() for view in self._views)
        return b"".join(crc32(part).to_bytes(4, "little") for part in parts)
