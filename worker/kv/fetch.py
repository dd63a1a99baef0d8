"""Blocks that come into the pool from a disk or from another worker."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from headrace.worker.kv.block_pool import BlockPool

# For `LearnedTime`: the weight of the latest measurement; the maximum of a measurement, as a multiple of the average;
# and the half-life in seconds of the part of the average that exceeds the first guess.
_NEWEST, _MOST, _HALF_LIFE_S = 0.2, 10.0, 60.0


class Wanted(NamedTuple):
    """A block to be filled: `block`, which has no other holder. `token_bytes` is empty if its tokens are not known."""

    block: int
    block_hash: int
    parent_hash: int
    token_bytes: bytes
    is_first: bool


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks that are filled in order. A tier's thread fills them with `fill`, and stops at the first block that it
    cannot fill. `num_read` counts the filled blocks. `source` is the address of a worker, for fetches from another
    worker. After `timeout_s` no request waits for them."""

    wanted: list[Wanted]
    source: str = ""
    timeout_s: float = 60.0
    num_read: int = 0
    is_given_up: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def fill(self, write: Callable[[int], None], token_bytes: bytes | None = None) -> bool:
        """Tier's thread: have `write` copy bytes into the next block, and add its tokens if they were not known.
        Returns False and writes nothing if the fetch was given up. `write` must not wait for anything."""
        with self._lock:
            if self.is_given_up:
                return False
            wanted = self.wanted[self.num_read]
            write(wanted.block)
            if token_bytes is not None:
                self.wanted[self.num_read] = wanted._replace(token_bytes=token_bytes)
            self.num_read += 1
            return True

    def give_up(self) -> None:
        """Engine thread: fill no more blocks. Once this returns, the tier writes to none of them, so they may be
        released, even if the tier's thread hangs."""
        with self._lock:
            self.is_given_up = True


def import_blocks(pool: BlockPool, fetch: Fetch, in_front: Sequence[int]) -> list[int]:
    """Make the filled blocks findable, each after its predecessor. Release all blocks of the fetch and the held ones
    `in_front` of them. Returns the blocks that became findable.

    If a request has computed the same block in the meantime, that one is in the chain. The whole chain is released
    again, from its end, so that no block is evicted before its successor.
    """
    chain, came = list(in_front), list[int]()
    unused = [wanted.block for wanted in fetch.wanted[fetch.num_read :]]
    broken: set[int] = set()
    for block, block_hash, parent_hash, token_bytes, is_first in fetch.wanted[: fetch.num_read]:
        found = None
        if is_first or (parent_hash not in broken and pool.is_findable(parent_hash)):
            found = pool.make_findable(block, block_hash, parent_hash, token_bytes, is_first=is_first)
        if found is None:
            broken.add(block_hash)
        else:
            chain.append(found)
            if found != block:
                pool.hold([found])
        (came if found == block else unused).append(block)
    pool.release(unused)
    pool.release(reversed(chain))
    return came


class LearnedTime:
    """How many seconds an operation takes: a moving average. Any thread may call it.

    A pause of the disk, the other worker or this process says little about the next time, so no measurement counts more
    than `_MOST` times the average. A tier that seems too slow is not used, so it is not measured any more. Therefore an
    average above the first guess decays to that guess while nothing is measured.
    """

    def __init__(self, guess_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._guess_s = guess_s
        self._clock = clock
        self._found = guess_s, clock()

    @property
    def seconds(self) -> float:
        """The expected time."""
        average_s, measured_s = self._found
        forgotten = 1 - math.exp2(-(self._clock() - measured_s) / _HALF_LIFE_S)
        return average_s - forgotten * max(0.0, average_s - self._guess_s)

    def observe(self, seconds: float) -> None:
        """Add a measurement."""
        average_s = self.seconds
        self._found = average_s + _NEWEST * (min(seconds, _MOST * average_s) - average_s), self._clock()


class Tier(Protocol):
    """Fills blocks in its own threads. The engine thread calls it."""

    def fetch(self, fetch: Fetch) -> None:
        """Begin a fetch. `take_ended` returns it when it has ended, also if it was given up."""
        ...

    def take_ended(self) -> list[Fetch]:
        """Return the fetches that have ended since the last call."""
        ...

    def expected_s(self, num_blocks: int) -> float:
        """Expected seconds until `num_blocks` more blocks are filled."""
        ...


class DiskOfBlocks(Tier, Protocol):
    """A tier that knows which blocks it has. `num_written`, `num_not_written` and `num_read` count blocks."""

    num_written: int
    num_not_written: int
    num_read: int
    has_news: bool

    @property
    def num_slots(self) -> int:
        """Number of blocks that fit."""
        ...

    @property
    def num_blocks(self) -> int:
        """Number of blocks that it has."""
        ...

    @property
    def bytes_per_s(self) -> float:
        """Learned speed of reading."""
        ...

    def has(self, block_hash: int) -> bool:
        """Whether it has the block."""
        ...

    def take_changes(self) -> dict[int, bool]:
        """The hashes that were added (True) or removed since the last call."""
        ...


class OtherWorkers(Tier, Protocol):
    """A tier that fetches from other workers. `num_received` counts blocks."""

    num_received: int

    @property
    def bytes_per_s(self) -> float:
        """Learned speed; 0 while unknown."""
        ...

    def is_resting(self, source: str) -> bool:
        """Whether to fetch nothing from this worker for the moment."""
        ...
