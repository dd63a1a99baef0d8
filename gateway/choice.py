"""From the tokens of one generation to the pieces of text that a client gets (pure).

    tokens -> Detokenizer -> StopMatcher -> Piece

However the tokens were spread over messages, the pieces together are the same: text, log-probabilities and account.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.gateway.detokenizer import Detokenizer
from headrace.gateway.sampling import Sampling
from headrace.gateway.stop_strings import StopMatcher
from headrace.protos.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    GenerateResponse,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The model's opinion on one generated token that is part of the text."""

    token_id: int
    logprob: float
    """Natural logarithm."""
    top: tuple[tuple[int, float], ...]
    """The most probable tokens and their log-probabilities, best first, as many as were asked for."""
    offset: int
    """Where the token's text begins in the text of the choice, in characters."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a choice ended, and its account."""

    reason: str
    """`stop` or `length`; of a chat also `tool_calls`."""
    stop_reason: int | str | None
    """The stop string or stop token that ended it; None for the model's own end of sequence and for `length`."""
    num_generated_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of a choice. Only the last piece has an ending."""

    text: str
    num_tokens: int
    """Tokens that arrived; their text may be held back or belong to earlier pieces."""
    logprobs: Sequence[TokenLogprob]
    ending: Ending | None
    token_offsets: Sequence[int] = ()
    """Where the text of each of the tokens begins in the text of the choice, in characters."""


class Choice:
    """One answer as it comes in. Push every message; after a piece with an ending nothing may be pushed."""

    __slots__ = (
        "_detokenizer",
        "_hide_stop_token",
        "_logprobs_asked",
        "_num_decoded_chars",
        "_num_released_chars",
        "_num_tokens",
        "_own_stop_ids",
        "_pending",
        "_stops",
        "num_cached_tokens",
    )

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: frozenset[int],
        sampling: Sampling,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`shown_ids` are special tokens that are text whatever the caller asks: who reads the text needs them."""
        skipped = special_ids - shown_ids if sampling.skip_special_tokens else frozenset[int]()
        self._detokenizer = Detokenizer(token_bytes, skipped)
        self._stops = StopMatcher(sampling.stop, sampling.include_stop)
        self._hide_stop_token = not sampling.include_stop
        self._own_stop_ids = frozenset(sampling.stop_token_ids)
        self._logprobs_asked = sampling.logprobs is not None
        # Log-probabilities wait until the first character of their token is released: a stop string may yet cut it.
        self._pending: deque[TokenLogprob] = deque()
        self._num_tokens = 0
        self._num_decoded_chars = 0
        self._num_released_chars = 0
        self.num_cached_tokens = 0
        """Prompt tokens that the first attempt found in a prefix cache."""

    def push(self, message: GenerateResponse) -> Piece:
        """What this message adds. Once the piece has an ending, the generation may be cancelled."""
        if message.HasField("num_cached_tokens") and self._num_tokens == 0:
            self.num_cached_tokens = message.num_cached_tokens
        finish = message.finish if message.HasField("finish") else None
        token_ids = message.token_ids
        hidden = -1
        if finish is not None and finish.reason == FINISH_REASON_STOP and self._hide_stop_token:
            hidden = len(token_ids) - 1
        text = ""
        offsets: list[int] = []
        for position, token_id in enumerate(token_ids):
            self._num_tokens += 1
            offsets.append(self._num_decoded_chars)
            if position == hidden:
                continue
            if self._logprobs_asked:
                self._remember(token_id, message.logprobs[position])
            text += self._release(self._detokenizer.push(token_id))
            if self._stops.match is not None:
                return self._ended_by_stop_string(text, offsets)
        if finish is None:
            return Piece(text, len(offsets), self._due(), None, offsets)
        text += self._release(self._detokenizer.finish())
        if self._stops.match is not None:
            return self._ended_by_stop_string(text, offsets)
        text += self._stops.finish()
        ending = self._ending(finish.reason, finish.stop_token_id if finish.HasField("stop_token_id") else None)
        due, self._pending = tuple(self._pending), deque()
        return Piece(text, len(offsets), due, ending, offsets)

    def _release(self, decoded: str) -> str:
        if not decoded:
            return ""
        self._num_decoded_chars += len(decoded)
        released = self._stops.push(decoded)
        self._num_released_chars += len(released)
        return released

    def _remember(self, token_id: int, opinion: TokenLogprobs) -> None:
        top = tuple(zip(opinion.top_token_ids, opinion.top_logprobs, strict=True))
        self._pending.append(TokenLogprob(token_id, opinion.logprob, top, self._num_decoded_chars))

    def _due(self) -> Sequence[TokenLogprob]:
        pending = self._pending
        due = []
        while pending and pending[0].offset < self._num_released_chars:
            due.append(pending.popleft())
        return due

    def _ended_by_stop_string(self, text: str, offsets: Sequence[int]) -> Piece:
        ending = Ending("stop", self._stops.match, self._num_tokens, self.num_cached_tokens)
        return Piece(text, len(offsets), self._due(), ending, offsets)

    def _ending(self, reason: int, stop_token_id: int | None) -> Ending:
        assert reason in (FINISH_REASON_STOP, FINISH_REASON_LENGTH), f"a finish without a reason: {reason}"
        own = stop_token_id if stop_token_id in self._own_stop_ids else None
        name = "stop" if reason == FINISH_REASON_STOP else "length"
        return Ending(name, own, self._num_tokens, self.num_cached_tokens)
