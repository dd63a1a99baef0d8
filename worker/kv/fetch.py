"""Blocks that come into the pool from a disk or from another worker."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from headrace.worker.kv.chain import Content
from headrace.worker.kv.journal import BlockJournal

# For `LearnedTime`: the weight of the latest measurement; the maximum of a measurement, as a multiple of the average;
# and the half-life in seconds of the part of the average that exceeds the first guess.
_NEWEST = 0.2
_MOST = 10.0
_HALF_LIFE_S = 60.0


NO_SLOT = -1


class Wanted(NamedTuple):
    """A block to be filled: `block`, which has no other holder. `token_bytes` is empty if its tokens are not known. Its
    part for layers with a window goes to `slot`, unless that is NO_SLOT. If it is `part_only`, the block itself is in
    the cache."""

    block: int
    block_hash: int
    parent_hash: int
    token_bytes: bytes
    is_first: bool
    slot: int = NO_SLOT
    part_only: bool = False


class ChainedBlock(NamedTuple):
    """A block of another worker, and the one before it. `has_part`: also its part for layers with a window."""

    block_hash: int
    parent_hash: int
    is_first: bool
    has_part: bool = False


class Held(NamedTuple):
    """The content that is held for a fetch until it ends: the cached blocks before the wanted ones, and the parts of
    some of them for layers with a window."""

    blocks: list[int]
    parts: list[int]


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
        """How long the next operation is expected to take, in seconds."""
        average_s, measured_s = self._found
        forgotten = 1 - math.exp2(-(self._clock() - measured_s) / _HALF_LIFE_S)
        return average_s - forgotten * max(0.0, average_s - self._guess_s)

    def observe(self, seconds: float) -> None:
        """Learn from an operation that took `seconds`."""
        average_s = self.seconds
        self._found = average_s + _NEWEST * (min(seconds, _MOST * average_s) - average_s), self._clock()


def nobody() -> None:
    """Do nothing. A default for functions that wake a thread."""


class Bell:
    """Wakes the engine thread: notifies `changed` and sets `has_rung`, which the engine thread resets."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.has_rung = False

    def ring(self) -> None:
        """Any thread: something has changed for the engine's thread."""
        with self.changed:
            self.has_rung = True
            self.changed.notify()


class Spill(Protocol):
    """Takes blocks that the cache evicts. The engine thread calls it before their bytes change."""

    def spill(self, block: int, slot: int, content: Content) -> None:
        """Take a block, and its part for layers with a window in `slot`, unless that is NO_SLOT."""
        ...

    def spill_part(self, slot: int, content: Content) -> None:
        """Take only the part of a block for layers with a window."""
        ...


class Persistence(NamedTuple):
    """Stores content beyond the life of the cache. `journal` records the content of each block for the next process,
    `part_journal` that of each slot with a part of a block for layers with a window. `spill` takes what is evicted."""

    journal: BlockJournal | None = None
    part_journal: BlockJournal | None = None
    spill: Spill | None = None


NOT_PERSISTENT = Persistence()


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
        """The learned speed of reading, in bytes per second."""
        ...

    def has(self, block_hash: int) -> bool:
        """Whether it has the block."""
        ...

    def has_part(self, block_hash: int) -> bool:
        """Whether it has the block's part for layers with a window."""
        ...

    def take_changes(self) -> dict[int, bool]:
        """The hashes that were added (True) or removed since the last call."""
        ...


class OtherWorkers(Tier, Protocol):
    """A tier that fetches from other workers. `num_received` counts blocks."""

    num_received: int

    @property
    def bytes_per_s(self) -> float:
        """The learned speed of fetches, in bytes per second; 0 while it is unknown."""
        ...

    def is_resting(self, source: str) -> bool:
        """Whether to fetch nothing from this worker for the moment."""
        ...
