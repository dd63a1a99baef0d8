"""Recurrent layers: states that requests continue from.

The state of a recurrent layer covers all tokens so far and cannot be cut back, so a request continues from a cached
prefix only where a state was saved. States are saved at block borders:

    tokens   |....|....|....|....|....|....|...      blocks of a prompt that is computed in one chunk
    states             s              s    s  L      saved ones, and the one that the request continues from

- every `interval` tokens of a chunk, counted back from its last border, and at that border,
- at the end of cached blocks of another request with the same beginning. The chunk is cut there, so later requests with
  this beginning find a state,
- at each border that an answer reaches. The next one replaces it, except every `interval` tokens.

A request writes to its own slot. It reads a saved state from that state's slot and never copies it.

A step that verifies a draft writes a state after each of its tokens. The request continues from the one after the last
token that is accepted, and the others are given back.

The memory is divided between blocks and slots in advance (`divide`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.worker.kv.block_pool import BlockPool
from headrace.worker.kv.chain import hash_of, key_of
from headrace.worker.kv.fetch import Persistence
from headrace.worker.kv.groups.group import MIN_TOKENS_LEFT, BlockAt, Elsewhere, Exchange
from headrace.worker.kv.groups.state_slots import StateSlots
from headrace.worker.request.request import Request
from headrace.worker.request.step import FIRST_STATE_SLOT, ZERO_SLOT, Scheduled, StateStep

# How many times a request waits for another one to compute its next block. That block helps only if a state is saved
# after it.
_MOST_WAITS = 2
# Saved states take at most this share of the memory of their tokens' blocks.
_STATES_PER_KV = 1 / 8
# At most one state is saved for this many blocks, even if states are tiny.
_LEAST_BLOCKS = 8
# A running request may read one slot and write another.
SLOTS_OF_REQUEST = 2


class StateBudget(NamedTuple):
    """The number of slots for states, and the number of tokens after which a state is saved in a long prompt."""

    num_slots: int
    interval: int

    def make(self, pool: BlockPool, persistence: Persistence) -> RecurrentStates:
        """The group with these slots. States stay in memory."""
        del persistence
        return RecurrentStates(pool, StateSlots(self.num_slots), self.interval)


class StateSizes(NamedTuple):
    """The sizes in bytes by which the memory is divided: of a block of `block_size` tokens, and of a slot for the
    states after one token."""

    block_bytes: int
    block_size: int
    slot_bytes: int


def divide(budget: int, sizes: StateSizes, max_num_seqs: int) -> tuple[int, StateBudget]:
    """The number of blocks in `budget` bytes beside the slots and one block for padding. 0 or less if there is no
    room."""
    num_blocks_between = max(_LEAST_BLOCKS, -(-sizes.slot_bytes // int(_STATES_PER_KV * sizes.block_bytes)))
    left = budget - (SLOTS_OF_REQUEST * max_num_seqs + FIRST_STATE_SLOT) * sizes.slot_bytes
    num_blocks = int(left // (sizes.block_bytes + sizes.slot_bytes / num_blocks_between)) - 1
    num_slots = SLOTS_OF_REQUEST * max_num_seqs + max(0, num_blocks) // num_blocks_between
    return num_blocks, StateBudget(num_slots, num_blocks_between * sizes.block_size)


class _Plan(NamedTuple):
    """The slots that a step writes, with the numbers of tokens before each. That after the computed tokens has the
    request's next state; those after it belong to rejected tokens of a draft."""

    ends: Sequence[tuple[int, int]]
    ends_prompt: bool


@dataclass(slots=True)
class _Progress:
    """The slot with a request's state, and the states that were saved for the request."""

    slot: int = ZERO_SLOT
    plan: _Plan | None = None
    branch: int = 0
    """Tokens in cached blocks that begin like the request, without a state at their end."""
    num_waits: int = 0
    num_kept_tokens: int = 0
    """Tokens before the last state that later ones do not replace."""
    replaceable: int | None = None
    """Hash of the state that the next one replaces."""


class RecurrentStates:
    """The states of recurrent layers, as a group of the KV cache. The state of a request is saved about every
    `interval` tokens, a multiple of the block size."""

    def __init__(self, pool: BlockPool, slots: StateSlots, interval: int) -> None:
        self.slots = slots
        self._block_size = pool.block_size
        # A chunk ends up to a block and MIN_TOKENS_LEFT tokens after the last state that is saved in it.
        self.interval = max(interval // pool.block_size, 2) * pool.block_size
        self._progress: dict[Request, _Progress] = {}
        self._promised: dict[Request, int] = {}
        """The slots for the drafts of the next step."""

    @property
    def num_for_drafts(self) -> int:
        """The number of slots that drafts may use: those that no running request needs. Each draft token needs one."""
        return max(0, self.slots.num_available - len(self._progress))

    def usable(self, request: Request, end: int, block_at: BlockAt, elsewhere: Elsewhere) -> int:
        """See `CacheGroup`: a state is saved after the last block."""
        del block_at, elsewhere
        held = len(request.block_table)
        while end > held and self._state_after(request, end) is None:
            end -= 1
        return max(end, held)

    def hold(self, request: Request, first: int, found: Sequence[int]) -> None:
        """See `CacheGroup`. The request continues from the state after its blocks."""
        progress, held = self._of(request), len(request.block_table)
        if held < first + len(found):
            progress.branch = (first + len(found)) * self._block_size
        slot = self._state_after(request, held) if held > first else None
        if slot is not None:
            self.slots.hold(slot)
            if progress.slot != ZERO_SLOT:
                self.slots.release(progress.slot)
            progress.slot = slot

    def fits(self, request: Request, num_tokens: int) -> bool:
        """See `CacheGroup`. There are slots for all running requests; drafts get what is left."""
        del num_tokens
        self._promised.pop(request, None)
        if not request.draft:
            return True
        if sum(self._promised.values()) + len(request.draft) > self.num_for_drafts:
            return False
        self._promised[request] = len(request.draft)
        return True

    def is_worth_waiting(self, request: Request) -> bool:
        """Whether the request should wait for another request to compute its next block. Counts how often it has done
        so."""
        progress = self._of(request)
        progress.num_waits += 1
        return progress.num_waits <= _MOST_WAITS and request.num_uncomputed_tokens > 2 * MIN_TOKENS_LEFT

    def chunk_of(self, request: Request, num_tokens: int) -> int:
        """The number of tokens for the next step, at most `num_tokens`. Fewer if a state has to be saved at an earlier
        border."""
        progress, past = self._of(request), request.num_computed_tokens
        has_room = past + MIN_TOKENS_LEFT <= progress.branch < self._last_border(request, past + num_tokens)
        return progress.branch - past if has_room else num_tokens

    def plan(self, scheduled: Sequence[Scheduled]) -> Sequence[StateStep]:
        """The slots that each sequence of a step reads and writes, in the order of `scheduled`. Slots for states that
        are to be saved are taken here."""
        steps = []
        num_promised = sum(self._promised.values())
        for left, (request, num_tokens) in enumerate(reversed(scheduled)):
            if request.draft:
                steps.append(self._plan_draft(request))
                num_promised -= len(request.draft)
                continue
            spare = self.slots.num_available - num_promised - len(scheduled) + left
            steps.append(self._plan(request, request.num_computed_tokens + num_tokens, spare))
        self._promised.clear()
        return steps[::-1]

    def publish(self, request: Request, first: int, exchanges: Sequence[Exchange]) -> None:
        """See `CacheGroup`. Makes the states that the step has saved findable."""
        del exchanges
        progress = self._of(request)
        if progress.plan is None:
            return
        ends, ends_prompt = progress.plan
        progress.plan = None
        if progress.slot != ZERO_SLOT and all(slot != progress.slot for _, slot in ends):
            self.slots.release(progress.slot)
        for num_tokens, slot in ends:
            if num_tokens <= request.num_computed_tokens:
                self._save(request, progress, slot, num_tokens, ends_prompt=ends_prompt)
            if num_tokens == request.num_computed_tokens:
                progress.slot = slot
        for num_tokens, slot in ends:
            if num_tokens != request.num_computed_tokens:
                self.slots.release(slot)

    def free(self, request: Request) -> None:
        """See `CacheGroup`."""
        self._promised.pop(request, None)
        progress = self._progress.pop(request, None)
        if progress is not None:
            held = {progress.slot, *(slot for _, slot in (progress.plan.ends if progress.plan else ()))}
            for slot in held - {ZERO_SLOT}:
                self.slots.release(slot)

    def forget_all(self) -> None:
        """See `CacheGroup`."""
        self.slots.forget_all()

    def check(self) -> None:
        """See `CacheGroup`."""
        holders: dict[int, int] = {}
        for progress in self._progress.values():
            assert progress.plan is None, "a step was neither computed nor ended"
            if progress.slot != ZERO_SLOT:
                holders[progress.slot] = holders.get(progress.slot, 0) + 1
        self.slots.check(holders)

    def _state_after(self, request: Request, num_blocks: int) -> int | None:
        """The slot with the state after the request's first blocks; None if it is not saved."""
        if not self.slots.is_saved(hash_of(request, num_blocks - 1, self._block_size)):
            return None
        return self.slots.find(key_of(request, num_blocks - 1, self._block_size))

    def _plan(self, request: Request, end: int, spare: int) -> StateStep:
        """Take the slots for a step that computes the request up to `end`, up to `spare` of them for states that are
        saved on the way."""
        progress, past = self._of(request), request.num_computed_tokens
        last = self._last_border(request, end)
        borders = [border for border in range(last, past, -self.interval) if border < end][::-1]
        interval = self.interval
        if len(borders) > spare:
            borders = [last] if spare > 0 and past < last < end else []
            interval = max(last - past, end - last)
        slots = self._take(progress, len(borders) + 1)
        ends_prompt = past < request.num_prompt_tokens <= end
        progress.plan = _Plan(list(zip([*borders, end], slots, strict=True)), ends_prompt)
        if not borders:
            return StateStep(progress.slot, slots)
        return StateStep(progress.slot, slots, interval - (borders[0] - past), interval)

    def _plan_draft(self, request: Request) -> StateStep:
        """Take the slots for a step that verifies the request's draft: one for the state after each token, because any
        of them may be the last that is accepted."""
        progress, past = self._of(request), request.num_computed_tokens
        count = 1 + len(request.draft)
        slots = self._take(progress, count)
        progress.plan = _Plan(list(zip(range(past + 1, past + count + 1), slots, strict=True)), ends_prompt=False)
        return StateStep(progress.slot, slots, 0, 1)

    def _take(self, progress: _Progress, count: int) -> list[int]:
        """Slots for a step to write. The first may be the one that it reads."""
        is_own = progress.slot != ZERO_SLOT and self.slots.is_free_to_change(progress.slot)
        slots = [progress.slot] if is_own else []
        return slots + [self.slots.take() for _ in range(count - len(slots))]

    def _last_border(self, request: Request, end: int) -> int:
        """The last border in a chunk up to `end` from which a request with the same tokens could continue."""
        left = MIN_TOKENS_LEFT if end == request.num_tokens and end <= request.num_prompt_tokens else 0
        return (end - left) // self._block_size * self._block_size

    def _save(self, request: Request, progress: _Progress, slot: int, num_tokens: int, *, ends_prompt: bool) -> None:
        """Save the state after `num_tokens` tokens if they end at a border."""
        index, rest = divmod(num_tokens, self._block_size)
        if rest or request.num_findable_blocks < index:
            return
        key = key_of(request, index - 1, self._block_size)
        if not self.slots.save(slot, key):
            return
        if progress.replaceable is not None:
            self.slots.evict_soon(progress.replaceable)
        is_kept = ends_prompt or num_tokens - progress.num_kept_tokens >= self.interval
        if is_kept:
            progress.num_kept_tokens = num_tokens
        progress.replaceable = None if is_kept else key.block_hash

    def _of(self, request: Request) -> _Progress:
        return self._progress.setdefault(request, _Progress())
