"""The parts of KV blocks that belong to layers with a sliding window.

There are fewer of them than blocks. Each is in a slot, and belongs to one block. A block has its part as long as a
query can reach it, and longer if there is room:

    held     a request can reach it
    kept     nobody can reach it; a request that begins alike may
    free     without a block

If slots are short, kept parts are evicted: first those in the middle of sequences, then those at which requests have
continued or ended. Both least recently held first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from headrace.worker.kv.chain import Content
from headrace.worker.kv.journal import BlockJournal


class WindowParts:
    """`num_slots` slots for the parts of `num_blocks` blocks. Not thread-safe: the engine thread owns it.

    `slots` `[num_blocks + 1]` has the slot of each block. Blocks without a part have slot `num_slots`, like the block
    for padding, which is the last.
    """

    def __init__(
        self, num_blocks: int, num_slots: int, on_eviction: Callable[[int, int], None], journal: BlockJournal | None
    ) -> None:
        """`on_eviction` is called with a block and its slot before its part is evicted, if requests have continued or
        ended there. `journal` records what is in each slot."""
        self.num_slots = num_slots
        self.num_given_up = 0
        """Number of kept parts that were evicted so far."""
        self._on_eviction = on_eviction
        self._journal = journal
        self._detached: set[int] = set()
        self._slot_of = array("i", [num_slots] * (num_blocks + 1))
        self.slots: npt.NDArray[np.int32] = np.frombuffer(self._slot_of, np.int32)
        self._num_holders = array("i", bytes(4 * num_blocks))
        self._is_wanted = bytearray(num_blocks)
        self._free = list(range(num_slots - 1, -1, -1))
        # Blocks whose parts are kept, in the order of eviction.
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._wanted: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Slots that can be taken: free ones, and those of kept parts."""
        return len(self._free) + len(self._passed) + len(self._wanted)

    @property
    def num_kept(self) -> int:
        """How many parts belong to findable blocks that nobody holds."""
        return len(self._passed) + len(self._wanted)

    def has(self, block: int) -> bool:
        """Whether a block has its part."""
        return self._slot_of[block] != self.num_slots

    def slot_of(self, block: int) -> int | None:
        """The slot of a block's part; None if it has none. Any thread may call it; the part may be evicted at any time
        unless the caller is the owner."""
        slot = self._slot_of[block]
        return None if slot == self.num_slots else slot

    def want(self, blocks: Iterable[int]) -> None:
        """Requests continue after these blocks, so their parts are evicted last."""
        for block in blocks:
            self._is_wanted[block] = True
            if block in self._passed:
                del self._passed[block]
                self._wanted[block] = None

    def attach(self, blocks: Iterable[int]) -> None:
        """Give a slot to each of these blocks, whose content is about to change. As many slots must be available."""
        for block in blocks:
            self._is_wanted[block] = False
            if self.has(block):
                self.hold(block)
                if self._journal is not None:
                    self._journal.drop(self._slot_of[block])
                continue
            self._slot_of[block] = self._take()
            self._num_holders[block] = 1

    @property
    def num_detached(self) -> int:
        """Number of slots that were taken for parts that a tier will fill."""
        return len(self._detached)

    def take_slot(self) -> int:
        """A slot without a block, to be filled by a tier. One must be available."""
        slot = self._take()
        self._detached.add(slot)
        return slot

    def place(self, slot: int, block: int | None) -> None:
        """A tier has filled a slot for this findable block, whose part it becomes unless the block has one by now. None
        if it did not."""
        self._detached.remove(slot)
        if block is None or self.has(block):
            self._free.append(slot)
            return
        self._slot_of[block] = slot
        self._is_wanted[block] = True
        self._wanted[block] = None

    def drop(self, block: int) -> None:
        """Forget the part of a block whose content is gone, if it has one. Nobody may hold it."""
        if self.has(block):
            assert not self._num_holders[block], "a part is dropped that somebody holds"
            self._unlink(block)
            self._forget(block)

    def _take(self) -> int:
        """A free slot. If there is none, a kept part is evicted."""
        assert self.num_available, "more parts of blocks are taken than are free"
        if not self._free:
            if self._passed:
                block, _ = self._passed.popitem(last=False)
            else:
                block, _ = self._wanted.popitem(last=False)
                self._on_eviction(block, self._slot_of[block])
            self._forget(block)
            self.num_given_up += 1
        slot = self._free.pop()
        if self._journal is not None:
            self._journal.drop(slot)  # of the previous process
            self._journal.grow(slot)
        return slot

    def note(self, block: int, content: Content) -> None:
        """The part of a block is computed, with this content."""
        if self._journal is not None and self.has(block):
            self._journal.note(self._slot_of[block], content)

    def take_last(self, slots: Iterable[int]) -> None:
        """Take these free slots after all others, the first ones first."""
        last = dict.fromkeys(slots)
        self._free = [*reversed(last), *(slot for slot in self._free if slot not in last)]

    def restore(self, parts: Iterable[tuple[int, int]]) -> None:
        """Give findable blocks without a part free slots that have theirs, as the journal says, in the order of
        eviction."""
        slots = set()
        for block, slot in parts:
            assert not self.has(block), "the block has a part"
            slots.add(slot)
            self._slot_of[block] = slot
            self._is_wanted[block] = True
            self._wanted[block] = None
        assert slots <= set(self._free), "a slot is in use"
        self._free = [slot for slot in self._free if slot not in slots]

    def hold(self, block: int) -> None:
        """Add a holder to the part of a block."""
        assert self.has(block), "the block has no part"
        if not self._num_holders[block]:
            self._unlink(block)
        self._num_holders[block] += 1

    def release(self, block: int, *, is_findable: bool, is_end: bool) -> None:
        """Remove a holder. The part is kept if the block is findable. `is_end`: a sequence ends here."""
        assert self._num_holders[block] > 0, "releasing a part that nobody holds"
        self._num_holders[block] -= 1
        if self._num_holders[block]:
            return
        if not is_findable:
            self._forget(block)
            return
        if self._journal is not None:
            self._journal.use([self._slot_of[block]])
        if is_end or self._is_wanted[block]:
            self._wanted[block] = None
        else:
            self._passed[block] = None

    def replace(self, own: int, other: int) -> bool:
        """The only holder of the part of block `own` changes to a block with the same content. That gets the part if it
        has none. Returns whether it did."""
        assert self._num_holders[own] == 1, "the part has other holders"
        has_moved = not self.has(other)
        if not has_moved:
            self.hold(other)
            self._forget(own)
        else:
            self._slot_of[other], self._slot_of[own] = self._slot_of[own], self.num_slots
            self._num_holders[other] = 1
        self._num_holders[own] = 0
        return has_moved

    def forget_all(self) -> None:
        """Release all parts. None may be held."""
        for block in (*self._passed, *self._wanted):
            self._forget(block)
        self._passed.clear()
        self._wanted.clear()
        assert len(self._free) == self.num_slots, "a part is held"

    def check(self, holders: dict[int, int]) -> None:
        """Assert that every slot is accounted for, with this many holders of each block. For tests."""
        found = {block: count for block, count in enumerate(self._num_holders) if count}
        assert found == holders, "a part without an owner"
        kept = [*self._passed, *self._wanted]
        assert len(kept) == len(set(kept)), "a part is kept twice"
        assert not set(kept) & set(found), "a held part can be given up"
        taken = {block: slot for block, slot in enumerate(self._slot_of) if slot != self.num_slots}
        assert set(taken) == {*kept, *found}, "a block has a part that nobody holds or keeps"
        slots = sorted([*taken.values(), *self._free, *self._detached])
        assert slots == list(range(self.num_slots)), "a slot is lost or has two blocks"

    def kept_blocks(self) -> list[int]:
        """The blocks whose parts are kept. For tests."""
        return [*self._passed, *self._wanted]

    def _unlink(self, block: int) -> None:
        if block in self._passed:
            del self._passed[block]
        else:
            del self._wanted[block]

    def _forget(self, block: int) -> None:
        if self._journal is not None:
            self._journal.drop(self._slot_of[block])
        self._free.append(self._slot_of[block])
        self._slot_of[block] = self.num_slots
