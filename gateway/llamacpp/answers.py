"""Answers of llama.cpp's server: whole, and as events (pure).

data: {"index":0,"content":"Hel","tokens":[],"stop":false,…}
data: {"index":0,"content":"","tokens":[],"stop":true,"stop_type":"eos","timings":{…},…}
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from headrace.gateway.chat.choice import Ending, Piece, TokenLogprob
from headrace.gateway.chat.generation import Usage
from headrace.gateway.chat.logprobs import LEAST_LOGPROB, token_bytes_of
from headrace.gateway.chat.timings import Stopwatch, Timings
from headrace.gateway.edge.failures import ErrorShape, Failure
from headrace.gateway.edge.wire import Shape, encode

NO_SLOT = -1
"""The router places requests, so that none has a slot that a client could name."""


class LlamaErrorDetail(Shape):
    """The status, message and type of an error."""

    code: int
    message: str
    type: str


class LlamaError(Shape):
    """The shape of failures in llama.cpp's protocol."""

    error: LlamaErrorDetail


class _LlamaErrors(ErrorShape):
    """The format of all errors of this protocol."""

    kind = LlamaError

    def whole(self, failure: Failure) -> bytes:
        """The error object."""
        return encode(LlamaError(LlamaErrorDetail(failure.status, failure.message, failure.kind)))


LLAMA_ERRORS = _LlamaErrors()


class LlamaAlternative(Shape):
    """A possible token."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class LlamaProbability(LlamaAlternative):
    """A token of the answer, and the most probable ones at its position."""

    top_logprobs: list[LlamaAlternative]


class LlamaPiece(Shape, kw_only=True):
    """An event with the next text."""

    index: int = 0
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int = NO_SLOT
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[LlamaProbability] | UnsetType = UNSET


class LlamaAnswer(LlamaPiece, kw_only=True):
    """A whole answer, or the last event of a stream, whose content is empty."""

    model: str
    prompt: str
    generation_settings: dict[str, Any]
    has_new_line: bool
    truncated: bool = False
    stop_type: Literal["eos", "word", "limit", "none"]
    stopping_word: str
    tokens_cached: int
    timings: Timings


class LlamaText(Shape):
    """A conversation as the model reads it."""

    prompt: str


class LlamaProps(Shape, kw_only=True):
    """What is served."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool = False


class LlamaSlot(Shape, kw_only=True):
    """A place in the batch of a worker."""

    id: int
    id_task: int = -1
    n_ctx: int
    speculative: bool
    is_processing: bool
    worker: str


@dataclass(slots=True)
class LlamaChoice:
    """One answer, as events and as a whole."""

    model: str
    prompt: str
    num_prompt_tokens: int
    settings: dict[str, Any]
    token_bytes: Sequence[bytes]
    watch: Stopwatch
    shows_tokens: bool
    shows_probabilities: bool
    _text: list[str] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)
    _probabilities: list[LlamaProbability] = field(default_factory=list)
    _num_tokens: int = 0
    _ending: Ending | None = None

    def piece(self, index: int, piece: Piece) -> bytes:
        """The event of a piece; none if it shows nothing."""
        first_token, first_probability = len(self._tokens), len(self._probabilities)
        self.push(piece)
        new = self._probabilities[first_probability:]
        if not piece.text and not new:
            return b""
        return _event(
            LlamaPiece(
                content=piece.text,
                tokens=self._tokens[first_token:] if self.shows_tokens else [],
                stop=False,
                tokens_predicted=self._num_tokens,
                tokens_evaluated=self.num_prompt_tokens,
                completion_probabilities=new if self.shows_probabilities else UNSET,
            )
        )

    def end(self, usage: Usage) -> bytes:
        """The last event."""
        return _event(self._answer("", [], UNSET))

    def push(self, piece: Piece) -> None:
        """Add the next piece."""
        self.watch.tick(piece)
        self._text.append(piece.text)
        self._tokens += piece.token_ids
        self._num_tokens += piece.num_tokens
        self._probabilities += map(self._probability, piece.logprobs)
        self._ending = piece.ending

    def whole(self) -> bytes:
        """The whole answer."""
        shown = self._probabilities if self.shows_probabilities else UNSET
        tokens = self._tokens if self.shows_tokens else []
        return encode(self._answer("".join(self._text), tokens, shown))

    def _answer(
        self, content: str, tokens: list[int], probabilities: list[LlamaProbability] | UnsetType
    ) -> LlamaAnswer:
        ending = self._ending
        assert ending is not None
        kind: Literal["eos", "word", "limit", "none"] = "limit" if ending.reason == "length" else "eos"
        if isinstance(ending.stop_reason, str):
            kind = "word"
        return LlamaAnswer(
            content=content,
            tokens=tokens,
            stop=True,
            tokens_predicted=ending.num_generated_tokens,
            tokens_evaluated=self.num_prompt_tokens,
            completion_probabilities=probabilities,
            model=self.model,
            prompt=self.prompt,
            generation_settings=self.settings,
            has_new_line=any("\n" in text for text in self._text),
            stop_type=kind,
            stopping_word=ending.stop_reason if isinstance(ending.stop_reason, str) else "",
            tokens_cached=self.num_prompt_tokens + ending.num_generated_tokens,
            timings=self.watch.timings(self.num_prompt_tokens),
        )

    def _probability(self, one: TokenLogprob) -> LlamaProbability:
        top = [self._alternative(token_id, logprob) for token_id, logprob in one.top]
        chosen = self._alternative(one.token_id, one.logprob)
        return LlamaProbability(chosen.id, chosen.token, chosen.bytes, chosen.logprob, top)

    def _alternative(self, token_id: int, logprob: float) -> LlamaAlternative:
        raw = token_bytes_of(self.token_bytes, token_id)
        return LlamaAlternative(token_id, raw.decode(errors="replace"), list(raw), max(logprob, LEAST_LOGPROB))


def _event(value: Shape) -> bytes:
    return b"data: " + encode(value) + b"\n\n"
