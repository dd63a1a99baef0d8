"""Answers of Ollama's API: lines of JSON, and the whole answer that they add up to (pure).

{"message": {"role": "assistant", "content": "Hel"}, "done": false}
{"message": {"role": "assistant", "content": "lo"}, "done": false}
{"message": {"role": "assistant", "content": ""}, "done": true, "done_reason": "stop", "eval_count": 3, …}
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from headrace.gateway.chat.choice import Ending
from headrace.gateway.chat.generation import Usage
from headrace.gateway.chat.logprobs import ChatLogprobs, ChosenToken
from headrace.gateway.chat.output import ChatPiece, new_call_id
from headrace.gateway.chat.output_parsers.output import ArgumentsDelta, CallDelta, ContentDelta, Delta, ReasoningDelta
from headrace.gateway.edge.failures import ErrorShape, Failure
from headrace.gateway.edge.wire import Shape, encode

NDJSON = b"application/x-ndjson"
KEEP_ALIVE = b" "
"""White space before the next line."""
# Clients in Python end lines at these too: Ollama's own reads them with httpx. JSON has them in texts only.
_SEPARATORS = tuple((char.encode(), b"\\u%04x" % ord(char)) for char in "\x85\u2028\u2029")
INVALID_JSON = "INVALID_JSON"
"""The name for the text of a cut-off call's arguments."""


class OllamaError(Shape):
    """The shape of failures in Ollama's protocol."""

    error: str


class OllamaFunction(Shape):
    """A called function, and its place among the calls of the answer."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(Shape):
    """A function call for the caller to make."""

    id: str
    function: OllamaFunction


class OllamaAnswerMessage(Shape, kw_only=True):
    """The message of an answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaReply(Shape, kw_only=True):
    """The answer to a conversation, in `message`, or to a prompt, in `response` and beside it; whole, or a line of it.

    Times are in nanoseconds. `context` has the tokens of prompt and answer.
    """

    model: str
    created_at: str
    message: OllamaAnswerMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET
    logprobs: list[ChosenToken] | UnsetType = UNSET
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaEmbedded(Shape, kw_only=True):
    """A vector for each text; times are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Shape):
    """The vector of one text."""

    embedding: list[float]


class OllamaDetails(Shape):
    """The known properties of a model's files."""

    parent_model: str = ""
    format: str = "openvino"
    family: str = ""
    families: tuple[()] = ()
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(Shape):
    """A model, with the hash of its files and the bytes of memory that it takes, 0 if they are not known."""

    name: str
    model: str
    digest: str
    details: OllamaDetails
    size: int


class OllamaListed(OllamaModel):
    """A model that is served."""

    modified_at: str


class OllamaList(Shape):
    """The list of models."""

    models: list[OllamaListed]


class OllamaRunning(OllamaModel, kw_only=True):
    """A model that is served, as one that runs."""

    size_vram: int = 0
    expires_at: str
    context_length: int


class OllamaRunningList(Shape):
    """The list of running models."""

    models: list[OllamaRunning]


class OllamaShown(Shape, kw_only=True):
    """The known properties of a model."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaStatus(Shape):
    """The progress of a pull."""

    status: str


class OllamaVersion(Shape):
    """The version of Ollama whose API this is."""

    version: str


class _OllamaErrors(ErrorShape):
    """The format of all errors of this protocol."""

    kind = OllamaError

    def whole(self, failure: Failure) -> bytes:
        """The error object."""
        return encode(OllamaError(failure.message))

    def event(self, failure: Failure) -> bytes:
        """The last line of a stream that failed."""
        return self.whole(failure) + b"\n"


OLLAMA_ERRORS = _OllamaErrors()


def now() -> str:
    """The current time in the format of answers."""
    return time_of(time.time())


def time_of(unix_s: float) -> str:
    """A time in the format of answers."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def line(value: OllamaReply | OllamaStatus) -> bytes:
    """A line of a stream."""
    raw = bytes(encode(value))
    for separator, escaped in _SEPARATORS:
        raw = raw.replace(separator, escaped)
    return raw + b"\n"


@dataclass(slots=True)
class Stopwatch:
    """The times at which the stages of a request ended, in seconds of a monotonic clock."""

    arrived_s: float
    planned_s: float
    clock: Callable[[], float] = time.monotonic
    first_s: float = 0.0
    """Time of the first token."""
    last_s: float = 0.0
    """Time of the last token."""

    def tick(self) -> None:
        """Record the time of a piece."""
        self.last_s = self.clock()
        self.first_s = self.first_s or self.last_s

    def durations(self, usage: Usage) -> dict[str, int]:
        """The account, with times in nanoseconds. Loading is finding the model and making the prompt; reading the
        prompt includes the time in queues."""
        return {
            "total_duration": _ns(self.clock() - self.arrived_s),
            "load_duration": _ns(self.planned_s - self.arrived_s),
            "prompt_eval_count": usage.num_prompt_tokens,
            "prompt_eval_duration": _ns(self.first_s - self.planned_s),
            "eval_count": usage.num_generated_tokens,
            "eval_duration": _ns(self.last_s - self.first_s),
        }


def _ns(seconds: float) -> int:
    return max(round(seconds * 1e9), 0)


class _Part:
    """Text, reasoning and calls of a line, or of the whole answer."""

    def __init__(self) -> None:
        self.contents: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[OllamaCall] = []
        self.logprobs: list[ChosenToken] = []

    def __bool__(self) -> bool:
        return bool(self.contents or self.thoughts or self.calls or self.logprobs)

    def take(self, other: _Part) -> None:
        self.contents += other.contents
        self.thoughts += other.thoughts
        self.calls += other.calls
        self.logprobs += other.logprobs


class OllamaAnswer:
    """Makes one answer. Push every piece, as `piece` or as `push`; then `end` or `whole`."""

    def __init__(
        self,
        model: str,
        watch: Stopwatch,
        logprobs: ChatLogprobs | None = None,
        *,
        num_id_chars: int = 24,
        is_chat: bool = True,
        prompt: Sequence[int] | None = None,
    ) -> None:
        """`num_id_chars` is the length of the ids of calls. With `prompt`, the answer has the tokens of both."""
        self._model = model
        self._watch = watch
        self._logprobs = logprobs
        self._num_id_chars = num_id_chars
        self._is_chat = is_chat
        self._context = None if prompt is None else list(prompt)
        self._all = _Part()
        self._call: tuple[str, str, list[str]] | None = None
        self._num_calls = 0
        self._ending: Ending | None = None

    def piece(self, index: int, piece: ChatPiece) -> bytes:
        """Lines for a piece; none if it shows nothing. A call is shown when it is complete."""
        part = self._part(piece)
        return line(self._reply(part)) if part else b""

    def push(self, piece: ChatPiece) -> None:
        """Add the next piece of an answer that is not streamed."""
        self._all.take(self._part(piece))

    def end(self, usage: Usage) -> bytes:
        """The last line."""
        return line(self._last(_Part(), usage))

    def whole(self, usage: Usage) -> bytes:
        """The body of the answer."""
        return encode(self._last(self._all, usage))

    def _part(self, piece: ChatPiece) -> _Part:
        self._watch.tick()
        part = _Part()
        for delta in piece.deltas:
            self._add(part, delta)
        if self._logprobs is not None:
            part.logprobs += self._logprobs.tokens(piece.logprobs)
        if self._context is not None:
            self._context += piece.token_ids
        if piece.ending is not None:
            self._ending = piece.ending
            self._close(part)
        return part

    def _add(self, part: _Part, delta: Delta) -> None:
        match delta:
            case ContentDelta(text):
                self._close(part)
                part.contents.append(text)
            case ReasoningDelta(text):
                part.thoughts.append(text)
            case CallDelta(_, name):
                self._close(part)
                self._call = new_call_id(self._num_id_chars), name, []
            case ArgumentsDelta(_, text):
                assert self._call is not None
                self._call[2].append(text)

    def _close(self, part: _Part) -> None:
        """Complete the open call."""
        if self._call is None:
            return
        (call_id, name, texts), self._call = self._call, None
        part.calls.append(OllamaCall(call_id, OllamaFunction(self._num_calls, name, _arguments("".join(texts)))))
        self._num_calls += 1

    def _reply(self, part: _Part) -> OllamaReply:
        thinking = "".join(part.thoughts) if part.thoughts else UNSET
        reply = _reply(self._model, self._is_chat, "".join(part.contents), thinking, part.calls or UNSET)
        reply.logprobs = part.logprobs or UNSET
        return reply

    def _last(self, part: _Part, usage: Usage) -> OllamaReply:
        assert self._ending is not None
        return replace(
            self._reply(part),
            done=True,
            done_reason="length" if self._ending.reason == "length" else "stop",
            context=UNSET if self._context is None else self._context,
            **self._watch.durations(usage),
        )


def _reply(
    model: str,
    is_chat: bool,
    text: str,
    thinking: str | UnsetType = UNSET,
    calls: list[OllamaCall] | UnsetType = UNSET,
) -> OllamaReply:
    reply = OllamaReply(model=model, created_at=now(), done=False)
    if is_chat:
        reply.message = OllamaAnswerMessage(content=text, thinking=thinking, tool_calls=calls)
    else:
        reply.response = text
        reply.thinking = thinking
        reply.tool_calls = calls
    return reply


def loaded(model: str, is_chat: bool, reason: Literal["load", "unload"]) -> OllamaReply:
    """The answer to a request without a prompt, which only asks for the model to be loaded or unloaded."""
    return replace(_reply(model, is_chat, ""), done=True, done_reason=reason)


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: text}
