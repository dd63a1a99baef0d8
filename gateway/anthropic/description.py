"""The operations of this protocol, for the OpenAPI document (pure)."""

from __future__ import annotations

from headrace.gateway.anthropic import answer_types
from headrace.gateway.anthropic.types import MessagesRequest, PromptFields
from headrace.gateway.chat.request import AnswerFields
from headrace.gateway.edge.description import API, Operation

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/messages",
        "Answer in the manner of Anthropic's Messages API",
        answer_types.Message,
        (MessagesRequest, AnswerFields),
        is_streamed=True,
        prefixes=API,
        error=answer_types.AnthropicError,
    ),
    Operation(
        "POST",
        "/messages/count_tokens",
        "Count the tokens of a prompt of the Messages API",
        answer_types.TokenCount,
        (PromptFields,),
        prefixes=API,
        error=answer_types.AnthropicError,
    ),
)
"""All operations."""
