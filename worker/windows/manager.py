"""Assigns KV blocks to the requests of a model in which some layers see only a window of the context.

Blocks are assigned as usual. Each has two parts: one for the layers with windows, which is in a slot, and one for the
other layers. A request holds the parts of layers with windows that its next token can see, and no others:

    tokens      |....|....|....|....|....|....|..            a request that has computed 26 tokens, window 8
    blocks        x    x    x    x    x    x    x
    parts                             x    x    x            of layers with windows

Parts of findable blocks are kept as long as there is room. A cached prefix is used up to where the parts of the last
window before its end exist. Its other blocks need none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.worker.kv.block_pool import BlockPool
from headrace.worker.kv.manager import MIN_COPIED_TOKENS, KVCacheManager
from headrace.worker.request.request import Request
from headrace.worker.windows.parts import WindowParts

# Parts that a request holds in addition to those of a whole window: at the beginning of the window, at both ends of the
# computed tokens, at the end of a draft, and for a branch.
PARTS_BESIDE = 5


class WindowBudget(NamedTuple):
    """The window of the layers in tokens, the number of slots for parts of blocks, and how many of these are for the
    tokens of one step."""

    num_tokens: int
    num_slots: int
    num_of_step: int


class WindowCacheManager(KVCacheManager):
    """See `KVCacheManager`. `parts` says which block's part is in which slot."""

    def __init__(self, pool: BlockPool, budget: WindowBudget) -> None:
        super().__init__(pool)
        self.window = budget.num_tokens
        self.parts = WindowParts(pool.num_blocks, budget.num_slots)
        self._most_of_windows = budget.num_slots - budget.num_of_step
        self._first: dict[Request, int] = {}
        """Of each running request, the index of the first block whose part it holds."""

    @property
    def num_parts(self) -> tuple[int, int]:
        """See `KVCacheManager`."""
        return self.parts.num_slots, self.parts.num_slots - self.parts.num_available

    @property
    def part_slots(self) -> npt.NDArray[np.int32]:
        """See `KVCacheManager`."""
        return self.parts.slots

    def has_room(self, request: Request, num_blocks: int) -> bool:
        """See `KVCacheManager`. There are slots for the windows of all running requests."""
        if not super().has_room(request, num_blocks):
            return False
        if sum(map(self._most_parts, self._first.keys() | {request})) > self._most_of_windows:
            return False
        self._first.setdefault(request, 0)
        return True

    def reuse(self, request: Request) -> int:
        """See `KVCacheManager`."""
        held = len(request.block_table)
        gained = super().reuse(request)
        if gained:
            first = self._first_seen(request.num_computed_tokens)
            seen = request.block_table[max(first, held) :]
            for block in seen:
                self.parts.hold(block)
            self.parts.want(seen)
            self._release_up_to(request, first, held)
        return gained

    def num_computed_by_now(self, request: Request) -> int:
        """See `KVCacheManager`."""
        held, end = len(request.block_table), super().num_computed_by_now(request) // self.block_size
        if end <= held:
            return request.num_computed_tokens
        return (
            self._last_usable(held, end, lambda index: self._has_part(self.hash_of(request, index))) * self.block_size
        )

    def copy_beginning(self, request: Request) -> int:
        """See `KVCacheManager`."""
        source, gained = self._find_beginning(request)
        if gained < MIN_COPIED_TOKENS or not self.parts.num_available:
            return 0
        slot = self.parts.slots[source]
        gained = super().copy_beginning(request)
        if gained:
            self._first.setdefault(request, 0)
            self.parts.attach(request.block_table[-1:])
            self._copy_part(slot)
        return gained

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """See `KVCacheManager`. The request first releases the parts that its queries cannot reach any more."""
        self._release_up_to(request, self._first_seen(request.num_computed_tokens), len(request.block_table))
        missing = self.num_blocks_for(num_tokens) - len(request.block_table)
        if missing > self.parts.num_available:
            # Other requests may still hold parts that they computed in the previous step.
            for other in self._first:
                self._release_up_to(other, self._first_seen(other.num_computed_tokens), len(other.block_table))
        if missing > self.parts.num_available or not super().reserve(request, num_tokens):
            return False
        if missing > 0:
            self.parts.attach(request.block_table[-missing:])
        return True

    def add_branch(self, request: Request, token_ids: Sequence[int], num_spared: int) -> bool:
        """See `KVCacheManager`."""
        count = self.num_blocks_for(request.num_tokens + len(token_ids)) - request.num_tokens // self.block_size
        num_copies = len(self._copies)
        if self.parts.num_available < count + num_spared or not super().add_branch(request, token_ids, num_spared):
            return False
        assert request.branch is not None
        self.parts.attach(request.branch.blocks)
        if len(self._copies) > num_copies:
            self._copy_part(self.parts.slots[self._copies[-1].source])
        return True

    def end_branch(self, request: Request, token_ids: Sequence[int] = ()) -> None:
        """See `KVCacheManager`."""
        branch = request.branch
        if branch is None:
            return
        blocks = {*request.block_table[branch.first_block :], *branch.blocks}
        super().end_branch(request, token_ids)
        for block in blocks.difference(request.block_table[branch.first_block :]):
            self._release(block, is_end=False)

    def free(self, request: Request) -> None:
        """See `KVCacheManager`."""
        self.end_branch(request)
        for block in reversed(request.block_table[self._first.pop(request, 0) :]):
            self._release(block, is_end=True)
        super().free(request)

    def forget_all(self) -> None:
        """See `KVCacheManager`."""
        super().forget_all()
        self.parts.forget_all()

    def check(self) -> None:
        """See `KVCacheManager`."""
        super().check()
        held: list[int] = []
        for request, first in self._first.items():
            assert first <= self._first_seen(request.num_computed_tokens), "a part is missing that queries can reach"
            held += request.block_table[first:]
            held += () if request.branch is None else request.branch.blocks
        self.parts.check(Counter(held))
        assert all(map(self.pool.is_cached, self.parts.kept_blocks())), "a part is kept that nobody can find"

    def _find_cached(self, request: Request) -> list[int]:
        """The cached blocks that match the request's next tokens, as far as the parts of a window before their end
        exist."""
        found = super()._find_cached(request)
        held = len(request.block_table)
        end = held + len(found)
        last = self._last_usable(held, end, lambda index: self.parts.has(found[index - held]))
        if last < end:
            # The request computes these parts again. The next request with this beginning should find them.
            self.parts.want(found[max(self._first_seen(end * self.block_size), held) - held :])
        return found[: last - held]

    def _find_beginning(self, request: Request) -> tuple[int, int]:
        source, gained = super()._find_beginning(request)
        return (source, gained) if gained and self.parts.has(source) else (-1, 0)

    def _exchange(self, request: Request, index: int, block: int) -> None:
        if index >= self._first.get(request, 0):
            self.parts.replace(request.block_table[index], block)
        super()._exchange(request, index, block)

    def _last_usable(self, held: int, end: int, has_part: Callable[[int], bool]) -> int:
        """The largest number of blocks up to `end`, and at least `held`, after which a request can continue, because
        the parts of the last window before that point exist. `held` blocks belong to the request."""
        while end > held:
            first = max(held, self._first_seen(end * self.block_size))
            missing = next((index for index in range(end - 1, first - 1, -1) if not has_part(index)), None)
            if missing is None:
                return end
            end = missing
        return held

    def _has_part(self, block_hash: int) -> bool:
        located = self.pool.locate(block_hash)
        return located is not None and self.parts.has(located[0])

    def _first_seen(self, num_tokens: int) -> int:
        """The index of the first block that a query after `num_tokens` tokens can reach."""
        return max(0, num_tokens - self.window) // self.block_size

    def _most_parts(self, request: Request) -> int:
        """The maximum number of parts that a request holds, without those of the other tokens of a step."""
        return min(self.num_blocks_for(request.num_tokens + 1), self.window // self.block_size + PARTS_BESIDE)

    def _release_up_to(self, request: Request, first: int, end: int) -> None:
        """Release the parts before block `first` of the request's first `end` blocks."""
        begin = self._first.get(request, 0)
        for block in request.block_table[begin : min(first, end)]:
            self._release(block, is_end=False)
        self._first[request] = max(begin, first)

    def _copy_part(self, slot: int) -> None:
        """Make the last of the copies include the part in this slot. Copies are made in order and before anything is
        computed, so it does not matter whether another block then has the slot."""
        copy = self._copies[-1]
        self._copies[-1] = copy._replace(parts=(int(slot), int(self.parts.slots[copy.destination])))

    def _release(self, block: int, *, is_end: bool) -> None:
        self.parts.release(block, is_findable=self.pool.is_cached(block), is_end=is_end)
