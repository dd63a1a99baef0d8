"""The KV cache of a scheduler: composes what requests hold for the kinds of layers that the model has.

    full attention    blocks of the pool, one table for each request              every model
    sliding window    parts of blocks, only those that queries can reach          groups/window.py
    recurrent state   slots of states at block borders                            groups/recurrent.py
    evicting          private blocks, with a table for each layer                 groups/evicting.py

A request continues after the last block that all its groups can use. A step is scheduled if all of them have room for
it. Scheduler, tiers, speculation and handover talk to the coordinator alone.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from headrace.worker.kv.beams import BeamBlocks
from headrace.worker.kv.block_pool import BlockPool
from headrace.worker.kv.chain import BlockKey, Content, content_of, hash_of, key_of, parent_of
from headrace.worker.kv.fetch import NO_SLOT, NOT_PERSISTENT, ChainedBlock, Fetch, Held, Persistence, Wanted
from headrace.worker.kv.groups.evicting import EvictingAttention
from headrace.worker.kv.groups.full import FullAttention
from headrace.worker.kv.groups.group import (
    MIN_TOKENS_LEFT,
    BlockAt,
    CacheGroup,
    Elsewhere,
    nowhere,
)
from headrace.worker.kv.groups.recurrent import RecurrentStates
from headrace.worker.kv.groups.window import WindowAttention
from headrace.worker.request.request import Branch, Replaced, Request, TokenPath, num_common
from headrace.worker.request.step import BlockCopy, Scheduled, StepPlan

# Copying a block in all layers costs about 0.1 ms; computing a token of a small model costs about 0.4 ms.
MIN_COPIED_TOKENS = 2

_Kind = TypeVar("_Kind")


class GroupBudget(Protocol):
    """The memory for a group of layers, in units of that group."""

    def make(self, pool: BlockPool, persistence: Persistence) -> CacheGroup | EvictingAttention:
        """The group, over the blocks of `pool`. `persistence` keeps what the group has in addition to blocks."""
        ...


class CacheFigures(NamedTuple):
    """Sizes of the cache and what it holds now, as in `LoadReport`. `num_partial_blocks` have only a beginning that can
    be found. Slots are those of states of recurrent layers, and of parts of blocks for layers with a window."""

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_partial_blocks: int
    num_state_slots: int
    num_saved_states: int
    num_window_slots: int
    num_held_window_slots: int


class CacheChanges(NamedTuple):
    """Changes since the last time they were taken: hashes of blocks that became findable and that were evicted, and for
    hashes of blocks whether a state after them is saved."""

    stored: list[int]
    evicted: list[int]
    state_changes: dict[int, bool]


class KVCache:
    """A cache of `num_blocks` blocks of `block_size` tokens, empty at first, and of what `budgets` have for the groups
    of layers beside full attention. Only the engine thread uses it, unless a method says otherwise."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        budgets: Sequence[GroupBudget] = (),
        persistence: Persistence = NOT_PERSISTENT,
        on_take: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """`on_take` is called with blocks whose content is about to change. ValueError without a block."""
        self._journals = [journal for journal in persistence[:2] if journal is not None]
        self._spill = persistence.spill
        on_eviction = None if self._spill is None else self._spill_block
        self.pool = pool = BlockPool(num_blocks, block_size, persistence.journal, on_eviction, on_take)
        self.block_size = block_size
        groups = [budget.make(pool, persistence) for budget in budgets]
        self.windows = _only(WindowAttention, groups)
        self.states = _only(RecurrentStates, groups)
        self.evicting = _only(EvictingAttention, groups)
        self._blocks = FullAttention(pool)
        self._beams = BeamBlocks(pool)
        self._beside: list[CacheGroup] = [group for group in groups if not isinstance(group, EvictingAttention)]
        self._copies: list[BlockCopy] = []

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.pool.num_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Number of blocks that can be found by their hash, in use or not."""
        return self.pool.num_cached_blocks

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be taken: free and cached ones."""
        return self.pool.num_free_blocks

    @property
    def num_shared_tokens(self) -> int:
        """Positions in blocks of several requests, counted once for each request but the first."""
        return self.pool.num_shared_holds * self.pool.block_size

    def figures(self) -> CacheFigures:
        """Sizes of the cache, and what is in it now."""
        pool = self.pool
        states = self.states
        windows = self.windows
        return CacheFigures(
            pool.num_blocks,
            pool.num_free_blocks,
            pool.num_cached_blocks,
            pool.num_partial_blocks,
            0 if states is None else states.slots.num_slots,
            0 if states is None else states.slots.num_saved,
            0 if windows is None else windows.parts.num_slots,
            0 if windows is None else windows.parts.num_slots - windows.parts.num_available,
        )

    def counters(self) -> dict[str, int]:
        """Totals since the start: blocks that were evicted, blocks that were restored from an earlier process, and
        blocks that requests have evicted from their own sequences."""
        return {
            "blocks_evicted": self.pool.num_evictions,
            "blocks_restored": self.pool.num_restored,
            "blocks_given_up": 0 if self.evicting is None else self.evicting.num_given_up,
        }

    def take_changes(self) -> CacheChanges:
        """Which blocks and states became findable and which were lost since the last call."""
        return CacheChanges(*self.pool.take_events(), {} if self.states is None else self.states.slots.take_changes())

    @property
    def most_draft_tokens(self) -> int:
        """The largest number of draft tokens in a step, over all requests. Each needs a slot for the state after it."""
        return sys.maxsize if self.states is None else self.states.num_for_drafts

    @property
    def has_branches(self) -> bool:
        """Whether drafts may have branches. They may not in models with recurrent layers, whose states cannot
        branch."""
        return self.states is None

    @property
    def takes_beams(self) -> bool:
        """Whether beam searches are possible: all layers keep every token, in blocks that can be shared."""
        return not self._beside

    def _spill_block(self, block: int, content: Content) -> None:
        """Copy a block to the tiers, because it is about to be evicted."""
        slot = self.slot_of(block)
        if self._spill is not None:
            self._spill.spill(block, NO_SLOT if slot is None else slot, content)

    def locate(self, block_hash: int) -> tuple[int, Content] | None:
        """The block with this hash and its content, or None. Any thread may call it; the block may be evicted at any
        time unless the caller is the engine's thread."""
        return self.pool.locate(block_hash)

    def is_findable(self, block_hash: int) -> bool:
        """Whether some block has this hash, possibly without its part for layers with a window."""
        return self.pool.is_findable(block_hash)

    def slot_of(self, block: int) -> int | None:
        """The slot of a block's part for layers with a window; None if it has none. Any thread may call it, as
        `locate`."""
        return None if self.windows is None else self.windows.parts.slot_of(block)

    def hottest_first(self) -> list[Content]:
        """The full findable blocks, most recently used first, and each after its predecessor. Any thread may call it;
        blocks that change while this runs may be missing."""
        return self.pool.hottest_first()

    def restore(
        self, blocks: Iterable[tuple[int, Content]], order: Iterable[int], parts: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Make blocks findable again that the journal already records, each after its predecessor. They are evicted in
        this `order`, after all that is cached now. `parts` are blocks and the slots that have their parts for layers
        with a window, in the order of eviction."""
        self.pool.restore(blocks)
        self.pool.put_last(order)
        if self.windows is not None:
            self.windows.parts.restore(parts)

    def take_last(self, blocks: Iterable[int], slots: Iterable[int] = ()) -> None:
        """Move these free blocks and slots to the end of the eviction order, so that they keep the previous process's
        content for as long as possible."""
        self.pool.put_last(blocks)
        if self.windows is not None:
            self.windows.parts.take_last(slots)

    @property
    def has_unsealed(self) -> bool:
        """Whether blocks wait for `seal`."""
        return any(journal.has_unsealed for journal in self._journals)

    def seal(self) -> None:
        """Record the content of new blocks for the next process. Reads their bytes, so none of them may be taken while
        this runs."""
        for journal in self._journals:
            journal.seal()

    def has_room(self, request: Request, num_blocks: int) -> bool:
        """Whether a waiting request may run, so that running requests can take `num_blocks` more blocks."""
        if num_blocks > self.pool.num_free_blocks:
            return False
        return self.windows is None or self.windows.admit(request)

    def num_blocks_for(self, num_tokens: int) -> int:
        """The number of blocks that `num_tokens` tokens occupy."""
        return self._blocks.num_blocks_for(num_tokens)

    def num_blocks_of(self, request: Request, num_tokens: int) -> int:
        """The maximum number of blocks that the request holds until it has computed `num_tokens` tokens. A beam search
        may also need one for each further beam."""
        if self.evicting is not None and request.eviction is not None:
            return self.evicting.num_blocks_of(request, request.eviction, num_tokens)
        return self.num_blocks_for(num_tokens)

    def num_reusable(self, request: Request) -> int:
        """How many of the request's tokens may come from the cache. At least `MIN_TOKENS_LEFT` are computed, and those
        that the request evicts."""
        most = request.num_tokens - MIN_TOKENS_LEFT
        return most if request.eviction is None else min(most, request.eviction.num_reusable(request.num_prompt_tokens))

    def reuse(self, request: Request) -> int:
        """Append the cached blocks that match the request's next tokens. Returns the number of tokens gained.

        The scheduler calls it before each step of the request, so that the request also uses blocks that other requests
        have computed meanwhile.
        """
        found = self._blocks.find(request, self.num_reusable(request))
        if not found:
            return 0
        first = len(request.block_table)
        end = self._usable(request, first + len(found), lambda index: found[index - first])
        if end > first:
            self._blocks.hold(request, found[: end - first])
        for group in self._beside:
            group.hold(request, first, found)
        return (end - first) * self.block_size

    def num_computed_by_now(self, request: Request) -> int:
        """Estimate how many computed tokens the request would have after `reuse`. It may count a block whose hash
        collides."""
        end = self._blocks.num_findable(request, self.num_reusable(request))
        if end == len(request.block_table):
            return request.num_computed_tokens
        usable = self._usable(request, end, self._block_at(request))
        return max(request.num_computed_tokens, usable * self.block_size)

    def _block_at(self, request: Request) -> BlockAt:
        return lambda index: self.pool.block_of(self.hash_of(request, index))

    def num_fetchable(self, request: Request, end: int, has_part: Callable[[int], bool]) -> int:
        """The largest number of blocks, at most `end`, after which the request could continue if a tier brought what is
        missing of them. `has_part`: whether the tier has the part of the block with this hash."""
        return self._usable(request, end, self._block_at(request), lambda index: has_part(self.hash_of(request, index)))

    def hold_prefix(self, request: Request, end: int) -> list[int]:
        """Hold the cached blocks at the beginning of a request that has none, at most `end` of them. Returns them."""
        prefix = self._blocks.find(request, self.num_reusable(request))[:end]
        self.pool.hold(prefix)
        return prefix

    def release_prefix(self, prefix: Sequence[int]) -> None:
        """Release the blocks that `hold_prefix` has returned."""
        self.pool.release(reversed(prefix))

    def num_usable(self, request: Request, prefix: Sequence[int]) -> int:
        """The number of blocks of `prefix`, from its beginning, after which a request without blocks could continue."""
        return self._usable(request, len(prefix), lambda index: prefix[index])

    def take_wanted(self, request: Request, prefix: list[int], end: int) -> tuple[Held, list[Wanted]] | None:
        """Take blocks for what a tier brings after the `prefix`, which is held, up to block `end`, and slots for the
        parts of the last window before it. As many blocks must be free. None, with nothing taken, if there are too few
        slots."""
        windows, size = self.windows, self.block_size
        seen = range(0) if windows is None else range(windows.first_seen(end * size), end)
        if windows is not None and len(seen) > windows.num_spare:
            return None
        self.pool.release(reversed(prefix[end:]))
        prefix = prefix[:end]
        there = [prefix[index] for index in seen if index < len(prefix) and self._has_part(prefix[index])]
        if windows is not None:
            windows.keep(there)
        blocks = [*prefix, *self._take_empty(end - len(prefix))]
        wanted = []
        for index, block in enumerate(blocks):
            part_only = index < len(prefix)
            slot = NO_SLOT
            if windows is not None and index in seen and not (part_only and windows.parts.has(block)):
                slot = windows.parts.take_slot()
            if slot != NO_SLOT or not part_only:
                wanted.append(Wanted(block, *self.key_of(request, index), index == 0, slot, part_only))
        return Held(prefix, there), wanted

    def _take_empty(self, count: int) -> list[int]:
        """Take blocks that no request computes, to be filled by a tier."""
        blocks = self.pool.take(count)
        if self.windows is not None:
            for block in blocks:
                self.windows.parts.drop(block)
        return blocks

    def _has_part(self, block: int) -> bool:
        return self.windows is not None and self.windows.parts.has(block)

    def take_offered(
        self, offered: Sequence[ChainedBlock], count_spare: Callable[[], int]
    ) -> tuple[Held, list[Wanted]]:
        """Take blocks for those that another worker offers, as many as `count_spare` allows when the cached blocks
        before them are held, and slots for their parts as far as there are any to spare. Each offered block must come
        after its predecessor, unless that is in the cache."""
        missing: dict[int, ChainedBlock] = {}
        held: dict[int, None] = {}
        for block in offered:
            if self.pool.is_findable(block.block_hash) or block.block_hash in missing:
                continue
            if not block.is_first and block.parent_hash not in missing:
                chain = self.pool.chain_to(block.parent_hash)
                if not chain:
                    continue
                # Otherwise these might be evicted to make room for the others.
                held.update(dict.fromkeys(chain))
            missing[block.block_hash] = block
        self.pool.hold(held)
        chosen = list(missing.values())[: count_spare()]
        if not chosen:
            self.pool.release(reversed(held))
            return Held([], []), []
        num_slots = 0 if self.windows is None else self.windows.num_spare
        wanted = []
        for number, chained in zip(self._take_empty(len(chosen)), chosen, strict=True):
            slot = NO_SLOT
            if chained.has_part and self.windows is not None and num_slots > 0:
                slot, num_slots = self.windows.parts.take_slot(), num_slots - 1
            wanted.append(Wanted(number, chained.block_hash, chained.parent_hash, b"", chained.is_first, slot))
        return Held(list(held), []), wanted

    def bring(self, fetch: Fetch, held: Held) -> list[int]:
        """Make the filled blocks of a fetch findable, each after its predecessor, and their parts usable. Release all
        that was taken and held for it. Returns the blocks that became findable.

        If a request has computed the same block in the meantime, that one is in the chain. The whole chain is released
        again, from its end, so that no block is evicted before its successor.
        """
        chain = list(held.blocks)
        came = list[int]()
        unused = list[int]()
        broken: set[int] = set()
        for number, wanted in enumerate(fetch.wanted):
            found: int | None = None
            if number < fetch.num_read:
                found = wanted.block if wanted.part_only else self._make_findable(wanted, broken)
            if self.windows is not None and wanted.slot != NO_SLOT:
                self.windows.place(wanted.slot, found)
            if wanted.part_only:
                continue
            if found is not None:
                chain.append(found)
                if found != wanted.block:
                    self.pool.hold([found])
            (came if found == wanted.block else unused).append(wanted.block)
        if self.windows is not None:
            self.windows.stop_keeping(held.parts)
        self.pool.release(unused)
        self.pool.release(reversed(chain))
        return came

    def _make_findable(self, wanted: Wanted, broken: set[int]) -> int | None:
        """The block that the hash of a filled one leads to; None if its chain is `broken`."""
        found = None
        if wanted.is_first or (wanted.parent_hash not in broken and self.pool.is_findable(wanted.parent_hash)):
            found = self.pool.make_findable(*wanted[:4], is_first=wanted.is_first)
        if found is None:
            broken.add(wanted.block_hash)
        return found

    def _usable(self, request: Request, end: int, block_at: BlockAt, elsewhere: Elsewhere = nowhere) -> int:
        """The largest number of cached blocks, at most `end`, after which all groups can continue. They do not end
        inside of an image that has to be computed as a whole."""
        while True:
            before = end
            for group in self._beside:
                end = group.usable(request, end, block_at, elsewhere)
            if request.images:
                end = request.whole_until(end * self.block_size) // self.block_size
            elif len(self._beside) == 1:
                return end
            if end == before:
                return end

    def copy_beginning(self, request: Request) -> int:
        """Append a copy of a cached block that begins like the request's next one. Returns the number of tokens gained.
        The request overwrites the rest of the copy as it continues."""
        source, gained = self._find_beginning(request)
        missing = self.num_blocks_of(request, request.num_tokens + 1) - len(request.block_table)
        # A request that lacks blocks may not be part of this step. Then the copy would not be made.
        if gained < MIN_COPIED_TOKENS or self.pool.num_free_blocks < missing:
            return 0
        if self.windows is not None and not self.windows.parts.num_available:
            return 0
        # While the source is held, `take` cannot evict it.
        self.pool.hold([source])
        if self.pool.num_free_blocks:
            request.block_table.extend(self.pool.take(1))
            request.num_computed_tokens += gained
            if self.windows is not None:
                self.windows.begin(request)
            self._copy(source, request.block_table[-1:])
        else:
            gained = 0
        self.pool.release([source])
        return gained

    def _copy(self, source: int | None, blocks: Sequence[int]) -> None:
        """Before the next step, copy a block to the first of these, which have just been taken."""
        if source is not None:
            self._copies.append(BlockCopy(source, blocks[0]))
        if self.windows is not None:
            self.windows.attach(blocks, source)

    def is_worth_waiting(self, request: Request) -> bool:
        """Whether the request should wait for another request to compute its next block. True if copying that block
        later saves more tokens than copying a beginning now."""
        if self.states is not None:
            return self.states.is_worth_waiting(request)
        gained = self._find_beginning(request)[1]
        left = self.num_reusable(request) - request.num_computed_tokens
        return left - (gained if gained >= MIN_COPIED_TOKENS else 0) >= MIN_COPIED_TOKENS

    def _find_beginning(self, request: Request) -> tuple[int, int]:
        """The cached block that shares the longest beginning with the request's next one, and the number of tokens they
        share; (-1, 0) if there is none. States of recurrent layers are never in the middle of a block."""
        if self.states is not None:
            return -1, 0
        source, gained = self._blocks.find_beginning(request, self.num_reusable(request), MIN_COPIED_TOKENS)
        if request.images:
            start = len(request.block_table) * self.block_size
            gained = request.whole_until(start + gained) - start
        if gained and self.windows is not None and not self.windows.parts.has(source):
            return -1, 0
        return source, gained

    def chunk_of(self, request: Request, num_tokens: int) -> int:
        """How many of the request's next `num_tokens` tokens one step should compute. The step ends at the latest where
        a state is to be saved or blocks are to be evicted."""
        if self.evicting is not None and request.eviction is not None:
            num_tokens = self.evicting.chunk_of(request, request.eviction, num_tokens)
        return num_tokens if self.states is None else self.states.chunk_of(request, num_tokens)

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Make room for the request up to `num_tokens` tokens; for a beam search, in the blocks of each beam. Returns
        False and takes nothing if there is too little."""
        if request.is_searching:
            copies = self._beams.reserve(request)
            self._copies += copies or ()
            return copies is not None
        if self.evicting is not None and request.eviction is not None and request.eviction.has_begun:
            return self.evicting.reserve(request, request.eviction)
        if not all(group.fits(request, num_tokens) for group in self._beside):
            return False
        if self._blocks.num_missing(request, num_tokens) > self.pool.num_free_blocks:
            return False
        taken = self._blocks.reserve(request, num_tokens)
        if taken and self.windows is not None:
            self.windows.attach(taken)
        return True

    def num_repeated(self, request: Request, num_shared: int = 0, num_of_draft: int = 0) -> int:
        """How many tokens a branch of the request's draft computes again, if it shares its first `num_shared` tokens
        with other paths, and `num_of_draft` of these with the draft: the tokens of the step that are in its first
        block, the request's latest one among them."""
        first = (request.num_tokens + num_of_draft) // self.block_size * self.block_size
        return request.num_tokens + num_shared - max(first, request.num_tokens - 1)

    def add_branch(self, request: Request, path: TokenPath, num_spared: int) -> int:
        """Take blocks for a branch, and copy the computed part of the first one. Returns how many tokens the branch
        adds to the step; 0, and it changes nothing, if room for fewer than `num_spared` blocks would stay."""
        num_of_draft = num_common(path.token_ids, request.draft)
        first = (request.num_tokens + num_of_draft) // self.block_size
        count = self.num_blocks_for(request.num_tokens + len(path.token_ids)) - first
        num_available = self.pool.num_free_blocks
        if self.windows is not None:
            num_available = min(num_available, self.windows.parts.num_available)
        if num_available < count + num_spared:
            return 0
        blocks = self.pool.take(count)
        has_begun = request.num_computed_tokens > first * self.block_size
        self._copy(request.block_table[first] if has_begun else None, blocks)
        request.branches = (*request.branches, Branch(path, first, blocks))
        num_repeated = self.num_repeated(request, path.num_shared, num_of_draft)
        return num_repeated + len(path.token_ids) - path.num_shared

    def end_branches(self, request: Request, token_ids: Sequence[int] = ()) -> None:
        """Release the blocks of the request's branches, if it has any. `token_ids` follow the request's latest token.
        If a branch has more of them than the draft, its blocks replace those of the draft."""
        branches, request.branches = request.branches, ()
        most, accepted = num_common(request.draft, token_ids) if branches else 0, None
        for branch in branches:
            if (count := num_common(branch.path.token_ids, token_ids)) > most:
                most, accepted = count, branch
        for branch in branches:
            given_up: Sequence[int] = branch.blocks
            if branch is accepted:
                given_up = request.block_table[branch.first_block :]
                request.block_table[branch.first_block :] = array("i", branch.blocks)
                request.replaced = Replaced(branch.first_block, given_up[0], branch.blocks[0])
            self.pool.release(reversed(given_up))
            if self.windows is not None:
                self.windows.release(given_up)

    def plan(self, scheduled: Sequence[Scheduled]) -> StepPlan:
        """The copies, moves and states of the next step. Each call returns only the copies and moves recorded since the
        last call."""
        copies, self._copies = self._copies, []
        windows, evicting = self.windows, self.evicting
        return StepPlan(
            copies,
            () if windows is None else windows.take_copies(),
            () if evicting is None else evicting.take_moves(),
            None if self.states is None else self.states.plan(scheduled),
            None if windows is None else windows.parts.slots,
        )

    def publish(self, request: Request) -> None:
        """After a step: make the request's full blocks findable, and evict blocks of its own if it has too many."""
        if self.evicting is not None and request.eviction is not None:
            self.evicting.evict(request, request.eviction)
            if request.eviction.has_begun:
                return  # its blocks are useless to others
        first = request.num_findable_blocks
        exchanges = self._blocks.publish(request)
        for group in self._beside:
            group.publish(request, first, exchanges)

    def publish_beginning(self, request: Request) -> None:
        """As `publish`; also make the computed beginning of the request's last block findable."""
        self.publish(request)
        if self.states is None and not (request.eviction is not None and request.eviction.has_begun):
            begun = self._blocks.publish_beginning(request, MIN_COPIED_TOKENS)
            if begun is not None and self.windows is not None:
                self.windows.note(begun)

    def free(self, request: Request) -> None:
        """Release all that the request holds, and reset its number of computed tokens."""
        self.end_branches(request)
        self._beams.free(request)
        for group in self._beside:
            group.free(request)
        self._blocks.free(request)
        if request.eviction is not None:
            request.eviction.reset()

    def forget_all(self) -> None:
        """Forget all content. No request may hold any."""
        self.pool.forget_all()
        for group in self._beside:
            group.forget_all()

    def check(self) -> None:
        """Assert that everything is accounted for. For tests."""
        self.pool.check()
        for group in self._beside:
            group.check()

    def hash_of(self, request: Request, index: int) -> int:
        """The chained hash of the request's block `index`. All tokens of the block must be known."""
        return hash_of(request, index, self.block_size)

    def key_of(self, request: Request, index: int) -> BlockKey:
        """The key of the request's block `index`. All tokens of the block must be known."""
        return key_of(request, index, self.block_size)

    def work_on(self, request: Request, index: int) -> tuple[int, bytes]:
        """A key for the request's block `index`. Requests that would compute the same block have the same key."""
        return parent_of(request, index, self.block_size), content_of(request, index, self.block_size)

    def num_common_tokens(self, left: Request, right: Request) -> int:
        """Number of tokens in the full blocks of the two requests' common prefix."""
        low, high = 0, min(left.num_tokens, right.num_tokens) // self.block_size
        while low < high:
            middle = (low + high + 1) // 2
            if self.hash_of(left, middle - 1) == self.hash_of(right, middle - 1):
                low = middle
            else:
                high = middle - 1
        return low * self.block_size


def _only(kind: type[_Kind], groups: Sequence[object]) -> _Kind | None:
    """The group of this kind; None if the model has none."""
    return next((group for group in groups if isinstance(group, kind)), None)
