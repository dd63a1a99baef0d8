"""The types of answers of the Messages API, for the OpenAPI document.

Real answers are written from prepared bytes; tests compare them with these types.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.gateway.edge.wire import Shape


class AnthropicErrorDetail(Shape):
    """The type and message of an error."""

    type: str
    message: str


class AnthropicError(Shape):
    """The error format of Anthropic's protocol."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class Message(Shape):
    """An answer in Anthropic's protocol."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    stop_details: None
    container: None
    diagnostics: None
    usage: dict[str, Any]
    context_management: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class TokenCount(Shape):
    """Tokens of a prompt."""

    input_tokens: int
    context_management: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
