"""How many tokens of prompts a step computes, by what they would cost in milliseconds.

Three kinds of steps have prompts in them:

- **with streams**: running streams wait for the whole step, so it keeps a target. By default that is `TARGET_STEP_MS`,
  or 1.9 times what its streams take alone, where that is more. Reading the computed part of the first prompt from the
  cache adds to both, so that it is an eighth of the step behind a long context. A target that a user sets may not be
  reachable: prompts then still have a fifth of the step's time.
- **alone, while streams pause**: no longer than the streams may still wait. They pause only where prompts get on faster
  by it, and where steps with streams are short against a pause.
- **alone**: no one waits but other prompts. An eighth of the step's time is what any step and reading the computed
  part of the first prompt cost, or the step takes `ALONE_MS`.

Limits in tokens are caps on top. Before anything is learned, `step_cost` expects a large model on few cores, so first
steps are small.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.worker.engine.step_cost import NOTHING, StepCosts, StepShape
from headrace.worker.model.step_limits import MIN_PROMPT_STEP

# Milliseconds of a step that streams have a part in, if they allow no more, and of one of prompts alone at least.
TARGET_STEP_MS = 150.0
ALONE_MS = 80.0
# A step with prompts may take this many times what its streams take alone, before it counts as too long: where a user
# sets no target, and where one does.
TIMES_WITHOUT_PROMPTS = 1.9
LEAST_TIMES_WITHOUT_PROMPTS = 1.25
# Part of a step of prompts alone that is what any step costs, and part of any step with prompts that is reading what
# they have computed.
STEP_COST_SHARE = 1 / 8
# Part of the budget that is kept for the first in rank.
FIRST_IN_RANK_SHARE = 8
# Room with which any number of tokens can be begun, so that the first in rank always goes on; see scheduler.chunk_of.
MIN_CHUNK_ROOM = 3
# There are no pauses where streams wait for a step with prompts longer than this part of the longest pause anyway.
LONGEST_STEP_BETWEEN_PAUSES = 0.5
# Another number of tokens than in the step before has to be prepared for (docs/decisions/0025). So a step that cuts
# prompts has the same number if that is this part at least of what it could have, and else one of few significant bits.
KEPT_SHARE = 0.7
_BITS = 3


class Prompt(NamedTuple):
    """What of a prompt is computed, and what is not."""

    past: int
    remaining: int


class Room(NamedTuple):
    """What a step gives to prompts: tokens, how many of them are kept for the first in rank, and what the whole step
    is expected to take."""

    tokens: int
    for_first: int
    step_ms: float

    @property
    def tokens_per_ms(self) -> float:
        """How fast prompts get on in such steps."""
        return self.tokens / self.step_ms


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Decides it for a worker whose steps have `max_num_batched_tokens` at most, and `max_num_mixed_tokens` where
    streams have a part in them. `target_ms`: of those; None: the default. `num_tokens_before`: of the step
    before."""

    costs: StepCosts
    max_num_batched_tokens: int
    max_num_mixed_tokens: int
    target_ms: float | None = None
    num_tokens_before: int = 0

    def with_streams(self, streams: StepShape, prompts: Sequence[Prompt], first: int) -> Room:
        """What prompts get beside streams. `prompts` are in the order in which they are served, at least one; `first`
        is the place of the first in rank among them."""
        decode = self.costs.decode if self.costs.decode.num_steps else self.costs.prompts
        streams_ms, reread_ms = decode.predict_ms(streams), self.costs.prompts.reread_ms(prompts[first].past)
        if self.target_ms is None:
            limit_ms = max(TARGET_STEP_MS, TIMES_WITHOUT_PROMPTS * streams_ms + reread_ms / STEP_COST_SHARE)
        else:
            limit_ms = max(self.target_ms, LEAST_TIMES_WITHOUT_PROMPTS * (streams_ms + reread_ms))
        # A step is padded to MIN_PROMPT_STEP tokens anyway.
        least = max(MIN_CHUNK_ROOM, MIN_PROMPT_STEP - streams.tokens)
        return self._room(limit_ms, streams, prompts, first, least, self.max_num_mixed_tokens - streams.tokens)

    def alone(self, prompts: Sequence[Prompt], first: int, limit_ms: float | None = None) -> Room:
        """What prompts get in a step of their own, of `limit_ms` at most."""
        costs = self.costs.prompts
        useful_ms = max(ALONE_MS, (costs.step_ms + costs.reread_ms(prompts[first].past)) / STEP_COST_SHARE)
        most_ms = useful_ms if limit_ms is None else min(useful_ms, limit_ms)
        return self._room(most_ms, NOTHING, prompts, first, MIN_PROMPT_STEP, self.max_num_batched_tokens)

    def is_worth_pausing(
        self, streams: StepShape, prompts: Sequence[Prompt], first: int, saved_ms: float, longest_ms: float
    ) -> bool:
        """Whether prompts get on so much faster alone that streams should wait, who may for `saved_ms` now, and for
        `longest_ms` at most. A step that would be cut short by what is saved now is not worth it."""
        alone, mixed = self.alone(prompts, first, longest_ms), self.with_streams(streams, prompts, first)
        if alone.step_ms > saved_ms or mixed.step_ms > LONGEST_STEP_BETWEEN_PAUSES * longest_ms:
            return False
        return alone.tokens_per_ms > mixed.tokens_per_ms

    def tokens_per_ms(self, streams: StepShape, past: int, longest_pause_ms: float) -> float:
        """How fast prompts get on behind `past` tokens while these streams run. Where pauses of up to this long are
        worth it, half of the time is one."""
        prompts = [Prompt(past, self.max_num_batched_tokens)]
        if not streams.sequences:
            return self.alone(prompts, 0).tokens_per_ms
        mixed = self.with_streams(streams, prompts, 0).tokens_per_ms
        if not self.is_worth_pausing(streams, prompts, 0, longest_pause_ms, longest_pause_ms):
            return mixed
        return (mixed + self.alone(prompts, 0, longest_pause_ms).tokens_per_ms) / 2

    def _room(
        self, limit_ms: float, others: StepShape, prompts: Sequence[Prompt], first: int, least: int, most: int
    ) -> Room:
        model = self.costs.prompts
        base_ms = model.predict_ms(others)
        left_ms = limit_ms - base_ms
        past, remaining = prompts[first]
        first_ms = left_ms / FIRST_IN_RANK_SHARE + model.reread_ms(past)
        for_first = max(model.tokens_for(first_ms, past), MIN_CHUNK_ROOM)
        for_first = min(for_first, max(most // FIRST_IN_RANK_SHARE, MIN_CHUNK_ROOM), remaining)
        first_chunk_ms = model.chunk_ms(past, for_first)
        tokens, prompts_ms, is_cut = for_first, first_chunk_ms, False
        for place, (past, remaining) in enumerate(prompts):
            # The first in rank has begun: it is read from the cache once, whatever it gets.
            begun, begun_ms = (for_first, first_chunk_ms) if place == first else (0, 0.0)
            wanted = remaining - begun
            affordable = model.tokens_for(left_ms - prompts_ms + begun_ms, past) - begun
            given = min(wanted, max(0, affordable), most - tokens)
            tokens += given
            prompts_ms += model.chunk_ms(past, begun + given) - begun_ms if given else 0.0
            if given < wanted:
                is_cut = True
                break
        if is_cut and tokens < most:
            kept = min(max(least, self._kept_total(others.tokens + tokens) - others.tokens), most)
            prompts_ms *= kept / tokens
            tokens = kept
        return Room(tokens, min(for_first, tokens), base_ms + prompts_ms)

    def _kept_total(self, most: int) -> int:
        """Tokens of a step of so many at most that cuts prompts: those of the step before if that is not much less."""
        if KEPT_SHARE * most <= self.num_tokens_before <= most:
            return self.num_tokens_before
        return most - most % (1 << max(0, most.bit_length() - _BITS))
