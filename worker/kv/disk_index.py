"""The index of a store of KV blocks: for each slot the name of its block and how valuable that is, in a mapped file.

    header     the number of changes of names so far; what identifies the key, or zeros; the slots of the last changes
    entries    for each slot: name (0: none), time of last use, number of hits, and order of use in the same second

All workers of a host map the file. Only the holder of the store's lock changes names and reserves slots. Each change is
counted, so that a process reads the entries only if there were changes, and only the changed ones if they were few.
"""

from __future__ import annotations

import heapq
import mmap
import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# In a new file, all other bytes are 0.
CHECK_OFFSET = 16
_HEADER_BYTES = 4096
_RECENT_OFFSET = 2048
_NUM_RECENT = 512
_ENTRY = np.dtype([("name", "<u8"), ("used_s", "<u4"), ("found", "<u2"), ("order", "<u2")])
# When a slot to replace is chosen, one hit counts as much as a last use that is this many seconds later.
_FOUND_WORTH_S = 600
_MOST_FOUND = 100
# Instead of a number of hits: the slot is being written since the time of its last use. Other writers leave it alone
# for this many seconds, after which its writer is taken to have died.
_RESERVED = 0xFFFF
_RESERVED_S = 60
_RESERVED_WORTH = np.iinfo(np.int64).max
# How many of the least valuable slots one scan of the index finds.
_NUM_CANDIDATES = 256


class Change(NamedTuple):
    """A slot whose block has changed: the names of the blocks `before` and `after`, 0 for none."""

    slot: int
    before: int
    after: int


class Reservation(NamedTuple):
    """A slot that is reserved for a block. `used_s` (seconds) and `order` say when it was used, and are its stamp once
    the block is written."""

    slot: int
    used_s: int
    order: int


class SlotIndex:
    """The mapped index. A thread that calls any of its methods may have to wait for the disk."""

    def __init__(self, descriptor: int, num_slots: int) -> None:
        mapped = mmap.mmap(descriptor, index_bytes(num_slots))
        self._num_changes: npt.NDArray[np.uint64] = np.frombuffer(mapped, "<u8", 1)
        self._recent: npt.NDArray[np.uint32] = np.frombuffer(mapped, "<u4", _NUM_RECENT, _RECENT_OFFSET)
        self._entries: npt.NDArray[Any] = np.frombuffer(mapped, _ENTRY, num_slots, _HEADER_BYTES)
        self._names = self._entries["name"]
        self._used_s = self._entries["used_s"]
        self._found = self._entries["found"]
        self._orders = self._entries["order"]
        # The names as of the last `take_changes`, and the number of changes then.
        self._seen: npt.NDArray[np.uint64] = np.zeros(num_slots, np.uint64)
        self._num_seen = -1
        self._order = 0
        # All slots that are worth at most `_most_worth`, as a heap. What they are worth may have grown since.
        self._candidates: list[tuple[int, int]] = []
        self._most_worth = -1

    def take_changes(self) -> list[Change]:
        """The names that differ from those at the last call. Changes of this process count as known."""
        num_changes = int(self._num_changes[0])
        if num_changes == self._num_seen:
            return []
        slots = self._changed_slots(num_changes)
        names = self._names[slots]
        changes = [
            Change(slot, before, after)
            for slot, before, after in zip(slots.tolist(), self._seen[slots].tolist(), names.tolist(), strict=True)
            if before != after
        ]
        self._seen[slots] = names
        self._num_seen = num_changes
        self._consider(slots)
        return changes

    def rename(self, slot: int, name: int) -> Change:
        """Change the name of a slot. The caller holds the lock, and has called `take_changes` since it got that."""
        change = Change(slot, int(self._seen[slot]), name)
        self._names[slot] = self._seen[slot] = name
        num_changes = int(self._num_changes[0])
        self._recent[num_changes % _NUM_RECENT] = slot
        self._num_changes[0] = self._num_seen = (num_changes + 1) & (2**64 - 1)
        return change

    def touch(self, slot: int, name: int) -> None:
        """Record that the block was in use until now. Of blocks used in the same second, the one touched last is the
        most valuable."""
        if int(self._names[slot]) == name:
            self._stamp(slot)

    def count_hit(self, slot: int, name: int) -> None:
        """Record that a request has found the block with this name in a slot. This makes the block more valuable. Does
        nothing if the slot has another block by now."""
        if int(self._names[slot]) == name:
            found = int(self._found[slot])
            # The mark is left if a writer died before it removed the name.
            self._found[slot] = 1 if found == _RESERVED else min(found + 1, _MOST_FOUND)
            self._stamp(slot)

    def prepare(self) -> None:
        """Look for slots that can be replaced. This is the slow part of `reserve`, and does not need the lock."""
        if not self._candidates:
            self._scan()

    def reserve(self) -> Reservation | None:
        """Reserve the least valuable slot. Returns None if other workers are writing all slots.

        The caller holds the lock and has called `take_changes` since it acquired the lock. It removes the slot's name
        after this call.
        """
        slot = self._least_valuable()
        if slot is None:
            return None
        self._found[slot] = _RESERVED
        self._stamp(slot)
        return Reservation(slot, int(self._used_s[slot]), int(self._orders[slot]))

    def release(self, reservation: Reservation) -> bool:
        """End a reservation: the slot has no hits, and was in use until now. Returns False if it had ended, so that
        others may have written the slot. The caller holds the lock."""
        slot = reservation.slot
        is_stamp = (int(self._used_s[slot]), int(self._orders[slot])) == reservation[1:]
        if not is_stamp or int(self._found[slot]) != _RESERVED or int(self._names[slot]):
            return False
        self._found[slot] = 0
        self._stamp(slot)
        self._consider(np.array([slot]))
        return True

    def _changed_slots(self, num_changes: int) -> npt.NDArray[np.intp]:
        """The slots that may have changed."""
        if 0 <= num_changes - self._num_seen < _NUM_RECENT and self._num_seen >= 0:
            places = np.arange(self._num_seen, num_changes, dtype=np.uint64) % np.uint64(_NUM_RECENT)
            slots = np.unique(self._recent[places]).astype(np.intp)
            # Meanwhile others may have replaced the first of them.
            if 0 <= int(self._num_changes[0]) - self._num_seen < _NUM_RECENT:
                return slots[slots < len(self._entries)]
        return np.flatnonzero(self._names != self._seen)

    def _stamp(self, slot: int) -> None:
        self._order = (self._order + 1) & 0xFFFF
        self._used_s[slot] = int(time.time())
        self._orders[slot] = self._order

    def _least_valuable(self) -> int | None:
        while self._candidates or self._scan():
            worth, slot = heapq.heappop(self._candidates)
            worth_now = int(_worth(self._entries[slot : slot + 1])[0])
            if worth_now == worth:
                return slot
            if worth_now <= self._most_worth:
                heapq.heappush(self._candidates, (worth_now, slot))
        return None

    def _consider(self, slots: npt.NDArray[np.intp]) -> None:
        """Add slots to the candidates that may have become less valuable."""
        if len(slots) + len(self._candidates) > 4 * _NUM_CANDIDATES:
            self._candidates = []
            self._most_worth = -1
            return
        for worth, slot in zip(_worth(self._entries[slots]).tolist(), slots.tolist(), strict=True):
            if worth <= self._most_worth:
                heapq.heappush(self._candidates, (worth, slot))

    def _scan(self) -> bool:
        """Find the least valuable slots. Returns False if all are being written."""
        entries = self._entries.copy()
        worth = _worth(entries)
        is_ahead = (entries["used_s"] > int(time.time())) & (worth < _RESERVED_WORTH)
        if is_ahead.any():
            # The clock was ahead. These blocks would stay until it gets there.
            self._used_s[is_ahead] = int(time.time())
            worth = _worth(self._entries)
        num_candidates = min(_NUM_CANDIDATES, len(worth))
        slots = np.argpartition(worth, num_candidates - 1)[:num_candidates]
        found = sorted(zip(worth[slots].tolist(), slots.tolist(), strict=True))
        self._candidates = [each for each in found if each[0] < _RESERVED_WORTH]
        self._most_worth = self._candidates[-1][0] if self._candidates else -1
        return bool(self._candidates)


def index_bytes(num_slots: int) -> int:
    """The size in bytes of the file of an index with `num_slots` slots."""
    return _HEADER_BYTES + num_slots * _ENTRY.itemsize


def _worth(entries: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """The value of each block now; the least valuable is replaced first."""
    used_s, found = entries["used_s"].astype(np.int64), entries["found"]
    is_marked = found == _RESERVED
    hits = np.where(is_marked, 0, np.minimum(found, _MOST_FOUND)).astype(np.int64)
    worth: npt.NDArray[np.int64] = ((used_s + _FOUND_WORTH_S * hits) << 16) + entries["order"]
    worth[is_marked & (np.abs(int(time.time()) - used_s) < _RESERVED_S)] = _RESERVED_WORTH
    return worth
