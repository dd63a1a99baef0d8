"""Moves blocks between the KV cache and the disk in a background thread.

The engine thread hands over the blocks that it evicts, and requests the blocks that a prompt needs. Reads go before
writes. Writes use a limited share of the time, to leave the disk free for reads and other programs. Blocks that are
evicted faster than the disk may store them are dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.worker.kv.block_bytes import BlockBytes
from headrace.worker.kv.chain import Content
from headrace.worker.kv.disk_store import DiskStore
from headrace.worker.kv.fetch import NO_SLOT, Fetch, LearnedTime, Wanted, nobody

log = logging.getLogger(__name__)

# The largest share of the time that the thread spends on writes.
WRITE_SHARE = 0.5
# Bounds of the queue of evicted blocks to be written.
MAX_QUEUED = 256
MAX_QUEUED_BYTES = 256 << 20
# Bound of the queue of blocks that were in use until now and are on the disk already.
MAX_TOUCHED = 16384
_WRITES_A_FLUSH = 8
# How often the idle thread reads what other workers of the host have changed.
_LOOK_S = 1.0
_PAUSE_AFTER_FAILURE_S = 60.0
# The assumed read speed before the first read.
_FIRST_GUESS_BYTES_PER_S = 1e9


class PartsOnDisk(NamedTuple):
    """The parts of blocks for layers with a window, in a store of their own, under the hashes of their blocks."""

    store: DiskStore
    contents: BlockBytes


class _Spill(NamedTuple):
    """Bytes of an evicted block, or of a part of one, to be written to a store."""

    store: DiskStore
    content: Content
    data: npt.NDArray[np.uint8]


class DiskTier(threading.Thread):
    """The thread that reads and writes `store`, and the store of `parts` if there is one. It calls `on_arrival` when a
    fetch has ended."""

    def __init__(
        self,
        store: DiskStore,
        contents: BlockBytes,
        block_bytes: int,
        parts: PartsOnDisk | None = None,
        on_arrival: Callable[[], None] = nobody,
    ) -> None:
        super().__init__(name="kv-disk", daemon=True)
        self.on_arrival = on_arrival
        self.has_news = False
        """Whether a report is due, because all queued blocks are written or other workers have changed the disk. The
        reader resets it."""
        self.num_written = 0
        self.num_not_written = 0
        self.num_read = 0
        part_bytes = 0 if parts is None else parts.contents.num_bytes
        self.read_time = LearnedTime((block_bytes + part_bytes) / _FIRST_GUESS_BYTES_PER_S)
        """The time to read a block."""
        self._store = store
        self._parts = parts
        self._contents = contents
        self._block_bytes = block_bytes
        self._max_queued = max(1, min(MAX_QUEUED, MAX_QUEUED_BYTES // (block_bytes + part_bytes)))
        self._buffer = np.empty(block_bytes, np.uint8)
        self._part_buffer = np.empty(part_bytes, np.uint8)
        self._spills: deque[_Spill] = deque()
        # Without room, the blocks that were in use first are forgotten.
        self._touched: deque[tuple[DiskStore, int]] = deque(maxlen=MAX_TOUCHED)
        self._fetches: deque[Fetch] = deque()
        self._ended: deque[Fetch] = deque()
        self._reading: Fetch | None = None
        self._busy_since_s = 0.0  # 0: it does nothing
        self._changed = threading.Condition()
        self._is_stopping = False
        self._num_unflushed = 0
        self._next_write_s = 0.0
        self._next_look_s = time.monotonic() + _LOOK_S
        # After a failure, nothing is written or read until this time.
        self._no_writes_until_s = self._no_reads_until_s = 0.0

    def spill(self, block: int, slot: int, content: Content) -> None:
        """Engine thread: copy a block that is about to be evicted, and its part unless `slot` is NO_SLOT, and queue the
        copies to be written."""
        self._queue(self._store, self._contents, block, content)
        if slot != NO_SLOT:
            self.spill_part(slot, content)

    def spill_part(self, slot: int, content: Content) -> None:
        """Engine thread: copy the part of a block for layers with a window, which is about to be evicted."""
        assert self._parts is not None, "blocks have no parts here"
        self._queue(self._parts.store, self._parts.contents, slot, content)

    def _queue(self, store: DiskStore, contents: BlockBytes, place: int, content: Content) -> None:
        if content.block_hash is None:
            return
        if store.has(content.block_hash):
            # A store to the mapped index may wait for the disk, so only the tier's thread touches it.
            self._touched.append((store, content.block_hash))
            return
        if len(self._spills) >= self._max_queued or time.monotonic() < self._no_writes_until_s:
            self.num_not_written += 1
            return
        try:
            data = np.empty(contents.num_bytes, np.uint8)
        except MemoryError:
            self.num_not_written += 1
            return
        contents.gather(place, data)
        with self._changed:
            self._spills.append(_Spill(store, content, data))
            self._changed.notify()

    @property
    def num_slots(self) -> int:
        """Number of blocks that fit on the disk."""
        return self._store.num_slots

    @property
    def num_blocks(self) -> int:
        """Number of blocks on the disk."""
        return self._store.num_blocks

    @property
    def bytes_per_s(self) -> float:
        """The learned speed of reading, in bytes per second."""
        return self._block_bytes / self.read_time.seconds

    def take_changes(self) -> dict[int, bool]:
        """Engine thread: as of `DiskStore.take_changes`."""
        return self._store.take_changes()

    def has(self, block_hash: int) -> bool:
        """Engine thread: whether the block was on the disk at the last refresh of the index. False for some time after
        the disk could not be read."""
        return self._can_read and self._store.has(block_hash)

    def has_part(self, block_hash: int) -> bool:
        """Whether the disk has the part of this block that belongs to layers with a sliding window. Engine thread.
        False for a while after the disk could not be read."""
        return self._parts is not None and self._can_read and self._parts.store.has(block_hash)

    @property
    def _can_read(self) -> bool:
        return time.monotonic() >= self._no_reads_until_s

    @property
    def _stores(self) -> list[DiskStore]:
        return [self._store] if self._parts is None else [self._store, self._parts.store]

    def fetch(self, fetch: Fetch) -> None:
        """Engine thread: queue a fetch. `take_ended` returns it when it has ended."""
        with self._changed:
            self._fetches.append(fetch)
            self._changed.notify()

    def take_ended(self) -> list[Fetch]:
        """Engine thread: return the fetches that have ended since the last call."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def expected_s(self, num_blocks: int) -> float:
        """Expected seconds until `num_blocks` more blocks are read, including the wait for other fetches. The current
        operation is expected to take as long again as it has taken so far, because a disk that hangs may continue to
        hang."""
        reading, busy_since_s = self._reading, self._busy_since_s
        ahead = [*self._fetches, *([reading] if reading is not None else [])]
        queued = sum(len(fetch.wanted) - fetch.num_read for fetch in ahead if not fetch.is_given_up)
        busy_s = time.monotonic() - busy_since_s if busy_since_s else 0.0
        return busy_s + (queued + num_blocks) * self.read_time.seconds

    def stop(self) -> None:
        """Make the thread end after its current read or write."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()

    def run(self) -> None:
        """Read and write until stopped."""
        while (fetch := self._next()) is not None or not self._is_stopping:
            if fetch is not None:
                self._serve(fetch)
            elif self._has_writes and time.monotonic() >= self._next_write_s:
                self._write()
            else:
                self._look()

    @property
    def _has_writes(self) -> bool:
        return bool(self._spills or self._num_unflushed)

    def _next(self) -> Fetch | None:
        """Wait for the next fetch. Returns None if it is time to write, to look at the index, or to stop."""
        with self._changed:
            while not self._is_stopping:
                if self._fetches:
                    return self._fetches.popleft()
                due_s = min(self._next_look_s, self._next_write_s) if self._has_writes else self._next_look_s
                wait_s = due_s - time.monotonic()
                if wait_s <= 0:
                    return None
                self._changed.wait(wait_s)
            return None

    def _serve(self, fetch: Fetch) -> None:
        """Read the blocks of a fetch. The fetch ends even if reading fails, because the engine waits for its end."""
        self._reading = fetch
        try:
            self._read(fetch)
            found = fetch.wanted[: fetch.num_read]
            self._store.count_hits([wanted.block_hash for wanted in found if not wanted.part_only])
            if self._parts is not None:
                self._parts.store.count_hits([wanted.block_hash for wanted in found if wanted.slot != NO_SLOT])
        except Exception as error:
            _warn("KV blocks cannot be read from the disk", error)
            self._no_reads_until_s = time.monotonic() + _PAUSE_AFTER_FAILURE_S
        finally:
            self._reading = None
            self._busy_since_s = 0.0
            self._ended.append(fetch)
            self.on_arrival()

    def _read(self, fetch: Fetch) -> None:
        if fetch.is_given_up or not self._can_read:
            return
        for store in self._stores:
            store.refresh()
        for wanted in fetch.wanted:
            if fetch.is_given_up:
                return
            start_s = self._busy_since_s = time.monotonic()
            if not self._load(wanted):
                return
            # If the fetch was given up during the read, the block may have another owner.
            is_filled = fetch.fill(partial(self._fill, wanted))
            self.read_time.observe(time.monotonic() - start_s)
            if not is_filled:
                return
            self.num_read += not wanted.part_only

    def _load(self, wanted: Wanted) -> bool:
        """Read a block, its part, or both into the buffers. Returns False if something is missing."""
        key = wanted.block_hash, wanted.parent_hash, wanted.token_bytes
        if not wanted.part_only and not self._store.read(*key, self._buffer):
            return False
        return wanted.slot == NO_SLOT or (self._parts is not None and self._parts.store.read(*key, self._part_buffer))

    def _fill(self, wanted: Wanted, block: int) -> None:
        if not wanted.part_only:
            self._contents.scatter(block, self._buffer)
        if wanted.slot != NO_SLOT and self._parts is not None:
            self._parts.contents.scatter(wanted.slot, self._part_buffer)

    def _look(self) -> None:
        """Mark the blocks that memory had until now, and read what other workers have changed in the index."""
        pause_s = _LOOK_S
        self._busy_since_s = time.monotonic()
        try:
            self._mark_used()
            if any([store.refresh() for store in self._stores]):  # noqa: C419  all of them
                self.has_news = True
                self.on_arrival()
        except Exception as error:
            _warn("the index of KV blocks on the disk cannot be read", error)
            pause_s = _PAUSE_AFTER_FAILURE_S
        finally:
            self._busy_since_s = 0.0
        self._next_look_s = time.monotonic() + pause_s

    def _mark_used(self) -> None:
        while self._touched:
            store, block_hash = self._touched.popleft()
            store.touch(block_hash)

    def _write(self) -> None:
        """Write one block. Flush the file after several blocks, or when the queue is empty."""
        start_s = self._busy_since_s = time.monotonic()
        try:
            if self._spills:
                self._mark_used()
                store, content, data = self._spills[0]
                assert content.block_hash is not None
                if store.write(content.block_hash, content.parent_hash, content.token_bytes, data):
                    self.num_written += 1
                    self._num_unflushed += 1
                self._spills.popleft()
            if self._num_unflushed >= _WRITES_A_FLUSH or not self._spills:
                for store in self._stores:
                    store.flush()
                self._num_unflushed = 0
                if not self._spills:
                    self.has_news = True
                self.on_arrival()
        except Exception as error:
            _warn("KV blocks cannot be written to disk", error)
            self.num_not_written += len(self._spills)
            self._spills.clear()
            self._num_unflushed = 0
            self._no_writes_until_s = time.monotonic() + _PAUSE_AFTER_FAILURE_S
        finally:
            self._busy_since_s = 0.0
        took_s = time.monotonic() - start_s
        self._next_write_s = start_s + took_s / WRITE_SHARE


def _warn(what: str, error: Exception) -> None:
    is_known = isinstance(error, OSError)
    log.warning("%s: %s; retrying in %.0f s", what, error, _PAUSE_AFTER_FAILURE_S, exc_info=None if is_known else error)
