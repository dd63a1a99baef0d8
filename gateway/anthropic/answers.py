"""Answers of the Messages API: the blocks of a message, and the events of its stream (pure).

    message_start, { content_block_start, content_block_delta..., content_block_stop }..., message_delta, message_stop

One instance makes one message, streamed or not, so that a stream adds up to the whole answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headrace.common.telemetry.logs import request_id_var
from headrace.gateway.anthropic.turns import input_of
from headrace.gateway.chat.choice import Ending
from headrace.gateway.chat.generation import Usage
from headrace.gateway.chat.output import ChatPiece, new_call_id
from headrace.gateway.chat.output_parsers.output import ArgumentsDelta, CallDelta, ContentDelta, Delta, ReasoningDelta
from headrace.gateway.edge.failures import ErrorShape, Failure
from headrace.gateway.edge.wire import encode
from headrace.gateway.text.reasoning_seal import sealed

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
OVERLOADED = 529
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}


class _AnthropicErrors(ErrorShape):
    """The error format of this protocol."""

    def status(self, failure: Failure) -> int:
        """That of the provider: 529 if the server has no capacity, as against 429 for the limits of a key."""
        return OVERLOADED if failure.status == 503 or failure.code == "queue_full" else failure.status

    def whole(self, failure: Failure) -> bytes:
        """The error object."""
        status = self.status(failure)
        other = "invalid_request_error" if status < 500 else "api_error"
        error = {"type": _ERROR_TYPES.get(status, other), "message": failure.message}
        return encode({"type": "error", "error": error, "request_id": request_id_var.get()})

    def event(self, failure: Failure) -> bytes:
        """The last event of a stream that failed."""
        return b"event: error\ndata: " + self.whole(failure) + b"\n\n"


ANTHROPIC_ERRORS = _AnthropicErrors()


class _Block:
    """A block that is being written."""

    def __init__(self, kind: str, call_id: str = "", name: str = "") -> None:
        self.kind = kind
        self.call_id = call_id
        self.name = name
        self._texts: list[str] = []

    def add(self, text: str) -> None:
        self._texts.append(text)

    def value(self, shows_thinking: bool = True) -> dict[str, Any]:
        """The block as the message shows it."""
        text = "".join(self._texts)
        if self.kind == "text":
            return {"type": "text", "text": text, "citations": []}
        if self.kind == "thinking":
            return {"type": "thinking", "thinking": text if shows_thinking else "", "signature": sealed(text)}
        return self._call(input_of(text))

    def opening(self) -> dict[str, Any]:
        """The block as its first event shows it."""
        if self.kind == "tool_use":
            return self._call({})
        empty: dict[str, Any] = {"type": self.kind, self.kind: ""}
        return {**empty, "signature": ""} if self.kind == "thinking" else {**empty, "citations": []}

    def _call(self, value: dict[str, Any]) -> dict[str, Any]:
        caller = {"type": "direct"}
        return {"type": "tool_use", "id": self.call_id, "name": self.name, "input": value, "caller": caller}


@dataclass(frozen=True, slots=True, kw_only=True)
class Showing:
    """What a message shows of the answer."""

    thoughts: bool = True
    """Whether there are blocks of thinking."""
    thinking: bool = True
    """Whether these have their text."""
    anything: bool = True
    """False for a request that only computes its prompt into the cache."""
    length_reason: str = "max_tokens"
    """The reason to stop of an answer that reached its length."""
    context_management: bool = False
    """Whether the message says which edits of its context were applied."""


class MessageAnswer:
    """Builds one message. Add every piece with `piece` or `push`, then call `end` or `whole`."""

    def __init__(
        self, message_id: str, model: str, num_prompt_tokens: int, num_id_chars: int, showing: Showing
    ) -> None:
        """`num_id_chars` is the length of the ids of calls."""
        self._message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "container": None,
            "diagnostics": None,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
        }
        self._num_prompt_tokens = num_prompt_tokens
        self._num_id_chars = num_id_chars
        self._showing = showing
        edits: dict[str, Any] = {"context_management": {"applied_edits": []}}
        self._edits = edits if showing.context_management else {}
        self._begun = False
        self._open: _Block | None = None
        self._blocks: list[dict[str, Any]] = []
        self._ending: Ending | None = None

    def piece(self, index: int, piece: ChatPiece) -> bytes:
        """Events for a piece."""
        events = b""
        if not self._begun:
            self._begun = True
            usage = _usage_value(Usage(self._num_prompt_tokens, 0, piece.num_cached_tokens))
            events = _event("message_start", message={**self._message, "usage": {**usage, **_SERVICE}}) + PING
        for delta in piece.deltas if self._showing.anything else ():
            events += self._delta(delta)
        if piece.ending is not None:
            self._ending = piece.ending
            events += self._close()
        return events

    def push(self, piece: ChatPiece) -> None:
        """Add the next piece of an answer that is not streamed."""
        self.piece(0, piece)

    def end(self, usage: Usage) -> bytes:
        """The last events."""
        delta = {**self._stop(), "container": None}
        events = _event("message_delta", delta=delta, usage=self._usage(usage), **self._edits)
        return events + _event("message_stop")

    def whole(self, usage: Usage) -> bytes:
        """The body of the answer."""
        account = {**self._usage(usage), **_SERVICE}
        return encode({**self._message, "content": self._blocks, **self._stop(), "usage": account, **self._edits})

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """The usage; the token that a worker samples in order to compute a prompt is not in it."""
        return _usage_value(usage if self._showing.anything else replace(usage, num_generated_tokens=0))

    def _stop(self) -> dict[str, Any]:
        assert self._ending is not None
        reason, sequence = "end_turn", None
        if self._ending.reason == "length" or not self._showing.anything:
            reason = self._showing.length_reason
        elif isinstance(self._ending.stop_reason, str):
            reason, sequence = "stop_sequence", self._ending.stop_reason
        elif any(block["type"] == "tool_use" for block in self._blocks):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}

    def _delta(self, delta: Delta) -> bytes:
        match delta:
            case ReasoningDelta() if not self._showing.thoughts:
                return b""
            case ReasoningDelta(text):
                opening, more = self._into("thinking"), self._text(text)
                return opening + more if self._showing.thinking else opening
            case ContentDelta(text):
                return self._into("text") + self._text(text)
            case CallDelta(_, name):
                call_id = new_call_id(self._num_id_chars).replace("call_", "toolu_")
                return self._close() + self._add(_Block("tool_use", call_id, name))
            case ArgumentsDelta(_, text):
                return self._text(text)

    def _into(self, kind: str) -> bytes:
        """A block of this kind is open."""
        if self._open is not None and self._open.kind == kind:
            return b""
        return self._close() + self._add(_Block(kind))

    def _add(self, block: _Block) -> bytes:
        self._open = block
        return _event("content_block_start", index=len(self._blocks), content_block=block.opening())

    def _text(self, text: str) -> bytes:
        assert self._open is not None
        self._open.add(text)
        kind, name = {
            "text": ("text_delta", "text"),
            "thinking": ("thinking_delta", "thinking"),
            "tool_use": ("input_json_delta", "partial_json"),
        }[self._open.kind]
        return self._block_delta({"type": kind, name: text})

    def _block_delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=len(self._blocks), delta=delta)

    def _close(self) -> bytes:
        block, self._open = self._open, None
        if block is None:
            return b""
        value = block.value(self._showing.thinking)
        events = b""
        if block.kind == "thinking":
            events += self._block_delta({"type": "signature_delta", "signature": value["signature"]})
        events += _event("content_block_stop", index=len(self._blocks))
        self._blocks.append(value)
        return events


# Fixed fields of a whole message about its service.
_SERVICE = {
    "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    "inference_geo": None,
    "service_tier": "standard",
    "speed": "standard",
}


def _usage_value(usage: Usage) -> dict[str, Any]:
    """The `usage` object. In this protocol, the tokens of the prompt exclude cached ones."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_generated_tokens,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning_tokens},
        "server_tool_use": None,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))
