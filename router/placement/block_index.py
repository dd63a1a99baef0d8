"""Maps block hashes to workers: those that have the block on their disk, or have saved a state of recurrent layers
after it. Pure.

Unlike blocks in memory, these are not closed under prefixes: the first blocks of a chain may still be in memory, and
not yet on the disk. So a chain is looked up from the end of the part in memory, for all workers at once: as in the
prefix index, each hash has the bits of its workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from headrace.router.placement.candidates import Places

# Up to this many workers are set one by one; for more of them, an array is faster.
_FEW_BITS = 8


class BlockIndex:
    """Block hash -> slots of workers, at most `max_entries` pairs. Further ones are dropped."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._num_entries = 0
        self._of_slot: dict[int, set[int]] = {}
        self._mask: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of pairs of hash and worker."""
        return self._num_entries

    def reset(self, slot: int) -> None:
        """Forget all blocks of the worker in a slot."""
        self.apply(slot, (), list(self._of_slot.get(slot, ())))

    def apply(self, slot: int, stored: Iterable[int], evicted: Iterable[int]) -> None:
        """Apply changes of a worker: first removals, then additions."""
        found = self._of_slot.setdefault(slot, set())
        masks = self._mask
        bit = 1 << slot
        self._num_entries -= len(found)
        for block_hash in evicted:
            if block_hash in found:
                found.remove(block_hash)
                masks[block_hash] ^= bit
                if not masks[block_hash]:
                    del masks[block_hash]
        room = self._max_entries - self._num_entries
        for block_hash in stored:
            if len(found) >= room:
                break
            found.add(block_hash)
            masks[block_hash] = masks.get(block_hash, 0) | bit
        self._num_entries += len(found)
        if not found:
            del self._of_slot[slot]

    def cut(self, hashes: Sequence[int], slots: Places, depths: Places) -> Places:
        """For each worker at `slots`, the number of blocks up to the last one that is in this index, within the
        `depths` blocks of the chain that it has in memory. The worker can continue from there."""
        ends: Places = np.zeros(_num_slots(slots), np.intp)
        of_depth = _by_depth(slots, depths)
        mask_of = self._mask.get
        searching = 0
        for end in range(max(of_depth, default=0), 0, -1):
            searching |= of_depth.get(end, 0)
            found = mask_of(hashes[end - 1], 0) & searching
            if found:
                note(ends, found, end)
                searching ^= found
        return ends[slots]

    def extend(self, hashes: Sequence[int], slots: Places, depths: Places) -> Places | None:
        """For each worker at `slots`, the number of blocks that it has in memory (`depths`) and of those that follow in
        this index. None if none follow at any worker."""
        if not self._of_slot:
            return None
        ends: Places = np.zeros(_num_slots(slots), np.intp)
        ends[slots] = depths
        of_depth = _by_depth(slots, depths)
        mask_of = self._mask.get
        going = 0
        for end in range(min(of_depth, default=0), len(hashes)):
            going |= of_depth.pop(end, 0)
            still = mask_of(hashes[end], 0) & going
            if still != going:
                note(ends, going ^ still, end)
                going = still
            if not going and not of_depth:
                break
        note(ends, going, len(hashes))
        found = ends[slots]
        return found if np.any(found > depths) else None

    def check(self) -> None:
        """Assert that hashes, slots and the count agree. For tests."""
        expected: dict[int, int] = {}
        for slot, hashes in self._of_slot.items():
            assert hashes, "an empty slot is kept"
            for block_hash in hashes:
                expected[block_hash] = expected.get(block_hash, 0) | 1 << slot
        assert self._mask == expected
        assert self._num_entries == sum(map(len, self._of_slot.values())) <= self._max_entries


def note(depths: Places, bits: int, depth: int) -> None:
    """Set the depth `depth`, in blocks, of the workers whose bits are in `bits`."""
    if bits.bit_count() > _FEW_BITS:
        num_bytes = (bits.bit_length() + 7) >> 3
        flags = np.unpackbits(np.frombuffer(bits.to_bytes(num_bytes, "little"), np.uint8), bitorder="little")
        depths[flags.nonzero()[0]] = depth
        return
    while bits:
        slot = bits.bit_length() - 1
        depths[slot] = depth
        bits ^= 1 << slot


def _num_slots(slots: Places) -> int:
    return int(slots.max(initial=-1)) + 1


def _by_depth(slots: Places, depths: Places) -> dict[int, int]:
    """Depth -> the bits of the slots with it."""
    found: dict[int, int] = {}
    for depth in np.unique(depths).tolist():
        flags: npt.NDArray[np.bool_] = np.zeros(_num_slots(slots), np.bool_)
        flags[slots[depths == depth]] = True
        found[depth] = int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
    return found
