"""The slots for the states of recurrent layers.

A slot holds the states of all recurrent layers of the model after some tokens of one sequence. It is in one of three
states, like a KV block:

    held   in use by one or more requests, saved or not
    saved  held by nobody, can be found by the hash of the last KV block before it
    free   without useful content

A saved state is never changed. Saved states that nobody holds are evicted when slots are short, least recently used
first.
"""

from __future__ import annotations

from collections import OrderedDict

from headrace.worker.kv.chain import BlockKey
from headrace.worker.request.step import FIRST_STATE_SLOT


class StateSlots:
    """`num_slots` slots, numbered from FIRST_STATE_SLOT. Not thread-safe: the engine thread owns it."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evictions = 0
        self._free = list(range(FIRST_STATE_SLOT + num_slots - 1, FIRST_STATE_SLOT - 1, -1))
        self._holders = [0] * (FIRST_STATE_SLOT + num_slots)
        self._slot_of_hash: dict[int, int] = {}
        self._key_of_slot: dict[int, BlockKey] = {}
        # Saved slots that nobody holds, in the order of eviction.
        self._unheld: OrderedDict[int, None] = OrderedDict()
        self._changes: dict[int, bool] = {}

    @property
    def num_available(self) -> int:
        """Slots that can be taken: free and saved ones."""
        return len(self._free) + len(self._unheld)

    @property
    def num_saved(self) -> int:
        """States that can be found."""
        return len(self._slot_of_hash)

    def take_changes(self) -> dict[int, bool]:
        """The changes since the last call: hash of the block before a state -> whether the state is saved."""
        changes, self._changes = self._changes, {}
        return changes

    def is_saved(self, block_hash: int) -> bool:
        """Whether there is a state after the block with this hash."""
        return block_hash in self._slot_of_hash

    def is_free_to_change(self, slot: int) -> bool:
        """Whether the only holder of a slot may overwrite it."""
        return slot not in self._key_of_slot and self._holders[slot] == 1

    def find(self, key: BlockKey) -> int | None:
        """The slot with this state, or None."""
        slot = self._slot_of_hash.get(key.block_hash)
        return slot if slot is not None and self._key_of_slot[slot] == key else None

    def take(self) -> int:
        """Take a slot. If none is free, evict a saved state. There must be an available one."""
        if self._free:
            slot = self._free.pop()
        else:
            slot, _ = self._unheld.popitem(last=False)
            self._forget(slot)
            self.num_evictions += 1
        self._holders[slot] = 1
        return slot

    def hold(self, slot: int) -> None:
        """Add a holder to a slot that is saved or held."""
        self._holders[slot] += 1
        self._unheld.pop(slot, None)

    def release(self, slot: int) -> None:
        """Remove a holder from a slot. Without holders it is free, or evicted later if its state can be found."""
        assert self._holders[slot] > 0, "releasing a slot that nobody holds"
        self._holders[slot] -= 1
        if self._holders[slot]:
            return
        if slot in self._key_of_slot:
            self._unheld[slot] = None
        else:
            self._free.append(slot)

    def save(self, slot: int, key: BlockKey) -> bool:
        """Make a held slot findable, unless its hash leads to another one. Returns whether it now does."""
        if key.block_hash in self._slot_of_hash:
            return False
        assert self._holders[slot] > 0, "only a held slot can become findable"
        assert slot not in self._key_of_slot, "the slot is saved already"
        self._slot_of_hash[key.block_hash] = slot
        self._key_of_slot[slot] = key
        self._changes[key.block_hash] = True
        return True

    def evict_soon(self, block_hash: int) -> None:
        """Evict the state after this block next, if nobody holds it."""
        slot = self._slot_of_hash.get(block_hash)
        if slot is not None and slot in self._unheld:
            self._unheld.move_to_end(slot, last=False)

    def forget_all(self) -> None:
        """Forget all saved states. None may be held."""
        for slot in self._unheld:
            self._forget(slot)
            self._free.append(slot)
        self._unheld.clear()
        assert not self._key_of_slot, "a saved state is held"

    def check(self, holders: dict[int, int]) -> None:
        """Assert that every slot is accounted for, with this many holders of each slot. For tests."""
        found = {slot: count for slot, count in enumerate(self._holders) if count}
        assert found == holders, "a slot without an owner"
        idle = [*self._free, *self._unheld]
        assert len(idle) == len(set(idle)) == self.num_slots - len(found), "a slot is listed twice or lost"
        assert not set(idle) & set(found), "a held slot can be taken"
        assert set(self._unheld) == set(self._key_of_slot) - set(found), "a saved slot is lost"
        assert {key.block_hash: slot for slot, key in self._key_of_slot.items()} == self._slot_of_hash

    def _forget(self, slot: int) -> None:
        block_hash = self._key_of_slot.pop(slot).block_hash
        del self._slot_of_hash[block_hash]
        self._changes[block_hash] = False
