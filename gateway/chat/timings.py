"""Times of prompt and answer, in the format of llama.cpp's server (pure)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from headrace.gateway.chat.choice import Piece
from headrace.gateway.chat.output import ChatPiece
from headrace.gateway.edge.wire import Shape


class Timings(Shape):
    """How long prompt and answer took, as the gateway saw it. The prompt's time includes queues."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET
    draft_n_accepted: int | UnsetType = UNSET


@dataclass(slots=True)
class Stopwatch:
    """The times of a request, in seconds of a monotonic clock, and its tokens so far."""

    arrived_s: float
    clock: Callable[[], float] = time.monotonic
    first_s: float = 0.0
    last_s: float = 0.0
    num_cached_tokens: int = 0
    """Of the first prompt."""
    num_generated_tokens: dict[int, int] = field(default_factory=dict)
    """By choice."""
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    def tick(self, piece: Piece | ChatPiece, index: int = 0) -> None:
        """Note the time of a choice's piece, and its tokens."""
        self.last_s = self.clock()
        self.first_s = self.first_s or self.last_s
        self.num_generated_tokens[index] = self.num_generated_tokens.get(index, 0) + len(piece.token_ids)
        if index == 0:
            self.num_cached_tokens = max(self.num_cached_tokens, piece.num_cached_tokens)
        if piece.ending is not None:
            # Pieces do not list a token that ends the answer.
            self.num_generated_tokens[index] = piece.ending.num_generated_tokens
            self.num_drafted_tokens += piece.ending.num_drafted_tokens
            self.num_accepted_tokens += piece.ending.num_accepted_tokens

    def timings(self, num_prompt_tokens: int) -> Timings:
        """The timings so far."""
        num_computed = num_prompt_tokens - self.num_cached_tokens
        num_generated = sum(self.num_generated_tokens.values())
        # The first token comes with the prompt.
        prompt_ms, predicted_ms = 1000 * (self.first_s - self.arrived_s), 1000 * (self.last_s - self.first_s)
        timings = Timings(
            cache_n=self.num_cached_tokens,
            prompt_n=num_computed,
            prompt_ms=prompt_ms,
            prompt_per_token_ms=_share(prompt_ms, num_computed),
            prompt_per_second=_share(1000 * num_computed, prompt_ms),
            predicted_n=num_generated,
            predicted_ms=predicted_ms,
            predicted_per_token_ms=_share(predicted_ms, num_generated),
            predicted_per_second=_share(1000 * num_generated, predicted_ms),
        )
        if self.num_drafted_tokens:
            timings.draft_n, timings.draft_n_accepted = self.num_drafted_tokens, self.num_accepted_tokens
        return timings


def _share(amount: float, of: float) -> float:
    return amount / of if of > 0 else 0.0
