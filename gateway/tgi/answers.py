"""Answers of Text Generation Inference: whole, and as events of one token each (pure).

    data:{"index":1,"token":{"id":7,"text":"Hel","logprob":-0.5,"special":false},"generated_text":null,"details":null}
    data:{"index":2,"token":{"id":8,"text":"lo","logprob":-0.1,"special":false},"generated_text":"Hello",…}

The texts of the tokens that are not special add up to the generated text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.gateway.chat.choice import Ending, Piece, TokenLogprob
from headrace.gateway.chat.generation import Usage
from headrace.gateway.chat.logprobs import LEAST_LOGPROB, token_bytes_of
from headrace.gateway.edge.failures import ErrorShape, Failure
from headrace.gateway.edge.wire import encode

_ERROR_TYPES = {401: "authentication", 403: "authentication", 429: "overloaded", 503: "overloaded"}


class _TgiErrors(ErrorShape):
    """The format of all errors of this protocol."""

    def whole(self, failure: Failure) -> bytes:
        """The error object."""
        kind = _ERROR_TYPES.get(failure.status, "validation" if failure.status < 500 else "generation")
        return encode({"error": failure.message, "error_type": kind})

    def event(self, failure: Failure) -> bytes:
        """The last event of a stream that failed."""
        return b"data:" + self.whole(failure) + b"\n\n"


TGI_ERRORS = _TgiErrors()


@dataclass(frozen=True, slots=True)
class Shown:
    """Options for parts of an answer in addition to its text."""

    token_bytes: Sequence[bytes]
    special_ids: frozenset[int]
    prompt: Sequence[int]
    """Tokens of the prompt."""
    prefix: str = ""
    """The beginning of the generated text."""
    num_top: int = 0
    """Alternatives to each token."""
    details: bool = False
    prefill: bool = False
    """Whether details have the tokens of the prompt."""
    seed: int | None = None
    """Seed of the answer, if it was drawn."""
    holds: bool = False
    """Whether a token may be shown before all of its text is released, because there are stop texts."""


class TgiChoice:
    """Gathers the tokens of one answer with their texts."""

    def __init__(self, shown: Shown, seed_offset: int = 0) -> None:
        self._shown = shown
        self._seed_offset = seed_offset
        self._text = ""
        self._num_shown_chars = 0
        self._pending: list[TokenLogprob] = []
        self.tokens: list[dict[str, Any]] = []
        self.tops: list[list[dict[str, Any]]] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.ending: Ending | None = None

    def push(self, piece: Piece) -> None:
        """Add the next piece."""
        self._text += piece.text
        self._pending += piece.logprobs
        self.logprobs += piece.logprobs
        self.prompt_logprobs += piece.prompt_logprobs
        self.ending = piece.ending
        num_kept = 1 if self._shown.holds and piece.ending is None else 0
        due = self._pending[: len(self._pending) - num_kept]
        ordinary = [i for i, one in enumerate(due) if one.token_id not in self._shown.special_ids]
        for i, one in enumerate(due):
            following = due[i + 1] if i + 1 < len(due) else None
            if following is None and num_kept:
                following = self._pending[-1]
            if ordinary and i == ordinary[-1] and not num_kept:
                following = None
            self._add(one, following)
        self._pending = self._pending[len(due) :]

    def _add(self, one: TokenLogprob, following: TokenLogprob | None) -> None:
        """A token with its text, which ends where that of the following one begins."""
        if one.token_id in self._shown.special_ids:
            self.tokens.append(self._token(one.token_id, one.logprob))
        else:
            end = len(self._text) if following is None else max(following.offset, self._num_shown_chars)
            self.tokens.append(self._token(one.token_id, one.logprob, self._text[self._num_shown_chars : end]))
            self._num_shown_chars = end
        if self._shown.num_top:
            self.tops.append([self._token(*alternative) for alternative in one.top[: self._shown.num_top]])

    def _token(self, token_id: int, logprob: float, text: str | None = None) -> dict[str, Any]:
        if text is None:
            text = token_bytes_of(self._shown.token_bytes, token_id).decode(errors="replace")
        special = token_id in self._shown.special_ids
        return {"id": token_id, "text": text, "logprob": max(logprob, LEAST_LOGPROB), "special": special}

    @property
    def generated_text(self) -> str:
        """The whole text."""
        return self._shown.prefix + self._text

    def summary(self) -> dict[str, Any]:
        """The finish reason and token count of the answer."""
        ending = self.ending
        assert ending is not None
        reason = "length"
        if ending.reason == "stop":
            reason = "stop_sequence" if isinstance(ending.stop_reason, str) else "eos_token"
        seed = self._shown.seed
        return {
            "finish_reason": reason,
            "generated_tokens": ending.num_generated_tokens,
            "seed": None if seed is None else (seed + self._seed_offset) % 2**64,
        }

    def details(self) -> dict[str, Any]:
        """The summary of the answer, with its tokens."""
        prefill: list[dict[str, Any]] = []
        if self._shown.prefill:
            first = self._shown.prompt[0]
            prefill = [{"id": first, "text": self._token(first, 0.0)["text"], "logprob": None}]
            for one in self.prompt_logprobs:
                token = self._token(one.token_id, one.logprob)
                prefill.append({name: token[name] for name in ("id", "text", "logprob")})
        value = {**self.summary(), "prefill": prefill, "tokens": self.tokens}
        return {**value, "top_tokens": self.tops} if self._shown.num_top else value


def whole(choices: Sequence[TgiChoice], shown: Shown) -> dict[str, Any]:
    """The response with these choices, best first."""
    best, *others = choices
    value: dict[str, Any] = {"generated_text": best.generated_text}
    if shown.details:
        details = best.details()
        if others:
            sequences = [{"generated_text": one.generated_text, **one.details()} for one in others]
            details["best_of_sequences"] = sequences
        value["details"] = details
    return value


class TgiStream:
    """Events of a streamed answer."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._choice = TgiChoice(shown)
        self._num_events = 0

    def piece(self, index: int, piece: Piece) -> bytes:
        """Events for a piece; none if it shows nothing. The last one has the whole text."""
        choice = self._choice
        choice.push(piece)
        is_last = piece.ending is not None
        events = b""
        count = len(choice.tokens)
        for i in range(self._num_events, count):
            events += self._event(i, choice.tokens[i], is_last and i == count - 1)
        if is_last and count and count == self._num_events:
            # All tokens arrived before a worker was lost. Readers omit the texts of special tokens.
            events = self._event(count - 1, {**choice.tokens[-1], "text": "", "special": True}, is_last=True)
        self._num_events = count
        return events

    def end(self, usage: Usage) -> bytes:
        """Write nothing: the last piece was the last event."""
        return b""

    def _event(self, position: int, token: dict[str, Any], is_last: bool) -> bytes:
        choice = self._choice
        value: dict[str, Any] = {"index": position + 1, "token": token}
        if self._shown.num_top:
            value["top_tokens"] = choice.tops[position]
        details = None
        if is_last and self._shown.details:
            details = {**choice.summary(), "input_length": len(self._shown.prompt)}
        value |= {"generated_text": choice.generated_text if is_last else None, "details": details}
        return b"data:" + encode(value) + b"\n\n"
