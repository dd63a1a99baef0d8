"""What answers of the Messages API look like, for the OpenAPI document. Tests hold real answers to these types.

Answers are written from prepared bytes and not from these; a field that is not here is in no answer.
"""

from __future__ import annotations

from typing import Any, Literal

from headrace.gateway.edge.description import Shape


class AnthropicErrorDetail(Shape):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(Shape):
    """The shape of failures in Anthropic's protocol."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class Message(Shape):
    """An answer in Anthropic's protocol."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    stop_details: None
    container: None
    diagnostics: None
    usage: dict[str, Any]


class TokenCount(Shape):
    """Tokens of a prompt."""

    input_tokens: int
