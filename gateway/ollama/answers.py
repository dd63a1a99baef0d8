"""Answers of Ollama's API: lines of JSON, and the whole answer that they add up to (pure).

{"message": {"role": "assistant", "content": "Hel"}, "done": false}
{"message": {"role": "assistant", "content": "lo"}, "done": false}
{"message": {"role": "assistant", "content": ""}, "done": true, "done_reason": "stop", "eval_count": 3, …}
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace.gateway.chat.choice import Ending, TokenLogprob
from headrace.gateway.chat.generation import Usage
from headrace.gateway.chat.logprobs import LEAST_LOGPROB, token_bytes_of
from headrace.gateway.chat.output import ChatPiece, new_call_id
from headrace.gateway.chat.output_parsers.output import ArgumentsDelta, CallDelta, ContentDelta, Delta, ReasoningDelta
from headrace.gateway.edge.failures import ErrorShape, Failure
from headrace.gateway.edge.wire import encode

NDJSON = b"application/x-ndjson"
KEEP_ALIVE = b" "
"""White space before the next line."""
# Clients in Python end lines at these too: Ollama's own reads them with httpx. JSON has them in texts only.
_SEPARATORS = tuple((char.encode(), b"\\u%04x" % ord(char)) for char in "\x85\u2028\u2029")
INVALID_JSON = "INVALID_JSON"
"""The name for the text of a cut-off call's arguments."""


class _OllamaErrors(ErrorShape):
    """The format of all errors of this protocol."""

    def whole(self, failure: Failure) -> bytes:
        """The error object."""
        return encode({"error": failure.message})

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


def line(value: dict[str, Any]) -> bytes:
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
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []

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
        token_bytes: Sequence[bytes],
        *,
        num_id_chars: int = 24,
        is_chat: bool = True,
        has_logprobs: bool = False,
        prompt: Sequence[int] | None = None,
    ) -> None:
        """`num_id_chars` is the length of the ids of calls. With `prompt`, the answer has the tokens of both."""
        self._model = model
        self._watch = watch
        self._token_bytes = token_bytes
        self._num_id_chars = num_id_chars
        self._is_chat = is_chat
        self._has_logprobs = has_logprobs
        self._context = None if prompt is None else list(prompt)
        self._all = _Part()
        self._call: tuple[str, str, list[str]] | None = None
        self._num_calls = 0
        self._ending: Ending | None = None

    def piece(self, index: int, piece: ChatPiece) -> bytes:
        """Lines for a piece; none if it shows nothing. A call is shown when it is complete."""
        part = self._part(piece)
        return line({**self._head(), **self._body(part), "done": False}) if part else b""

    def push(self, piece: ChatPiece) -> None:
        """Add the next piece of an answer that is not streamed."""
        self._all.take(self._part(piece))

    def end(self, usage: Usage) -> bytes:
        """The last line."""
        return line(self._last(_Part(), usage))

    def whole(self, usage: Usage) -> bytes:
        """The body of the answer."""
        return bytes(encode(self._last(self._all, usage)))

    def _part(self, piece: ChatPiece) -> _Part:
        self._watch.tick()
        part = _Part()
        for delta in piece.deltas:
            self._add(part, delta)
        if self._has_logprobs:
            part.logprobs += logprobs_value(piece.logprobs, self._token_bytes)
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
        function = {"index": self._num_calls, "name": name, "arguments": _arguments("".join(texts))}
        part.calls.append({"id": call_id, "function": function})
        self._num_calls += 1

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": now()}

    def _body(self, part: _Part) -> dict[str, Any]:
        shown: dict[str, Any] = {"content" if self._is_chat else "response": "".join(part.contents)}
        if part.thoughts:
            shown["thinking"] = "".join(part.thoughts)
        if part.calls:
            shown["tool_calls"] = part.calls
        body = {"message": {"role": "assistant", **shown}} if self._is_chat else shown
        return {**body, "logprobs": part.logprobs} if part.logprobs else body

    def _last(self, part: _Part, usage: Usage) -> dict[str, Any]:
        assert self._ending is not None
        reason = "length" if self._ending.reason == "length" else "stop"
        context = {} if self._context is None else {"context": self._context}
        body = {**self._head(), **self._body(part), "done": True, "done_reason": reason}
        return {**body, **context, **self._watch.durations(usage)}


def loaded(model: str, is_chat: bool, reason: str) -> dict[str, Any]:
    """The answer to a request without a prompt, which only asks for the model to be loaded or unloaded. `reason` is
    load or unload."""
    body = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return {"model": model, "created_at": now(), **body, "done": True, "done_reason": reason}


def logprobs_value(logprobs: Iterable[TokenLogprob], token_bytes: Sequence[bytes]) -> list[dict[str, Any]]:
    """The `logprobs` of a line."""

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes_of(token_bytes, token_id)
        return {"token": raw.decode(errors="replace"), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(raw)}

    return [
        {**token(one.token_id, one.logprob), "top_logprobs": [token(*alternative) for alternative in one.top]}
        for one in logprobs
    ]


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: text}
