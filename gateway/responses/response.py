"""The response of the Responses API and the events of its stream: encoded, stored, and described in the OpenAPI
document."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from headrace.gateway.chat.logprobs import ChosenToken
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
    """Prompt tokens that were cached. Those written to a cache are not counted, because every prompt is cached. Prompt
    tokens that stand for images, if there are any."""

    cached_tokens: int
    cache_write_tokens: int = 0
    image_tokens: int | UnsetType = UNSET


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
    """The reasoning of the model. It has no summary, because the reasoning is shown in full."""

    effort: str | None
    summary: None = None


class ResponseText(Shape):
    """The format of the answer's text."""

    format: dict[str, Any]
    verbosity: str


class OutputText(Shape, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[ChosenToken]


class ReasoningText(Shape, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of a reasoning."""

    text: str


class ReasoningItem(Shape, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought before it answered."""

    id: str
    status: Status
    summary: list[Any] = msgspec.field(default_factory=list)
    content: list[ReasoningText]
    encrypted_content: str | UnsetType = UNSET


class MessageItem(Shape, kw_only=True, tag_field="type", tag="message"):
    """A text for the caller."""

    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class FunctionCall(Shape, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function, with its arguments as JSON text."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomToolCall(Shape, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a tool that takes a text."""

    id: str
    status: Status
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


class CompactionItem(Shape, kw_only=True, tag_field="type", tag="compaction"):
    """The summary of a conversation, in an opaque form."""

    id: str
    encrypted_content: str


class McpListedTool(Shape, kw_only=True):
    """A tool of an MCP server."""

    name: str
    description: str | None
    input_schema: dict[str, Any]
    annotations: dict[str, Any] | None


class McpListTools(Shape, kw_only=True, tag_field="type", tag="mcp_list_tools"):
    """The tools of an MCP server, as they were when the response was created."""

    id: str
    server_label: str
    tools: list[McpListedTool]
    error: str | None = None


class McpProtocolError(Shape, kw_only=True, tag_field="type", tag="mcp_protocol_error"):
    """The call failed before the tool ran, or its result was lost."""

    code: int
    message: str


class McpHttpError(Shape, kw_only=True, tag_field="type", tag="http_error"):
    """The MCP server refused the call with a status of HTTP."""

    code: int
    message: str


class McpToolExecutionError(Shape, kw_only=True, tag_field="type", tag="mcp_tool_execution_error"):
    """The tool ran and failed; what it said."""

    content: list[Any]


class McpCall(Shape, kw_only=True, tag_field="type", tag="mcp_call"):
    """A call of a tool of an MCP server, with its output once it has ended."""

    id: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: McpProtocolError | McpHttpError | McpToolExecutionError | None = None
    approval_request_id: str | None = None


class McpApprovalRequest(Shape, kw_only=True, tag_field="type", tag="mcp_approval_request"):
    """A call that waits until the caller approves it."""

    id: str
    server_label: str
    name: str
    arguments: str


Item: TypeAlias = (
    ReasoningItem
    | MessageItem
    | FunctionCall
    | CustomToolCall
    | CompactionItem
    | McpListTools
    | McpCall
    | McpApprovalRequest
)


class ConversationName(Shape):
    """The conversation that a response belongs to."""

    id: str


class Response(Shape, kw_only=True):
    """A response of the Responses API."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status = "in_progress"
    background: bool
    completed_at: int | None = None
    conversation: ConversationName | None = None
    error: ResponseError | None = None
    frequency_penalty: float
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
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

    def output_values(self) -> list[dict[str, Any]]:
        """The output as items of an input."""
        return [msgspec.to_builtins(item) for item in self.output]


class ResponseEvent(Shape, kw_only=True):
    """An event of a stream. Its type says which fields it has."""

    type: str
    sequence_number: int = 0
    response: Response | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[ChosenToken] | UnsetType = UNSET
    obfuscation: str | UnsetType = UNSET


class InputTokens(Shape, kw_only=True):
    """The number of tokens in the prompt of a response."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(Shape, kw_only=True):
    """The answer to a deletion."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemPage(Shape, kw_only=True):
    """A page of items."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Conversation(Shape, kw_only=True):
    """A conversation that responses add to."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(Shape, kw_only=True):
    """The answer to the deletion of a conversation."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


class CompactedResponse(Shape, kw_only=True):
    """A compacted conversation: its output is the beginning of the next input."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[dict[str, Any]]
    """Messages of user, system and developer, and the summary."""
    usage: ResponseUsage
