"""From the tokens of one generation to the pieces of text that a client gets (pure).

    tokens -> Detokenizer -> StopMatcher -> Piece

The pieces add up to the same text, log-probabilities and usage, however the tokens were divided among messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
from msgspec import structs

from headrace.gateway.chat.sampling import Sampling
from headrace.gateway.text.detokenizer import Detokenizer
from headrace.gateway.text.stop_strings import StopMatcher
from headrace.protos.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    GenerateResponse,
    TokenLogprobs,
)
from headrace.protos.status import Reason, StatusError


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token of the text or of the prompt."""

    token_id: int
    logprob: float
    """Natural logarithm."""
    top: tuple[tuple[int, float], ...]
    """The most probable tokens and their log-probabilities, best first, as many as the request wants."""
    offset: int
    """Where the token's text begins in the text of the choice (or of the prompt), in characters."""
    rank: int = 0
    """Rank of the token, 1 for the most probable."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a choice: its reason and usage."""

    reason: str
    """`stop` or `length`; of a chat also `tool_calls`; `error` for one of several choices that failed."""
    stop_reason: int | str | None
    """The stop string or stop token that ended it; None for the model's own end of sequence and for `length`."""
    num_generated_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    """Draft tokens that the worker verified, and those of them that are in the answer."""
    error: StatusError | None = None
    """Why it failed."""
    num_disk_tokens: int = 0
    num_peer_tokens: int = 0
    """Cached tokens that a worker read from a disk, and that it got from another worker."""


class Piece(msgspec.Struct, frozen=True):
    """The next part of a choice. Only the last piece has an ending."""

    text: str
    num_tokens: int
    """Tokens that arrived; their text may be held back or belong to earlier pieces."""
    logprobs: Sequence[TokenLogprob]
    ending: Ending | None
    token_offsets: Sequence[int] = ()
    """Where the text of each of the tokens begins in the text of the choice, in characters."""
    token_ids: Sequence[int] = ()
    """The tokens that arrived."""
    prompt_logprobs: Sequence[TokenLogprob] = ()
    """With the first piece, if requested: the prompt's tokens from the second on."""
    num_cached_tokens: int = 0
    """With the first piece: prompt tokens that were cached."""


class Choice:
    """One answer as it comes in. Push every message; after a piece with an ending nothing may be pushed."""

    __slots__ = (
        "_block_size",
        "_detokenizer",
        "_hide_stop_token",
        "_lists_hidden_end",
        "_logprobs_asked",
        "_num_accepted_tokens",
        "_num_decoded_chars",
        "_num_drafted_tokens",
        "_num_released_chars",
        "_num_tokens",
        "_own_stop_ids",
        "_pending",
        "_prompt",
        "_stops",
        "_wants_tokens",
        "num_cached_tokens",
        "num_disk_tokens",
        "num_peer_tokens",
    )

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: frozenset[int],
        sampling: Sampling,
        shown_ids: frozenset[int] = frozenset(),
        prompt: Sequence[int] = (),
        *,
        block_size: int = 1,
    ) -> None:
        """`shown_ids` are special tokens that are always text, because the parser of the answer needs them.

        `prompt` are the prompt's tokens; needed only if their log-probabilities are requested. Cached tokens are
        counted in whole blocks of `block_size`. The exact number would show how much of a guessed prompt is right.
        """
        skipped = special_ids - shown_ids if sampling.skip_special_tokens else frozenset[int]()
        self._detokenizer = Detokenizer(token_bytes, skipped)
        self._stops = StopMatcher(sampling.stop, sampling.include_stop)
        self._hide_stop_token = not sampling.include_stop
        self._own_stop_ids = frozenset(sampling.stop_token_ids)
        self._logprobs_asked = sampling.logprobs is not None
        self._lists_hidden_end = sampling.lists_hidden_end
        self._wants_tokens = sampling.max_tokens != 0
        self._prompt = _Prompt(token_bytes, special_ids, prompt) if sampling.prompt_logprobs is not None else None
        # Log-probabilities are held until the first character of their token is released, because a stop string may cut
        # it off.
        self._pending: deque[TokenLogprob] = deque()
        self._num_tokens = 0
        self._num_drafted_tokens = self._num_accepted_tokens = 0
        self._num_decoded_chars = 0
        self._num_released_chars = 0
        self._block_size = block_size or 1
        self.num_cached_tokens = 0
        """Prompt tokens, in whole blocks, that the first attempt found in a prefix cache."""
        self.num_disk_tokens = self.num_peer_tokens = 0

    def push(self, message: GenerateResponse) -> Piece:
        """The piece that this message adds. If it has an ending, the generation may be cancelled."""
        if self._num_tokens == 0 and message.HasField("num_cached_tokens"):
            self.num_cached_tokens = message.num_cached_tokens - message.num_cached_tokens % self._block_size
            self.num_disk_tokens, self.num_peer_tokens = message.num_disk_tokens, message.num_peer_tokens
        self._num_drafted_tokens += message.num_drafted_tokens
        self._num_accepted_tokens += message.num_accepted_tokens
        of_prompt: Sequence[TokenLogprob] = ()
        if self._prompt is not None:
            of_prompt, self._prompt = self._prompt.logprobs(message.prompt_logprobs), None
        if not self._wants_tokens:
            return Piece("", 0, (), Ending("length", None, 0, self.num_cached_tokens), prompt_logprobs=of_prompt)
        is_first = self._num_tokens == 0
        piece = self._push_tokens(message)
        if is_first and (of_prompt or self.num_cached_tokens):
            return structs.replace(piece, prompt_logprobs=of_prompt, num_cached_tokens=self.num_cached_tokens)
        return piece

    def _push_tokens(self, message: GenerateResponse) -> Piece:
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
            if self._logprobs_asked and (position != hidden or self._lists_hidden_end):
                self._remember(token_id, message.logprobs[position])
            if position == hidden:
                continue
            text += self._release(self._detokenizer.push(token_id))
            if self._stops.match is not None:
                return self._ended_by_stop_string(text, offsets, token_ids)
        if finish is None:
            return Piece(text, len(offsets), self._due(), None, offsets, token_ids)
        text += self._release(self._detokenizer.finish())
        if self._stops.match is not None:
            return self._ended_by_stop_string(text, offsets, token_ids)
        text += self._stops.finish()
        ending = self._ending(finish.reason, finish.stop_token_id if finish.HasField("stop_token_id") else None)
        due, self._pending = tuple(self._pending), deque()
        return Piece(text, len(offsets), due, ending, offsets, token_ids)

    def _release(self, decoded: str) -> str:
        if not decoded:
            return ""
        self._num_decoded_chars += len(decoded)
        released = self._stops.push(decoded)
        self._num_released_chars += len(released)
        return released

    def _remember(self, token_id: int, opinion: TokenLogprobs) -> None:
        top = tuple(zip(opinion.top_token_ids, opinion.top_logprobs, strict=True))
        self._pending.append(TokenLogprob(token_id, opinion.logprob, top, self._num_decoded_chars, opinion.rank))

    def _due(self) -> Sequence[TokenLogprob]:
        pending = self._pending
        due = []
        while pending and pending[0].offset < self._num_released_chars:
            due.append(pending.popleft())
        return due

    def _ended_by_stop_string(self, text: str, offsets: Sequence[int], token_ids: Sequence[int]) -> Piece:
        ending = self._ended("stop", self._stops.match)
        due = [*self._due(), *self._hidden()] if self._lists_hidden_end else self._due()
        return Piece(text, len(offsets), due, ending, offsets, token_ids[: len(offsets)])

    def _hidden(self) -> Sequence[TokenLogprob]:
        """Tokens within the stop string. Their text would begin where the choice's text ends."""
        hidden, self._pending = self._pending, deque()
        return [replace(one, offset=self._num_released_chars) for one in hidden]

    def _ending(self, reason: int, stop_token_id: int | None) -> Ending:
        assert reason in (FINISH_REASON_STOP, FINISH_REASON_LENGTH), f"a finish without a reason: {reason}"
        own = stop_token_id if stop_token_id in self._own_stop_ids else None
        name = "stop" if reason == FINISH_REASON_STOP else "length"
        return self._ended(name, own)

    def _ended(self, reason: str, stop_reason: int | str | None) -> Ending:
        return Ending(
            reason,
            stop_reason,
            self._num_tokens,
            self.num_cached_tokens,
            num_drafted_tokens=self._num_drafted_tokens,
            num_accepted_tokens=min(self._num_accepted_tokens, self._num_tokens),
            num_disk_tokens=self.num_disk_tokens,
            num_peer_tokens=self.num_peer_tokens,
        )


class _Prompt:
    """The prompt of a choice whose log-probabilities are requested."""

    __slots__ = ("_special_ids", "_token_bytes", "_token_ids")

    def __init__(self, token_bytes: Sequence[bytes], special_ids: frozenset[int], token_ids: Sequence[int]) -> None:
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._token_ids = token_ids

    def logprobs(self, opinions: Sequence[TokenLogprobs]) -> Sequence[TokenLogprob]:
        """The log-probabilities of all tokens but the first. Raises `StatusError` if some are missing."""
        if len(opinions) != len(self._token_ids) - 1:
            raise StatusError(Reason.INTERNAL, "the worker did not send the log-probabilities of the prompt")
        detokenizer = Detokenizer(self._token_bytes, self._special_ids)
        offset = len(detokenizer.push(self._token_ids[0]))
        found = []
        for token_id, opinion in zip(self._token_ids[1:], opinions, strict=True):
            top = tuple(zip(opinion.top_token_ids, opinion.top_logprobs, strict=True))
            found.append(TokenLogprob(token_id, opinion.logprob, top, offset, opinion.rank))
            offset += len(detokenizer.push(token_id))
        return found


class WholeChoice:
    """Gathers the pieces of one completion for an answer that is not streamed."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.token_ids: list[int] = []
        self.ending: Ending | None = None

    def push(self, piece: Piece) -> None:
        """Add the next piece."""
        self._texts.append(piece.text)
        self.logprobs.extend(piece.logprobs)
        self.prompt_logprobs.extend(piece.prompt_logprobs)
        self.token_ids.extend(piece.token_ids)
        self.ending = piece.ending

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)


class Ranked(Protocol):
    """A choice that can be compared with others of the same prompt."""

    logprobs: list[TokenLogprob]
    ending: Ending | None


def best_of(choices: Sequence[Ranked], num_each: int, n: int, *, are_ranked: bool = False) -> list[int]:
    """Indices of the `n` best of each `num_each` choices: by mean log-probability of their tokens, best first, unless
    they `are_ranked` already. Those that failed come last."""
    found: list[int] = []
    for first in range(0, len(choices), num_each):
        ranked = list(range(first, first + num_each))
        if not are_ranked:
            ranked.sort(key=lambda i: _rank(choices[i]))
        found += ranked[:n] if n < num_each else range(first, first + num_each)
    return found


def _rank(choice: Ranked) -> tuple[bool, float]:
    has_failed = choice.ending is not None and choice.ending.error is not None
    return has_failed, -_mean_logprob(choice.logprobs)


def _mean_logprob(logprobs: Sequence[TokenLogprob]) -> float:
    return sum(one.logprob for one in logprobs) / len(logprobs) if logprobs else 0.0
