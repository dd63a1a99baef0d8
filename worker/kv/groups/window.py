"""Layers whose queries see only a window of the context.

Blocks are assigned as for full attention. Each has two parts: one for the layers with windows, which is in a slot, and
one for the other layers. A request holds the parts of layers with windows that its next token can see, and no others:

    tokens      |....|....|....|....|....|....|..            a request that has computed 26 tokens, window 8
    blocks        x    x    x    x    x    x    x
    parts                             x    x    x            of layers with windows

Parts of findable blocks are kept as long as there is room. A cached prefix is used up to where the parts of the last
window before its end exist. Its other blocks need none.

The memory is divided between blocks and slots in advance (`divide`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headrace.worker.kv.block_pool import BlockPool
from headrace.worker.kv.fetch import Persistence
from headrace.worker.kv.groups.group import BlockAt, Elsewhere, Exchange
from headrace.worker.kv.groups.window_parts import WindowParts
from headrace.worker.request.request import Request
from headrace.worker.request.step import BlockCopy

# Parts that a request holds in addition to those of a whole window: at the beginning of the window, at both ends of the
# computed tokens, at the end of a draft, and for a branch.
PARTS_BESIDE = 5
# The slots of running requests take at most this share of the memory.
_MOST_FOR_RUNNING = 0.5
# One slot for this many blocks keeps the parts from which requests can continue: a conversation of eight windows needs
# one window of parts.
_BLOCKS_PER_KEPT_PART = 8


class WindowBudget(NamedTuple):
    """The window of the layers in tokens, the number of slots for parts of blocks, and how many of these are for the
    tokens of one step."""

    num_tokens: int
    num_slots: int
    num_of_step: int

    def make(self, pool: BlockPool, persistence: Persistence) -> WindowAttention:
        """The group with these slots."""
        return WindowAttention(pool, self, persistence)


class PartSizes(NamedTuple):
    """The bytes of each block of `block_size` tokens without its part, and of each part; and the window of the layers
    in tokens."""

    block_bytes: int
    block_size: int
    part_bytes: int
    window: int


def divide(budget: int, sizes: PartSizes, max_num_seqs: int, step_tokens: int) -> tuple[int, WindowBudget]:
    """The number of blocks in `budget` bytes beside the slots, with one more of each for padding. There are slots for
    the windows of `max_num_seqs` requests and for the `step_tokens` tokens of a step, if these do not take too much.
    Each block has a slot if fewer slots would save nothing. The number of blocks is 0 if there is no room for one."""
    of_request, of_step = sizes.window // sizes.block_size + PARTS_BESIDE, -(-step_tokens // sizes.block_size)
    left = budget - sizes.block_bytes - sizes.part_bytes
    most = int(_MOST_FOR_RUNNING * left) // sizes.part_bytes
    running = max(of_request + of_step, min(max_num_seqs * of_request + of_step, most))
    left -= running * sizes.part_bytes
    num_blocks = max(0, int(left // (sizes.block_bytes + sizes.part_bytes / _BLOCKS_PER_KEPT_PART)))
    num_slots = running + num_blocks // _BLOCKS_PER_KEPT_PART
    if num_slots >= num_blocks:  # in this case each block has its part
        num_blocks = num_slots = max(0, budget // (sizes.block_bytes + sizes.part_bytes) - 1)
    return num_blocks, budget_of(num_blocks, num_slots, sizes.window, of_step)


def budget_of(num_blocks: int, num_slots: int, window: int, of_step: int) -> WindowBudget:
    """The budget of `num_slots` slots beside `num_blocks` blocks. `of_step` of them are for the tokens of a step,
    unless each block has its part."""
    return WindowBudget(window, num_slots, 0 if num_slots == num_blocks else of_step)


class WindowAttention:
    """The parts of blocks that requests hold. `parts` says which block's part is in which slot."""

    def __init__(self, pool: BlockPool, budget: WindowBudget, persistence: Persistence) -> None:
        self.window = budget.num_tokens
        self.parts = WindowParts(pool.num_blocks, budget.num_slots, self._spill_part, persistence.part_journal)
        self._pool = pool
        self._block_size = pool.block_size
        self._spill = persistence.spill
        self._most_of_windows = budget.num_slots - budget.num_of_step
        self._copies: list[BlockCopy] = []
        self._kept: Counter[int] = Counter()
        """Blocks whose parts are held for fetches."""
        self._first: dict[Request, int] = {}
        """Of each running request, the index of the first block whose part it holds."""

    @property
    def num_spare(self) -> int:
        """Slots that no running request may need, for parts that a tier brings."""
        left = self._most_of_windows - sum(map(self._most_parts, self._first)) - self._num_fetched
        return max(0, min(left, self.parts.num_available))

    @property
    def _num_fetched(self) -> int:
        """Slots that fetches hold."""
        return self.parts.num_detached + self._kept.total()

    def keep(self, blocks: Iterable[int]) -> None:
        """Hold the parts of these blocks until a fetch has ended."""
        for block in blocks:
            self.parts.hold(block)
            self._kept[block] += 1

    def stop_keeping(self, blocks: Iterable[int]) -> None:
        """Release the parts of these blocks, which `keep` held for a fetch that has ended."""
        self._kept.subtract(blocks)
        self._kept = +self._kept
        self.release(blocks, is_end=True)

    def admit(self, request: Request) -> bool:
        """Whether a waiting request may run, because there are slots for the windows of all running requests."""
        num_needed = sum(map(self._most_parts, self._first.keys() | {request}))
        # A request that is alone gets what fetches hold as soon as they have ended.
        if num_needed + self._num_fetched > self._most_of_windows:
            return False
        self.begin(request)
        return True

    def begin(self, request: Request) -> None:
        """Count the request among those that hold parts, before it holds any."""
        self._first.setdefault(request, 0)

    def usable(self, request: Request, end: int, block_at: BlockAt, elsewhere: Elsewhere) -> int:
        """See `CacheGroup`: the parts of the last window before that point exist."""
        held = len(request.block_table)
        while end > held:
            first = max(held, self.first_seen(end * self._block_size))
            missing = next(
                (
                    index
                    for index in range(end - 1, first - 1, -1)
                    if not self._has(block_at(index)) and not elsewhere(index)
                ),
                None,
            )
            if missing is None:
                return end
            end = missing
        return held

    def hold(self, request: Request, first: int, found: Sequence[int]) -> None:
        """See `CacheGroup`."""
        end = first + len(found)
        if len(request.block_table) < end:
            # The request computes these parts again. The next request with this beginning should find them.
            self.parts.want(found[max(self.first_seen(end * self._block_size), first) - first :])
        if len(request.block_table) == first:
            return
        first_seen = self.first_seen(request.num_computed_tokens)
        seen = request.block_table[max(first_seen, first) :]
        for block in seen:
            self.parts.hold(block)
        self.parts.want(seen)
        self._release_up_to(request, first_seen, first)

    def fits(self, request: Request, num_tokens: int) -> bool:
        """See `CacheGroup`. The request releases the parts that its queries cannot reach any more."""
        self._release_up_to(request, self.first_seen(request.num_computed_tokens), len(request.block_table))
        missing = -(-num_tokens // self._block_size) - len(request.block_table)
        if missing > self.parts.num_available:
            # Other requests may still hold parts that they computed in the previous step.
            for other in self._first:
                self._release_up_to(other, self.first_seen(other.num_computed_tokens), len(other.block_table))
        return missing <= self.parts.num_available

    def attach(self, blocks: Sequence[int], source: int | None = None) -> None:
        """Give parts to blocks that were just taken. The first is a copy of block `source`, if given."""
        slot = None if source is None else int(self.parts.slots[source])
        self.parts.attach(blocks)
        if slot is not None:
            # Copies are made in order and before anything is computed, so another block may have that slot by now.
            self._copies.append(BlockCopy(slot, int(self.parts.slots[blocks[0]])))

    def take_copies(self) -> Sequence[BlockCopy]:
        """Return and clear the copies between slots to make before the next step, in order."""
        copies, self._copies = self._copies, []
        return copies

    def publish(self, request: Request, first: int, exchanges: Sequence[Exchange]) -> None:
        """See `CacheGroup`."""
        first_held = self._first.get(request, 0)
        recorded: set[int] = set()
        for index, own, standing in exchanges:
            if index >= first_held and not self.parts.replace(own, standing):
                recorded.add(index)
        for index in range(max(first, first_held), request.num_findable_blocks):
            if index not in recorded:
                self.note(request.block_table[index])

    def note(self, block: int) -> None:
        """Record that the part of a block is computed. The block, or its beginning, is findable."""
        content = self._pool.content_of(block)
        if content is not None:
            self.parts.note(block, content)

    def place(self, slot: int, block: int | None) -> None:
        """A tier has filled a slot; see `WindowParts.place`."""
        self.parts.place(slot, block)
        if block is not None and self.parts.slot_of(block) == slot:
            self.note(block)

    def release(self, blocks: Iterable[int], *, is_end: bool = False) -> None:
        """A request no longer holds the parts of these blocks. `is_end`: it ends there."""
        for block in blocks:
            self.parts.release(block, is_findable=self._pool.is_cached(block), is_end=is_end)

    def free(self, request: Request) -> None:
        """See `CacheGroup`."""
        self.release(reversed(request.block_table[self._first.pop(request, 0) :]), is_end=True)

    def forget_all(self) -> None:
        """See `CacheGroup`."""
        self.parts.forget_all()

    def check(self) -> None:
        """See `CacheGroup`."""
        held: list[int] = []
        for request, first in self._first.items():
            assert first <= self.first_seen(request.num_computed_tokens), "a part is missing that queries can reach"
            held += request.block_table[first:]
            held += [block for branch in request.branches for block in branch.blocks]
        self.parts.check(Counter(held) + self._kept)
        assert all(map(self._pool.is_cached, self.parts.kept_blocks())), "a part is kept that nobody can find"

    def first_seen(self, num_tokens: int) -> int:
        """The index of the first block that a query after `num_tokens` tokens can reach."""
        return max(0, num_tokens - self.window) // self._block_size

    def _spill_part(self, block: int, slot: int) -> None:
        """Copy the part of a block to the tiers if requests may continue there, because it is about to be evicted."""
        content = self._pool.content_of(block)
        if self._spill is not None and content is not None:
            self._spill.spill_part(slot, content)

    def _has(self, block: int | None) -> bool:
        return block is not None and self.parts.has(block)

    def _most_parts(self, request: Request) -> int:
        """The maximum number of parts that a request holds, without those of the other tokens of a step."""
        of_tokens = -(-(request.num_tokens + 1) // self._block_size)
        return min(of_tokens, self.window // self._block_size + PARTS_BESIDE)

    def _release_up_to(self, request: Request, first: int, end: int) -> None:
        """Release the parts before block `first` of the request's first `end` blocks."""
        begin = self._first.get(request, 0)
        self.release(request.block_table[begin : min(first, end)])
        self._first[request] = max(begin, first)
