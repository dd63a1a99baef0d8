"""Answers of Text Generation Inference: whole, and as events of one token each (pure).

    data:{"index":1,"token":{"id":7,"text":"Hel","logprob":-0.5,"special":false},"generated_text":null,"details":null}
    data:{"index":2,"token":{"id":8,"text":"lo","logprob":-0.1,"special":false},"generated_text":"Hello",…}

The texts of the tokens that are not special add up to the generated text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from headrace.gateway.chat.choice import Ending, Piece, TokenLogprob
from headrace.gateway.chat.generation import Usage
from headrace.gateway.chat.logprobs import LEAST_LOGPROB, token_bytes_of
from headrace.gateway.edge.failures import ErrorShape, Failure
from headrace.gateway.edge.wire import Shape, encode

TgiErrorType: TypeAlias = Literal["validation", "authentication", "overloaded", "generation"]
_ERROR_TYPES: Mapping[int, TgiErrorType] = {
    401: "authentication",
    403: "authentication",
    429: "overloaded",
    503: "overloaded",
}


class TgiError(Shape):
    """The shape of failures in TGI's protocol."""

    error: str
    error_type: TgiErrorType


class TgiPrefillToken(Shape):
    """A token of the prompt. The first one has no log-probability."""

    id: int
    text: str
    logprob: float | None


class TgiToken(Shape):
    """A token of the answer. The texts of all tokens that are not special add up to the answer."""

    id: int
    text: str
    logprob: float
    special: bool


class _Summary(Shape, kw_only=True):
    generated_text: str | UnsetType = UNSET
    finish_reason: Literal["length", "eos_token", "stop_sequence"]
    generated_tokens: int
    seed: int | None


class TgiStreamDetails(_Summary, kw_only=True):
    """Details at the end of a stream."""

    input_length: int


class TgiDetails(_Summary, kw_only=True):
    """Details of an answer: its finish reason and its tokens. The best one of several has the others, with their
    texts."""

    prefill: list[TgiPrefillToken]
    tokens: list[TgiToken]
    top_tokens: list[list[TgiToken]] | UnsetType = UNSET
    best_of_sequences: list[TgiDetails] | UnsetType = UNSET


class TgiAnswer(Shape):
    """The answer to a prompt."""

    generated_text: str
    details: TgiDetails | UnsetType = UNSET


class TgiEvent(Shape, kw_only=True):
    """An event of a stream: a token, and with the last one the whole text."""

    index: int
    token: TgiToken
    top_tokens: list[TgiToken] | UnsetType = UNSET
    generated_text: str | None
    details: TgiStreamDetails | None


class TgiInfo(Shape, kw_only=True):
    """The served model and the limits of requests."""

    model_id: str
    model_sha: str
    model_device_type: Literal["cpu"] = "cpu"
    model_pipeline_tag: Literal["text-generation"] = "text-generation"
    max_best_of: int
    max_stop_sequences: int
    max_top_n_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    max_client_batch_size: int = 1
    router: Literal["headrace"] = "headrace"
    version: str


class _TgiErrors(ErrorShape):
    """The format of all errors of this protocol."""

    kind = TgiError

    def whole(self, failure: Failure) -> bytes:
        """The error object."""
        kind = _ERROR_TYPES.get(failure.status, "validation" if failure.status < 500 else "generation")
        return encode(TgiError(failure.message, kind))

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
        self.tokens: list[TgiToken] = []
        self.tops: list[list[TgiToken]] = []
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
        """Add a token with its text, which ends where the text of the following token begins."""
        if one.token_id in self._shown.special_ids:
            self.tokens.append(self._token(one.token_id, one.logprob))
        else:
            end = len(self._text) if following is None else max(following.offset, self._num_shown_chars)
            self.tokens.append(self._token(one.token_id, one.logprob, self._text[self._num_shown_chars : end]))
            self._num_shown_chars = end
        if self._shown.num_top:
            self.tops.append([self._token(*alternative) for alternative in one.top[: self._shown.num_top]])

    def _token(self, token_id: int, logprob: float, text: str | None = None) -> TgiToken:
        if text is None:
            text = token_bytes_of(self._shown.token_bytes, token_id).decode(errors="replace")
        special = token_id in self._shown.special_ids
        return TgiToken(token_id, text, max(logprob, LEAST_LOGPROB), special)

    @property
    def generated_text(self) -> str:
        """The whole text."""
        return self._shown.prefix + self._text

    def stream_details(self) -> TgiStreamDetails:
        """The details at the end of a stream."""
        return TgiStreamDetails(**self._summary(), input_length=len(self._shown.prompt))

    def details(self) -> TgiDetails:
        """The details of the answer, with its tokens."""
        prefill = []
        if self._shown.prefill:
            first = self._shown.prompt[0]
            prefill = [TgiPrefillToken(first, self._token(first, 0.0).text, None)]
            for one in self.prompt_logprobs:
                token = self._token(one.token_id, one.logprob)
                prefill.append(TgiPrefillToken(token.id, token.text, token.logprob))
        tops = self.tops if self._shown.num_top else UNSET
        return TgiDetails(**self._summary(), prefill=prefill, tokens=self.tokens, top_tokens=tops)

    def _summary(self) -> dict[str, Any]:
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


def whole(choices: Sequence[TgiChoice], shown: Shown) -> TgiAnswer:
    """The response with these choices, best first."""
    best, *others = choices
    answer = TgiAnswer(best.generated_text)
    if shown.details:
        answer.details = best.details()
        if others:
            answer.details.best_of_sequences = [
                replace(one.details(), generated_text=one.generated_text) for one in others
            ]
    return answer


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
            events = self._event(count - 1, replace(choice.tokens[-1], text="", special=True), is_last=True)
        self._num_events = count
        return events

    def end(self, usage: Usage) -> bytes:
        """Write nothing: the last piece was the last event."""
        return b""

    def _event(self, position: int, token: TgiToken, is_last: bool) -> bytes:
        choice = self._choice
        event = TgiEvent(
            index=position + 1,
            token=token,
            top_tokens=choice.tops[position] if self._shown.num_top else UNSET,
            generated_text=choice.generated_text if is_last else None,
            details=choice.stream_details() if is_last and self._shown.details else None,
        )
        return b"data:" + encode(event) + b"\n\n"
