"""Which blocks the workers' disks hold, so that a prefix counts there that has left the memory. The same for the blocks
behind which a worker has saved a state of recurrent layers. Pure.

Unlike those in memory, the blocks on a disk are not closed under prefixes: the first blocks of a chain may still be in
memory, and were never written. So a chain is looked up from where the memory ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from headrace.router.placement.candidates import Places


class DiskIndex:
    """Slot of a worker -> hashes on its disk, or before its states, at most `max_entries` in all. Further ones are left
    out."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        self._on_disk: dict[int, set[int]] = {}

    def __len__(self) -> int:
        """Number of pairs of hash and worker."""
        return self._num_entries

    def reset(self, slot: int) -> None:
        """Forget the disk of a worker."""
        self._num_entries -= len(self._on_disk.pop(slot, ()))

    def apply(self, slot: int, stored: Iterable[int], evicted: Iterable[int]) -> None:
        """Apply changes: first what has left the disk, then what has come."""
        found = self._on_disk.setdefault(slot, set())
        self._num_entries -= len(found)
        found.difference_update(evicted)
        room = self._max_entries - self._num_entries
        for block_hash in stored:
            if len(found) >= room:
                break
            found.add(block_hash)
        self._num_entries += len(found)
        if not found:
            del self._on_disk[slot]

    def cut(self, hashes: Sequence[int], slots: Places, depths: Places) -> Places:
        """For each of the workers at `slots`, which have `depths` blocks of a chain in memory: the blocks up to
        the last one in this index, from which the worker can continue."""
        ends = np.zeros_like(depths)
        for number, slot in enumerate(slots.tolist()):
            found = self._on_disk.get(slot, ())
            end = int(depths[number])
            while end and hashes[end - 1] not in found:
                end -= 1
            ends[number] = end
        return ends

    def extend(self, hashes: Sequence[int], slots: Places, depths: Places) -> Places | None:
        """For each of the workers at `slots`, which have `depths` blocks of a chain in memory: the number of blocks
        together with those that follow on its disk. None if no disk has any."""
        if not self._on_disk:
            return None
        ends = depths.copy()
        for number, slot in enumerate(slots.tolist()):
            found = self._on_disk.get(slot)
            if found is None:
                continue
            end = int(depths[number])
            while end < len(hashes) and hashes[end] in found:
                end += 1
            ends[number] = end
        return ends if np.any(ends > depths) else None
