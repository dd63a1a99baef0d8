"""The KV cache of a rank, in a file in memory that rank 0 maps too. So a block is copied to other tiers of the prefix
cache, and from there, with the parts of all ranks.

    rank 0    makes the file, copies whole blocks between steps        rank 1..  computes in it

A cache that outlives the worker is one file for all ranks, with their parts in order. Otherwise each rank has a file of
its own, and rank 0 has private memory. Pages are on the node of the rank whose part they are, whoever touches them
first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.worker.host.numa import prefer_if_possible
from headrace.worker.kv.arena import KVArena, arena_bytes
from headrace.worker.kv.block_bytes import BlockShape
from headrace.worker.kv.host_memory import HUGE_PAGE_BYTES, HostMemory


class Piece(NamedTuple):
    """The blocks of one cache of a rank: the shape of a block there, and how many there are."""

    shape: BlockShape
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        """The bytes of all of them."""
        return self.num_blocks * self.shape.num_bytes


class Place(msgspec.Struct, frozen=True):
    """The location of a rank's caches in a file: `own_bytes` bytes, after the first `skipped_bytes` of the arena at
    `offset`, which has room for `arena_bytes`."""

    offset: int
    arena_bytes: int
    skipped_bytes: int
    own_bytes: int


def pieces_of(shapes: Sequence[BlockShape], in_slots: Sequence[bool], num_blocks: int, num_slots: int) -> list[Piece]:
    """The pieces of so many blocks, and of so many slots for those caches that are `in_slots` (empty: none is). Each
    has one more, for padding."""
    are_slots = in_slots or [False] * len(shapes)
    counts = (1 + (num_slots if is_slot else num_blocks) for is_slot in are_slots)
    return list(map(Piece, shapes, counts))


class SharedPieces(NamedTuple):
    """The caches of a rank as rank 0 sees them, and where the rank finds them: in the file `descriptor`."""

    caches: list[npt.NDArray[np.uint8]]
    descriptor: int
    place: Place


def shared_pieces(arena: KVArena, pieces: Sequence[Piece]) -> SharedPieces:
    """Take another rank's pieces from an arena in a file."""
    assert arena.descriptor is not None, "the arena is private"
    skipped = arena.taken_bytes
    caches = [arena.take(piece.num_bytes) for piece in pieces]
    own_bytes = arena.taken_bytes - skipped
    return SharedPieces(caches, arena.descriptor, Place(arena.offset, arena.size_bytes, skipped, own_bytes))


def make_file(pieces: Sequence[Piece]) -> KVArena:
    """Make a file with an arena for the pieces of one rank. The caller closes its descriptor. OSError if there is no
    room."""
    memory = HostMemory(os.memfd_create("headrace-rank-kv", os.MFD_CLOEXEC))
    sizes = sum(piece.num_bytes for piece in pieces), len(pieces)
    memory.resize(arena_bytes(*sizes))
    return KVArena(*sizes, huge_pages=False, memory=memory.map(), descriptor=memory.descriptor)


def arena_at(descriptor: int, place: Place, *, huge_pages: bool, node: int | None) -> KVArena:
    """Map the arena from which a rank takes its pieces next, on this NUMA node. OSError."""
    memory = HostMemory(descriptor).map()
    arena = KVArena(place.arena_bytes, 0, huge_pages=huge_pages, memory=memory, offset=place.offset)
    arena.take(place.skipped_bytes)
    if node is not None:
        # A page with the end of one rank's part and the beginning of the next belongs to the first.
        start, end = (-(-taken // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES for taken in (
            place.skipped_bytes, place.skipped_bytes + place.own_bytes))  # fmt: skip
        if end > start:
            what = "blocks that come from a disk, from other workers or from the process before"
            prefer_if_possible(arena.address + start, end - start, node, what)
    return arena
