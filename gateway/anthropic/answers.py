"""Answers of the Messages API: the blocks of a message, and the events of its stream (pure).

    message_start, { content_block_start, content_block_delta..., content_block_stop }..., message_delta, message_stop

One instance makes one message, streamed or not, so that a stream adds up to the whole answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from headrace.common.telemetry.logs import request_id_var
from headrace.gateway.anthropic.turns import input_of
from headrace.gateway.chat.choice import Ending
from headrace.gateway.chat.generation import Usage
from headrace.gateway.chat.output import ChatPiece, new_call_id
from headrace.gateway.chat.output_parsers.output import ArgumentsDelta, CallDelta, ContentDelta, Delta, ReasoningDelta
from headrace.gateway.edge.failures import ErrorShape, Failure
from headrace.gateway.edge.wire import Shape, encode
from headrace.gateway.text.seals import REASONING

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


class AnthropicErrorDetail(Shape):
    """The type and message of an error."""

    type: str
    message: str


class AnthropicError(Shape, kw_only=True):
    """The error format of Anthropic's protocol."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
    request_id: str


class TextBlock(Shape, tag="text"):
    """Text of the answer."""

    text: str
    citations: tuple[()] = ()


class ThinkingBlock(Shape, tag="thinking"):
    """Reasoning before the answer."""

    thinking: str
    signature: str


class DirectCaller(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="direct"):
    """The model called the tool, not code that it runs."""


class ToolUseBlock(Shape, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller = DirectCaller()


Block: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(Shape):
    """Tokens of thinking among those of the answer."""

    thinking_tokens: int


class MessageTokens(Shape, kw_only=True):
    """The usage of a request. The tokens of the prompt exclude cached ones."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    server_tool_use: None = None


class CacheCreation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens that callers had put into a cache. Here every prompt is cached, and none of them is counted."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class MessageUsage(MessageTokens, kw_only=True):
    """The usage in a whole message, which has fields about the service too."""

    cache_creation: CacheCreation = CacheCreation()
    inference_geo: None = None
    service_tier: Literal["standard"] = "standard"
    speed: Literal["standard"] = "standard"


class AppliedEdits(Shape):
    """The edits of the context that were applied: none."""

    applied_edits: tuple[()] = ()


StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class Message(Shape, kw_only=True):
    """An answer in Anthropic's protocol."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    container: None = None
    diagnostics: None = None
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    usage: MessageUsage
    context_management: AppliedEdits | UnsetType = UNSET


class MessageEnd(Shape):
    """What the last events of a stream say of the message's end."""

    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None = None
    container: None = None


class OriginalTokens(Shape):
    """Tokens of a prompt before the edits of its context."""

    original_input_tokens: int


class TokenCount(Shape):
    """Tokens of a prompt."""

    input_tokens: int
    context_management: OriginalTokens | UnsetType = UNSET


class _AnthropicErrors(ErrorShape):
    """The error format of this protocol."""

    kind = AnthropicError

    def status(self, failure: Failure) -> int:
        """The status of the provider: 529 if the server has no capacity, and 429 for the limits of a key."""
        return OVERLOADED if failure.status == 503 or failure.code == "queue_full" else failure.status

    def whole(self, failure: Failure) -> bytes:
        """The error object."""
        status = self.status(failure)
        other = "invalid_request_error" if status < 500 else "api_error"
        error = AnthropicErrorDetail(_ERROR_TYPES.get(status, other), failure.message)
        return encode(AnthropicError(error=error, request_id=request_id_var.get()))

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

    def value(self, shows_thinking: bool = True) -> Block:
        """The block as the message shows it."""
        text = "".join(self._texts)
        if self.kind == "text":
            return TextBlock(text)
        if self.kind == "thinking":
            return ThinkingBlock(text if shows_thinking else "", REASONING.sealed(text))
        return ToolUseBlock(self.call_id, self.name, input_of(text))

    def opening(self) -> Block:
        """The block as its first event shows it."""
        if self.kind == "tool_use":
            return ToolUseBlock(self.call_id, self.name, {})
        return ThinkingBlock("", "") if self.kind == "thinking" else TextBlock("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Showing:
    """Which parts of the answer a message shows."""

    thoughts: bool = True
    """Whether there are blocks of thinking."""
    thinking: bool = True
    """Whether these have their text."""
    anything: bool = True
    """False for a request that only computes its prompt into the cache."""
    length_reason: StopReason = "max_tokens"
    """The reason to stop of an answer that reached its length."""
    context_management: bool = False
    """Whether the message says which edits of its context were applied."""


class MessageAnswer:
    """Builds one message. Add every piece with `piece` or `push`, then call `end` or `whole`."""

    def __init__(
        self, message_id: str, model: str, num_prompt_tokens: int, num_id_chars: int, showing: Showing
    ) -> None:
        """`num_id_chars` is the length of the ids of calls."""
        self._message_id = message_id
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._num_id_chars = num_id_chars
        self._showing = showing
        self._begun = False
        self._open: _Block | None = None
        self._blocks: list[Block] = []
        self._ending: Ending | None = None

    def piece(self, index: int, piece: ChatPiece) -> bytes:
        """Events for a piece."""
        events = b""
        if not self._begun:
            self._begun = True
            message = self._message(Usage(self._num_prompt_tokens, 0, piece.num_cached_tokens))
            events = _event("message_start", message=message) + PING
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
        edits = {"context_management": AppliedEdits()} if self._showing.context_management else {}
        events = _event("message_delta", delta=self._stop(), usage=MessageTokens(**self._tokens(usage)), **edits)
        return events + _event("message_stop")

    def whole(self, usage: Usage) -> bytes:
        """The body of the answer."""
        message = self._message(usage)
        stop = self._stop()
        message.content = self._blocks
        message.stop_reason = stop.stop_reason
        message.stop_sequence = stop.stop_sequence
        if self._showing.context_management:
            message.context_management = AppliedEdits()
        return encode(message)

    def _message(self, usage: Usage) -> Message:
        """The message as it begins."""
        return Message(id=self._message_id, model=self._model, content=[], usage=MessageUsage(**self._tokens(usage)))

    def _tokens(self, usage: Usage) -> dict[str, Any]:
        """The usage so far. It excludes the token that a worker samples only to compute a prompt."""
        return {
            "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
            "cache_read_input_tokens": usage.num_cached_tokens,
            "output_tokens": usage.num_generated_tokens if self._showing.anything else 0,
            "output_tokens_details": ThinkingTokens(usage.num_reasoning_tokens),
        }

    def _stop(self) -> MessageEnd:
        assert self._ending is not None
        reason: StopReason = "end_turn"
        sequence = None
        if self._ending.reason == "length" or not self._showing.anything:
            reason = self._showing.length_reason
        elif isinstance(self._ending.stop_reason, str):
            reason = "stop_sequence"
            sequence = self._ending.stop_reason
        elif any(isinstance(block, ToolUseBlock) for block in self._blocks):
            reason = "tool_use"
        return MessageEnd(reason, sequence)

    def _delta(self, delta: Delta) -> bytes:
        match delta:
            case ReasoningDelta() if not self._showing.thoughts:
                return b""
            case ReasoningDelta(text):
                opening = self._into("thinking")
                more = self._text(text)
                return opening + more if self._showing.thinking else opening
            case ContentDelta(text):
                return self._into("text") + self._text(text)
            case CallDelta(_, name):
                call_id = new_call_id(self._num_id_chars).replace("call_", "toolu_")
                return self._close() + self._add(_Block("tool_use", call_id, name))
            case ArgumentsDelta(_, text):
                return self._text(text)

    def _into(self, kind: str) -> bytes:
        """Open a block of this kind, unless the open block is of this kind. Returns the events."""
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
        if isinstance(value, ThinkingBlock):
            events += self._block_delta({"type": "signature_delta", "signature": value.signature})
        events += _event("content_block_stop", index=len(self._blocks))
        self._blocks.append(value)
        return events


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))
