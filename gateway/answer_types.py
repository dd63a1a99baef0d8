"""What answers over HTTP look like, for the OpenAPI document. Tests hold real answers to these types.

Answers are written from prepared bytes and not from these; a field that is not here is in no answer.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class _Shape(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fields with a default may be missing."""


class ErrorDetail(_Shape):
    """What went wrong. `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Shape):
    """The one shape of all failures."""

    error: ErrorDetail


class PromptTokensDetails(_Shape):
    """Of the tokens of the prompts, those that were found in a prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(_Shape):
    """Of the generated tokens, those of reasoning."""

    reasoning_tokens: int


class Usage(_Shape):
    """The account of a request, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TokenLogprob(_Shape):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenTokenLogprob(TokenLogprob):
    """A token of the answer, and the most probable ones at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Shape):
    """Log-probabilities of a chat's choice."""

    content: list[ChosenTokenLogprob]
    refusal: None


class PromptTokenLogprob(_Shape):
    """A possible token of the prompt, by its id."""

    logprob: float
    rank: int
    decoded_token: str


class CalledFunction(_Shape):
    """What is called; arguments are JSON text."""

    name: str
    arguments: str


class ToolCall(_Shape):
    """A call that the caller is to make."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_Shape):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(_Shape):
    """One answer to a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(_Shape):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptTokenLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(_Shape):
    """Parallel lists, with null at the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Shape):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, PromptTokenLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(_Shape):
    """The answer to a completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(_Shape):
    """A model that can be asked for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(_Shape):
    """All of them."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(_Shape):
    """Tokens of a text or a conversation; their texts if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(_Shape):
    """The text of tokens."""

    prompt: str


class Response(msgspec.Struct, kw_only=True):
    """A response of the Responses API, with the fields of OpenAI's besides these."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    usage: dict[str, Any] | None


class DeletedResponse(_Shape):
    """What is left of a response."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(_Shape):
    """A page of what a response answers."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class AnthropicErrorDetail(_Shape):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(_Shape):
    """The shape of failures in Anthropic's protocol."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class Message(_Shape):
    """An answer in Anthropic's protocol."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: dict[str, Any]


class TokenCount(_Shape):
    """Tokens of a prompt."""

    input_tokens: int


class Health(_Shape):
    """The state in a word or two."""

    status: str


class VersionError(_Shape):
    """What is wrong with a version of a model: nothing."""

    error_code: str
    error_message: str


class VersionStatus(_Shape):
    """The state of a version."""

    version: str
    state: str
    status: VersionError


class ModelStatus(_Shape):
    """The versions of a model; here there is one."""

    model_version_status: list[VersionStatus]


Config = dict[str, ModelStatus]
Document = dict[str, Any]
