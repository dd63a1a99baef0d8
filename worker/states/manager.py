"""Assigns KV blocks and states to the requests of a model with recurrent layers.

The state of a recurrent layer covers all tokens so far and cannot be cut back, so a request continues from a cached
prefix only where a state was saved. States are saved at block borders:

    tokens   |....|....|....|....|....|....|...      blocks of a prompt that is computed in one chunk
    states             s              s    s  L      saved ones, and the one that the request continues from

- every `interval` tokens of a chunk, counted back from its last border, and at that border,
- at the end of cached blocks of another request with the same beginning. The chunk is cut there, so later requests with
  this beginning find a state,
- at each border that an answer reaches. The next one replaces it, except every `interval` tokens.

A request writes to its own slot. It reads a saved state from that state's slot and never copies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.worker.kv.block_pool import BlockPool
from headrace.worker.kv.manager import MIN_TOKENS_LEFT, KVCacheManager
from headrace.worker.request.request import Request
from headrace.worker.request.step import ZERO_SLOT, Scheduled, StateStep
from headrace.worker.states.slots import StateKey, StateSlots

# How many times a request waits for another one to compute its next block. That block helps only if a state is saved
# after it.
_MOST_WAITS = 2


class _Plan(NamedTuple):
    """The slots that a step writes, with the numbers of tokens before each; the last is the request's next state."""

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


class StatefulCacheManager(KVCacheManager):
    """See `KVCacheManager`. It saves states about every `interval` tokens, a multiple of the block size."""

    def __init__(self, pool: BlockPool, slots: StateSlots, interval: int) -> None:
        super().__init__(pool)
        self.slots = slots
        # A chunk ends up to a block and MIN_TOKENS_LEFT tokens after the last state that is saved in it.
        self.interval = max(interval // pool.block_size, 2) * pool.block_size
        self._progress: dict[Request, _Progress] = {}

    @property
    def num_states(self) -> tuple[int, int]:
        """See `KVCacheManager`."""
        return self.slots.num_slots, self.slots.num_saved

    def take_state_changes(self) -> dict[int, bool]:
        """See `KVCacheManager`."""
        return self.slots.take_changes()

    def num_computed_by_now(self, request: Request) -> int:
        """See `KVCacheManager`."""
        index = super().num_computed_by_now(request) // self.block_size
        while index > len(request.block_table) and not self.slots.is_saved(self.hash_of(request, index - 1)):
            index -= 1
        return max(request.num_computed_tokens, index * self.block_size)

    def copy_beginning(self, request: Request) -> int:
        """0: there is no state in the middle of a block."""
        return 0

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

    def plan_states(self, scheduled: Sequence[Scheduled]) -> Sequence[StateStep]:
        """Take the slots that a step writes."""
        steps = []
        for left, (request, num_tokens) in enumerate(reversed(scheduled)):
            spare = self.slots.num_available - len(scheduled) + left
            steps.append(self._plan(request, request.num_computed_tokens + num_tokens, spare))
        return steps[::-1]

    def publish(self, request: Request) -> None:
        """Make the request's full blocks findable, and the states that the step has saved."""
        super().publish(request)
        progress = self._of(request)
        if progress.plan is None:
            return
        ends, ends_prompt = progress.plan
        progress.plan = None
        slots = [slot for _, slot in ends]
        if progress.slot != ZERO_SLOT and progress.slot not in slots:
            self.slots.release(progress.slot)
        progress.slot = slots[-1]
        for num_tokens, slot in ends:
            self._save(request, progress, slot, num_tokens, ends_prompt=ends_prompt)
        for slot in slots[:-1]:
            self.slots.release(slot)

    def publish_beginning(self, request: Request) -> None:
        """The same as `publish`: there is no state in the middle of a block."""
        self.publish(request)

    def free(self, request: Request) -> None:
        """Release all blocks and slots of the request, and reset its number of computed tokens."""
        super().free(request)
        progress = self._progress.pop(request, None)
        if progress is not None:
            held = {progress.slot, *(slot for _, slot in (progress.plan.ends if progress.plan else ()))}
            for slot in held - {ZERO_SLOT}:
                self.slots.release(slot)

    def forget_all(self) -> None:
        """Forget the content of all blocks and slots. None may be in use."""
        super().forget_all()
        self.slots.forget_all()

    def check(self) -> None:
        """Assert that every block and slot is accounted for. For tests."""
        super().check()
        holders: dict[int, int] = {}
        for progress in self._progress.values():
            assert progress.plan is None, "a step was neither computed nor ended"
            if progress.slot != ZERO_SLOT:
                holders[progress.slot] = holders.get(progress.slot, 0) + 1
        self.slots.check(holders)

    def _find_cached(self, request: Request) -> list[int]:
        """The cached blocks that match the request's next tokens, as far as there is a state after them. The request
        continues from that state."""
        found = super()._find_cached(request)
        first = len(request.block_table)
        for number in range(len(found), 0, -1):
            slot = self.slots.find(self._key_of(request, first + number - 1))
            if slot is not None:
                progress = self._of(request)
                self.slots.hold(slot)
                if progress.slot != ZERO_SLOT:
                    self.slots.release(progress.slot)
                progress.slot = slot
                break
        else:
            number = 0
        if number < len(found):
            self._of(request).branch = (first + len(found)) * self.block_size
        return found[:number]

    def _find_beginning(self, request: Request) -> tuple[int, int]:
        return -1, 0

    def _plan(self, request: Request, end: int, spare: int) -> StateStep:
        """Take the slots for a step that computes the request up to `end`, up to `spare` of them for states that are
        saved on the way."""
        progress, past = self._of(request), request.num_computed_tokens
        is_own = progress.slot != ZERO_SLOT and self.slots.is_free_to_change(progress.slot)
        last = self._last_border(request, end)
        borders = [border for border in range(last, past, -self.interval) if border < end][::-1]
        interval = self.interval
        if len(borders) > spare:
            borders = [last] if spare > 0 and past < last < end else []
            interval = max(last - past, end - last)
        slots = [progress.slot] if is_own else []
        slots += [self.slots.take() for _ in range(len(borders) + 1 - len(slots))]
        ends_prompt = past < request.num_prompt_tokens <= end
        progress.plan = _Plan(list(zip([*borders, end], slots, strict=True)), ends_prompt)
        if not borders:
            return StateStep(progress.slot, slots)
        return StateStep(progress.slot, slots, interval - (borders[0] - past), interval)

    def _last_border(self, request: Request, end: int) -> int:
        """The last border in a chunk up to `end` from which a request with the same tokens could continue."""
        left = MIN_TOKENS_LEFT if end == request.num_tokens and end <= request.num_prompt_tokens else 0
        return (end - left) // self.block_size * self.block_size

    def _save(self, request: Request, progress: _Progress, slot: int, num_tokens: int, *, ends_prompt: bool) -> None:
        """Save the state after `num_tokens` tokens if they end at a border."""
        index, rest = divmod(num_tokens, self.block_size)
        if rest or request.num_findable_blocks < index or not self.slots.save(slot, self._key_of(request, index - 1)):
            return
        if progress.replaceable is not None:
            self.slots.evict_soon(progress.replaceable)
        is_kept = ends_prompt or num_tokens - progress.num_kept_tokens >= self.interval
        if is_kept:
            progress.num_kept_tokens = num_tokens
        progress.replaceable = None if is_kept else self.hash_of(request, index - 1)

    def _key_of(self, request: Request, index: int) -> StateKey:
        return StateKey(self.hash_of(request, index), *self.work_on(request, index))

    def _of(self, request: Request) -> _Progress:
        return self._progress.setdefault(request, _Progress())
