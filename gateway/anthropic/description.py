"""The operations of this protocol, for the OpenAPI document (pure)."""

from __future__ import annotations

from headrace.gateway.anthropic import answers
from headrace.gateway.anthropic.types import MessagesRequest, PromptFields
from headrace.gateway.chat.request import AnswerFields
from headrace.gateway.edge.description import API, Operation

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/messages",
        "Answer in the manner of Anthropic's Messages API",
        answers.Message,
        (MessagesRequest, AnswerFields),
        is_streamed=True,
        prefixes=API,
        error=answers.AnthropicError,
    ),
    Operation(
        "POST",
        "/messages/count_tokens",
        "Count the tokens of a prompt of the Messages API",
        answers.TokenCount,
        (PromptFields,),
        prefixes=API,
        error=answers.AnthropicError,
    ),
)
"""All operations."""
