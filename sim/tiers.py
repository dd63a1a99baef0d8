"""The disk of a simulated worker, and its fetches from the memory of other workers, in virtual time.

The real `Fetching` decides what is fetched and when a request waits. Only the transfers are simulated: a disk reads one
fetch after the other, each fetch from another worker has its share of the network, and both have a constant speed.

Pure: the caller passes the time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from headrace.router.placement.transfers import DEFAULT_BYTES_PER_S
from headrace.worker.kv.cache import KVCache
from headrace.worker.kv.chain import Content
from headrace.worker.kv.fetch import Fetch

ASSUMED_PEER_BYTES_PER_S = DEFAULT_BYTES_PER_S
"""Bytes per second at which workers fetch from others, as routers assume until they have."""
# As at the workers: the maximum of evicted blocks that wait for the disk, and the share of time for writes.
_MAX_QUEUED = 256
_WRITE_SHARE = 0.5
# Time until the first block of another worker arrives.
_SETUP_S = 0.005


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The tiers of each worker beyond its memory. `disk_tokens` fit on its disk; 0 for no disk. With `is_disk_shared`,
    all workers have the same disk, as on one host. Speeds are in tokens per second and for each worker; `peer_rate` is
    that of fetches from other workers, 0 for none."""

    disk_tokens: int = 0
    disk_rate: float = 40_000.0
    peer_rate: float = 0.0
    is_disk_shared: bool = False

    @property
    def are_any(self) -> bool:
        """Whether there is a tier."""
        return bool(self.disk_tokens or self.peer_rate)


class Timer:
    """The clock and the events that a tier needs: `at` calls back at a time, `wake` has the worker look."""

    def __init__(
        self, clock: Callable[[], float], at: Callable[[float, Callable[[], None]], None], wake: Callable[[], None]
    ) -> None:
        self.clock = clock
        self.at = at
        self.wake = wake


class _Fetches:
    """Fetches that have ended, for both tiers."""

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self._ended: deque[Fetch] = deque()

    def take_ended(self) -> list[Fetch]:
        """See Tier."""
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def _end(self, fetch: Fetch, num_read: int) -> None:
        fetch.num_read = num_read
        self._ended.append(fetch)
        self.timer.wake()


class DiskSlots:
    """The blocks on a disk, which several workers may use. The least recently used one is evicted. `log` has the hashes
    that were added (True) or removed."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.log: list[tuple[int, bool]] = []

    def touch(self, block_hash: int) -> None:
        """Make a block the most recently used, if it is on the disk."""
        if block_hash in self.blocks:
            self.blocks.move_to_end(block_hash)

    def add(self, block_hash: int) -> None:
        """Store a block that is not on the disk, as the most recently used. If the disk is full, the least recently
        used block goes."""
        self.blocks[block_hash] = None
        self.log.append((block_hash, True))
        if len(self.blocks) > self.num_slots:
            oldest, _ = self.blocks.popitem(last=False)
            self.log.append((oldest, False))


class SimulatedDisk(_Fetches):
    """One worker's use of a disk: it writes the blocks that its memory evicts, and reads blocks. It sees the changes of
    other workers when it reads or writes itself."""

    def __init__(self, slots: DiskSlots, block_s: float, bytes_per_s: float, timer: Timer) -> None:
        super().__init__(timer)
        self.bytes_per_s = bytes_per_s
        self.num_written = self.num_not_written = self.num_read = 0
        self.has_news = False
        self._slots = slots
        self._block_s = block_s
        self._known: set[int] = set()
        self._num_seen = 0
        self._changes: dict[int, bool] = {}
        self._free_s = self._written_s = 0.0

    @property
    def num_slots(self) -> int:
        """Number of blocks that fit."""
        return self._slots.num_slots

    @property
    def num_blocks(self) -> int:
        """Number of blocks on the disk."""
        return len(self._known)

    def take_changes(self) -> dict[int, bool]:
        """See DiskTier."""
        changes, self._changes = self._changes, {}
        return changes

    def has(self, block_hash: int) -> bool:
        """See DiskTier."""
        return block_hash in self._known

    def has_part(self, block_hash: int) -> bool:
        """Return False: simulated models have no parts of blocks."""
        return self.has(block_hash)

    def spill_part(self, slot: int, content: Content) -> None:
        """Do nothing: simulated models have no parts of blocks."""

    def spill(self, block: int, slot: int, content: Content) -> None:
        """Queue a block that leaves the memory for writing. It is dropped if too many wait."""
        del block, slot
        block_hash = content.block_hash
        now_s = self.timer.clock()
        if block_hash is None:
            return
        if block_hash in self._known:
            self._slots.touch(block_hash)
            return
        write_s = self._block_s / _WRITE_SHARE
        if self._written_s - now_s > _MAX_QUEUED * write_s:
            self.num_not_written += 1
            return
        self._written_s = max(self._written_s, now_s) + write_s
        if block_hash not in self._slots.blocks:
            self._slots.add(block_hash)
            self.num_written += 1
        self._refresh()

    def expected_s(self, num_blocks: int) -> float:
        """See Tier."""
        return max(0.0, self._free_s - self.timer.clock()) + num_blocks * self._block_s

    def fetch(self, fetch: Fetch) -> None:
        """See Tier. Blocks that have gone when their turn comes end the fetch."""
        self._free_s = max(self._free_s, self.timer.clock()) + len(fetch.wanted) * self._block_s
        self.timer.at(self._free_s, lambda: self._read(fetch))

    def _refresh(self) -> None:
        """Read the changes of all workers."""
        for block_hash, is_there in self._slots.log[self._num_seen :]:
            self._changes[block_hash] = is_there
            if is_there:
                self._known.add(block_hash)
            else:
                self._known.discard(block_hash)
        self._num_seen = len(self._slots.log)

    def _read(self, fetch: Fetch) -> None:
        self._refresh()
        num_read = 0
        for wanted in fetch.wanted:
            if fetch.is_given_up or wanted.block_hash not in self._known:
                break
            num_read += 1
        for wanted in reversed(fetch.wanted[:num_read]):  # the end of a chain is evicted first
            self._slots.touch(wanted.block_hash)
        self.num_read += num_read
        self._end(fetch, num_read)


class SimulatedPeers(_Fetches):
    """Fetches from the memory of other workers, which `cache_of` finds by their address."""

    def __init__(self, block_s: float, bytes_per_s: float, cache_of: Callable[[str], KVCache], timer: Timer) -> None:
        super().__init__(timer)
        self.num_received = 0
        self.bytes_per_s = bytes_per_s
        self._block_s = block_s
        self._cache_of = cache_of

    def expected_s(self, num_blocks: int) -> float:
        """See Tier."""
        return _SETUP_S + num_blocks * self._block_s

    def is_resting(self, source: str) -> bool:
        """See OtherWorkers. Simulated workers always answer."""
        return False

    def fetch(self, fetch: Fetch) -> None:
        """See Tier."""
        took_s = self.expected_s(len(fetch.wanted))
        self.timer.at(self.timer.clock() + took_s, lambda: self._receive(fetch))

    def _receive(self, fetch: Fetch) -> None:
        kv_cache = self._cache_of(fetch.source)
        num_read = 0
        for wanted in fetch.wanted:
            if fetch.is_given_up or not kv_cache.is_findable(wanted.block_hash):
                break
            num_read += 1
        self.num_received += num_read
        self._end(fetch, num_read)
