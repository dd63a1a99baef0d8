"""How many prompt tokens a step computes, decided by their predicted time.

Two kinds of steps have prompts in them:

- **with streams**: running streams wait for the whole step, so it has a target time. The default is `TARGET_STEP_MS`,
  or 1.9 times the time of the streams and of reading the computed part of the first prompt from the cache, if that is
  longer. After a long context the step takes so long that this reading is an eighth of it. A target set by the user
  may be out of reach; prompts still get a fifth of the step's time then.
- **alone**: only other prompts wait. The fixed cost of a step, and that of reading the computed part of the first
  prompt, are an eighth of its time, or it takes `ALONE_MS`.

Images count as work of their own (`image_share`): steps that compute nothing but prompts with images beside streams are
short.

Limits in tokens apply as well. Until costs are learned, `step_cost` assumes a large model on few cores, so the first
steps are small.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.worker.engine.step_cost import NOTHING, StepCosts, StepShape
from headrace.worker.model.step_limits import MIN_PROMPT_STEP
from headrace.worker.request.request import Request

# Default target of a step with streams, and least time of a step of prompts alone, in milliseconds.
TARGET_STEP_MS = 200.0
ALONE_MS = 80.0
# A step with streams may always take this many times as long as without new tokens of prompts: with the default target,
# and with one set by the user.
TIMES_WITHOUT_PROMPTS = 1.9
LEAST_TIMES_WITHOUT_PROMPTS = 1.25
# A step of the streams alone takes at most this many times the time that they add to steps with prompts, and often
# less.
MOST_TIMES_WITH_PROMPTS = 1.5
# Share of a step of prompts alone for the fixed cost, and of any step with prompts for reading their computed part.
STEP_COST_SHARE = 1 / 8
# One part in so many is reserved for the prompt that is first in rank.
FIRST_IN_RANK_SHARE = 8
# With this much room, a prompt of any length makes progress; see chunk_of.
MIN_CHUNK_ROOM = 3
# A change in the number of tokens costs time (docs/decisions/scheduling.md). So a step that divides prompts keeps the
# number of the previous step if that is at least this share of the possible number. Otherwise it takes a number with
# few significant bits.
KEPT_SHARE = 0.7
_BITS = 3


# An image counts as so many streams, and all images together get at least this many times the time of each step.
STREAMS_PER_IMAGE = 6
LEAST_IMAGE_SHARE = 0.4


def image_share(num_images: int, num_streams: int) -> float:
    """The time that `num_images` requests with images get for each step of `num_streams` other requests, at least one:
    for the encoder, or for the tokens of encoded images. A multiple of the step's own time."""
    return max(LEAST_IMAGE_SHARE, STREAMS_PER_IMAGE * num_images / num_streams)


def longest_ms(target_ms: float | None, without_ms: float) -> float:
    """The most milliseconds between two tokens of running streams, whose steps alone take `without_ms`, while others
    wait: with the target that the user has set, or None."""
    if target_ms is None:
        return max(TARGET_STEP_MS, TIMES_WITHOUT_PROMPTS * without_ms)
    return max(target_ms, LEAST_TIMES_WITHOUT_PROMPTS * without_ms)


def chunk_of(remaining: int, room: int) -> int:
    """How many of `remaining` tokens to compute now, at most `room`. Neither this chunk nor the rest is a single token,
    because other kernels compute a single token and give other bits (docs/decisions/exactness.md). 0 if that is not
    possible."""
    if remaining == 1:
        return min(remaining, room)
    num_tokens = min(remaining, room)
    if remaining - num_tokens == 1:
        num_tokens -= 1
    return num_tokens if num_tokens > 1 else 0


def with_whole_images(request: Request, num_tokens: int, *, may_exceed: bool) -> int:
    """How many of the request's next `num_tokens` tokens to compute, so that the chunk does not end inside of an image
    whose tokens see each other. If the chunk begins with the image, all of it if it `may_exceed` the room, else none of
    it."""
    start = request.num_computed_tokens
    end = request.whole_until(start + num_tokens)
    if end == start + num_tokens:
        return num_tokens
    if end - start > 1:  # not a single token; see chunk_of
        return end - start
    if not may_exceed:
        return 0
    image = next(image for image in request.images if image.first == end)
    return image.end - start + (image.end == request.num_tokens - 1)


class LogitsRows:
    """The rows of logits that prompts have in a step because their log-probabilities are wanted: at most `most`, with a
    share for the prompt that is `first` in rank."""

    def __init__(self, most: int, first: Request) -> None:
        self._left = most
        self._first = first
        self._for_first = max(MIN_CHUNK_ROOM, most // FIRST_IN_RANK_SHARE) if first.wants_prompt_logprobs else 0

    def chunk_of(self, request: Request, room: int) -> int:
        """How many of the request's tokens to compute now, at most `room`; see `chunk_of`."""
        if not request.wants_prompt_logprobs:
            return chunk_of(request.num_uncomputed_tokens, room)
        if request is self._first:
            self._for_first = 0
        num_tokens = chunk_of(request.num_uncomputed_tokens, max(0, min(room, self._left - self._for_first)))
        self._left -= num_tokens
        return num_tokens


class Prompt(NamedTuple):
    """A prompt that waits for its next chunk: `past` tokens are computed, `remaining` are not."""

    past: int
    remaining: int


class Room(NamedTuple):
    """The share of a step for prompts: number of tokens, how many of them are reserved for the first in rank, and the
    predicted time of the whole step in milliseconds."""

    tokens: int
    for_first: int
    step_ms: float

    @property
    def tokens_per_ms(self) -> float:
        """How many tokens of prompts such steps compute in a millisecond."""
        return self.tokens / self.step_ms


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Decides the room for prompts. Steps have at most `max_num_batched_tokens`, and with streams at most
    `max_num_mixed_tokens` and `target_ms`; None for the default. `num_tokens_before`: tokens of the previous step."""

    costs: StepCosts
    max_num_batched_tokens: int
    max_num_mixed_tokens: int
    target_ms: float | None = None
    num_tokens_before: int = 0
    share: float = 1.0
    """Share of the longest time between two tokens of streams that steps with prompts may take."""

    def with_streams(self, streams: StepShape, prompts: Sequence[Prompt], first: int, *, num_images: int = 0) -> Room:
        """The room in a step with streams. `prompts`, at least one, are in the order in which they are served; `first`
        is the index of the one that is first in rank. `num_images` is the number of prompts if all of them compute
        tokens of images, otherwise 0."""
        decode = self.costs.decode if self.costs.decode.num_steps else self.costs.prompts
        reread_ms = self.costs.prompts.reread_ms(prompts[first].past)
        # Decode steps may not have been seen for long, if prompts never end.
        base_ms = self.costs.prompts.predict_ms(streams)
        without_ms = min(decode.predict_ms(streams), MOST_TIMES_WITH_PROMPTS * base_ms) + reread_ms
        limit_ms = max(self.share * longest_ms(self.target_ms, without_ms), LEAST_TIMES_WITHOUT_PROMPTS * without_ms)
        if num_images:
            limit_ms = min(limit_ms, (1.0 + image_share(num_images, streams.sequences)) * without_ms)
        if self.target_ms is None:
            limit_ms = max(limit_ms, reread_ms / STEP_COST_SHARE, LEAST_TIMES_WITHOUT_PROMPTS * base_ms)
        # A step is padded to MIN_PROMPT_STEP tokens anyway.
        least = max(MIN_CHUNK_ROOM, MIN_PROMPT_STEP - streams.tokens)
        return self._room(limit_ms, streams, prompts, first, least, self.max_num_mixed_tokens - streams.tokens)

    def alone(self, prompts: Sequence[Prompt], first: int) -> Room:
        """The room in a step without streams. `prompts`, at least one, are in the order in which they are served;
        `first` is the index of the one that is first in rank."""
        costs = self.costs.prompts
        limit_ms = max(ALONE_MS, (costs.step_ms + costs.reread_ms(prompts[first].past)) / STEP_COST_SHARE)
        return self._room(limit_ms, NOTHING, prompts, first, MIN_PROMPT_STEP, self.max_num_batched_tokens)

    def tokens_per_ms(self, streams: StepShape, past: int) -> float:
        """The rate of prefill, in prompt tokens per millisecond, beside these running streams and after `past` computed
        tokens of the prompt."""
        prompts = [Prompt(past, self.max_num_batched_tokens)]
        room = self.with_streams(streams, prompts, 0) if streams.sequences else self.alone(prompts, 0)
        return room.tokens_per_ms

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
        tokens = for_first
        prompts_ms = first_chunk_ms
        is_cut = False
        for place, (past, remaining) in enumerate(prompts):
            # If the first in rank has begun, its computed part is read from the cache once, however many tokens it
            # gets.
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
        """The number of tokens, at most `most`, of a step that divides prompts: that of the previous step if it is
        close."""
        if KEPT_SHARE * most <= self.num_tokens_before <= most:
            return self.num_tokens_before
        return most - most % (1 << max(0, most.bit_length() - _BITS))
