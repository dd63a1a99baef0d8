"""Bodies of the Responses API, decoded, checked and translated to chats (pure).

Every field: docs/reference/http-api.md. https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from headrace.gateway.chat.request import Chat, ChatMessage, SamplingFields
from headrace.gateway.chat.sampling import MAX_LOGPROBS
from headrace.gateway.chat.thinking import one_budget
from headrace.gateway.checks import check_range, invalid
from headrace.gateway.field_names import FieldNames, messages_at
from headrace.gateway.hints import ignored
from headrace.gateway.responses.items import Turn
from headrace.gateway.responses.tools import Offer

MAX_METADATA_ENTRIES = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512

SUMMARY_TOKENS = 4096
"""The longest summary of a compaction by default; of a short context, a quarter."""

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
_SUMMARIES = ("auto", "concise", "detailed")


class ReasoningFields(msgspec.Struct, kw_only=True):
    """How the model should reason. Summaries are not supported, because the reasoning is shown in full."""

    effort: str | None = None
    max_tokens: int | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class TextFields(msgspec.Struct, kw_only=True):
    """The format of the answer's text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream."""

    include_obfuscation: bool | None = None


class ConversationField(msgspec.Struct):
    """A conversation by its id."""

    id: str


class ResponsesRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/responses. `fields` says what happens to each field."""

    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationField | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    thinking_token_budget: int | None = None
    max_tool_calls: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None
    text: TextFields | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    request_id: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def conversation_id(self) -> str | None:
        """The id of its conversation."""
        return self.conversation.id if isinstance(self.conversation, ConversationField) else self.conversation


class CompactRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/responses/compact."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    tools: list[dict[str, Any]] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None
    max_output_tokens: int | None = None
    chat_template: str | None = None
    request_id: str | None = None

    @property
    def as_response(self) -> ResponsesRequest:
        """The equivalent request for a response about the same conversation."""
        return ResponsesRequest(**msgspec.structs.asdict(self))


class InputTokensRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/responses/input_tokens."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationField | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None
    text: TextFields | None = None
    truncation: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    request_id: str | None = None

    @property
    def as_response(self) -> ResponsesRequest:
        """The equivalent request for a response, whose input is to be counted."""
        return ResponsesRequest(**{name: getattr(self, name) for name in self.__struct_fields__})


class ConversationRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/conversations."""

    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


class ConversationUpdate(msgspec.Struct, kw_only=True):
    """Body of POST /v1/conversations/{id}."""

    metadata: dict[str, str] | None


class ConversationItemsRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/conversations/{id}/items."""

    items: list[dict[str, Any]]


def check_response(request: ResponsesRequest) -> None:
    """Note the hints in a request's fields. Raise `StatusError` for contradictory ones. The chat's checks do the
    rest."""
    check_include(request.include or ())
    if request.conversation is not None and request.previous_response_id is not None:
        raise invalid("conversation", "conversation and previous_response_id exclude each other; send one of them")
    if request.input is None and request.conversation is None:
        raise invalid("input", "input is required")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "stream_options needs stream to be true")
    if request.background and request.store is False:
        raise invalid("background", "background needs store: its response is retrieved later")
    if request.truncation not in (None, "auto", "disabled"):
        raise invalid("truncation", "truncation must be auto or disabled")
    if request.max_tool_calls is not None:
        check_range("max_tool_calls", request.max_tool_calls, 1, 2**31 - 1)
    if request.top_logprobs is not None:
        check_range("top_logprobs", request.top_logprobs, 0, MAX_LOGPROBS)
    reasoning = request.reasoning or ReasoningFields()
    for name in ("summary", "generate_summary"):
        value = getattr(reasoning, name)
        if value not in (None, *_SUMMARIES):
            raise invalid(f"reasoning.{name}", f"reasoning.{name} must be one of {', '.join(_SUMMARIES)}")
        # auto means the best summary that the model offers, and this server offers none.
        if value not in (None, "auto"):
            ignored(f"reasoning.{name}", "reasoning is shown whole, in content")
    if reasoning.context not in (None, "auto"):
        ignored("reasoning.context", "the template decides which earlier reasoning the model sees")
    if reasoning.mode not in (None, "standard"):
        ignored("reasoning.mode", "there is one mode")
    check_metadata(request.metadata)


def check_include(include: Sequence[str]) -> None:
    """Note the parts that answers do not have."""
    for name in include:
        if name not in (LOGPROBS, ENCRYPTED_REASONING):
            ignored(f"include.{name}", "answers have no such part", is_known=False)


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raise `StatusError` for metadata that is too large."""
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA_ENTRIES:
        raise invalid("metadata", f"metadata takes at most {MAX_METADATA_ENTRIES} entries")
    if any(len(key) > MAX_METADATA_KEY_CHARS for key in metadata):
        raise invalid("metadata", f"metadata: a key has at most {MAX_METADATA_KEY_CHARS} characters")
    if any(len(value) > MAX_METADATA_VALUE_CHARS for value in metadata.values()):
        raise invalid("metadata", f"metadata: a value has at most {MAX_METADATA_VALUE_CHARS} characters")


class _WholeAnswerChat(Chat, kw_only=True):
    """A chat that drops turns rather than a part of its answer."""

    shortens_max_tokens: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class ResponseChat:
    """The chat of a response, and the names of its fields."""

    request: Chat
    names: FieldNames


def chat_of(request: ResponsesRequest, turns: Sequence[Turn], offer: Offer, shortens: bool = True) -> ResponseChat:
    """The chat of a checked request about this conversation, with these tools. `shortens` says that its answer may be
    shorter than the request allows, to the room in the context."""
    messages = [turn.message for turn in turns]
    places = [turn.place for turn in turns]
    contents = ["output" if turn.message.role == "tool" else "content" for turn in turns]
    if request.instructions is not None:
        messages.insert(0, ChatMessage(role="developer", content=request.instructions))
        places.insert(0, "instructions")
        contents.insert(0, "content")
    wants_logprobs = LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    reasoning = request.reasoning
    text = request.text or TextFields()
    kind = Chat if shortens else _WholeAnswerChat
    chat = kind(
        messages=messages,
        model=request.model,
        max_completion_tokens=request.max_output_tokens,
        logprobs=wants_logprobs or None,
        top_logprobs=request.top_logprobs if wants_logprobs else None,
        tools=offer.tools or None,
        tool_choice=offer.choice,
        parallel_tool_calls=request.parallel_tool_calls if offer.tools else None,
        reasoning_effort=None if reasoning is None else reasoning.effort,
        thinking_token_budget=one_budget(
            {
                "thinking_token_budget": request.thinking_token_budget,
                "reasoning.max_tokens": None if reasoning is None else reasoning.max_tokens,
            }
        ),
        verbosity=text.verbosity,
        response_format=_response_format(text.format),
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
        **{name: getattr(request, name) for name in SamplingFields.__struct_fields__},
    )
    return ResponseChat(chat, _names(places, contents, offer.places))


def _names(places: Sequence[str], contents: Sequence[str], tools: Sequence[str]) -> FieldNames:
    """The names of this API, for turns and tools that the caller wrote at these places. `contents` are the names of the
    turns' contents."""

    def content_of(found: re.Match[str]) -> str:
        number = int(found[1])
        return f"{places[number]}.{contents[number]}" if number < len(places) else found[0]

    def tool_of(found: re.Match[str]) -> str:
        number = int(found[1])
        return tools[number] if number < len(tools) else found[0]

    return FieldNames(
        [
            (r"messages\[(\d{1,9})\]\.content", content_of),
            messages_at(places),
            (r"tools\[(\d{1,9})\]\.custom\.format\.grammar", lambda found: f"{tool_of(found)}.format"),
            (r"tools\[(\d{1,9})\](?:\.(?:function|custom))?", tool_of),
            (r"tool_choice\.allowed_tools", "tool_choice"),
            ("messages", "input"),
            ("max_completion_tokens", "max_output_tokens"),
            ("reasoning_effort", "reasoning.effort"),
            ("verbosity", "text.verbosity"),
            (r"response_format\.schema", "text.format.schema"),
            (r"response_format\.json_schema", "text.format"),
            ("response_format", "text.format"),
        ]
    )


def _response_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    if value is None or value.get("type") != "json_schema":
        return value
    known = ("name", "description", "schema", "strict")
    return {"type": "json_schema", "json_schema": {name: value[name] for name in known if value.get(name) is not None}}
