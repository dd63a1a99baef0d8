"""The KV cache of a rank, in a file in memory that rank 0 maps too. So a block is copied to other tiers of the prefix
cache, and from there, with the parts of all ranks.

    rank 1..  makes the arena, computes in it        rank 0  copies whole blocks, between steps

Pages are on the node of the rank whose part they are, whoever touches them first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.worker.host.numa import prefer_if_possible
from headrace.worker.kv.arena import KVArena, arena_bytes
from headrace.worker.kv.block_bytes import BlockShape
from headrace.worker.kv.host_memory import HostMemory


def make_file() -> int:
    """Make the file of a rank, without room yet. Returns its descriptor."""
    return os.memfd_create("headrace-rank-kv", os.MFD_CLOEXEC)


class Piece(NamedTuple):
    """The blocks of one cache of a rank: the shape of a block there, and how many there are."""

    shape: BlockShape
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        """The bytes of all of them."""
        return self.num_blocks * self.shape.num_bytes


def pieces_of(shapes: Sequence[BlockShape], in_slots: Sequence[bool], num_blocks: int, num_slots: int) -> list[Piece]:
    """The pieces of so many blocks, and of so many slots for those caches that are `in_slots` (empty: none is). Each
    has one more, for padding."""
    are_slots = in_slots or [False] * len(shapes)
    counts = (1 + (num_slots if is_slot else num_blocks) for is_slot in are_slots)
    return list(map(Piece, shapes, counts))


def make_arena(descriptor: int, pieces: Sequence[Piece], *, huge_pages: bool, node: int | None) -> KVArena:
    """Give the file the room for these pieces, and map it as the arena of a rank on this NUMA node. Raises OSError if
    there is none."""
    memory = HostMemory(descriptor)
    size_bytes = sum(piece.num_bytes for piece in pieces)
    memory.resize(arena_bytes(size_bytes, len(pieces)))
    arena = KVArena(size_bytes, len(pieces), huge_pages=huge_pages, memory=memory.map())
    if node is not None:
        prefer_if_possible(arena.address, arena.size_bytes, node, "blocks that come from a disk or from other workers")
    return arena


def caches_in(descriptor: int, pieces: Sequence[Piece]) -> list[npt.NDArray[np.uint8]]:
    """The caches in the file in which `make_arena` has made an arena of these pieces. Raises OSError."""
    size_bytes = sum(piece.num_bytes for piece in pieces)
    arena = KVArena(size_bytes, len(pieces), huge_pages=False, memory=HostMemory(descriptor).map())
    return [arena.take(piece.num_bytes) for piece in pieces]
