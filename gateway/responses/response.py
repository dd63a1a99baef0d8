"""The response of the Responses API: encoded, stored, and described in the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from headrace.gateway.edge.wire import Shape

Status: TypeAlias = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseError(Shape):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Shape):
    """Why a response is not whole."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(Shape):
    """Prompt tokens that were cached. Those written to a cache are not counted, because every prompt is cached."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Shape):
    """Tokens of reasoning among those of the answer."""

    reasoning_tokens: int


class ResponseUsage(Shape):
    """The usage of a response, in tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseReasoning(Shape):
    """How the model reasoned. There are no summaries, because reasoning is shown in full."""

    effort: str | None
    summary: None = None


class ResponseText(Shape):
    """The format of the answer's text."""

    format: dict[str, Any]
    verbosity: str


class Response(Shape, kw_only=True):
    """A response of the Responses API. Its `output` has items of the kinds reasoning, message, function_call and
    custom_tool_call."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status = "in_progress"
    background: bool
    completed_at: int | None = None
    error: ResponseError | None = None
    frequency_penalty: float
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None


class DeletedResponse(Shape, kw_only=True):
    """The answer to a deletion."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItems(Shape, kw_only=True):
    """A page of the input items of a response."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
