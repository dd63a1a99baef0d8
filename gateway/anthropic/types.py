"""Bodies of the Messages API, decoded, checked and translated to chats (pure).

Every field: docs/reference/http-api.md. https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.gateway.anthropic.tools import Catalogue
from headrace.gateway.anthropic.turns import Turn, turns_of
from headrace.gateway.chat.conversation import can_switch_reasoning
from headrace.gateway.chat.request import AnswerFields, Chat
from headrace.gateway.checks import check_range, invalid, unsupported
from headrace.gateway.edge.wire import convert
from headrace.gateway.field_names import FieldNames, messages_at
from headrace.gateway.hints import ignored
from headrace.gateway.text.chat_template import ChatTemplate

MIN_BUDGET_TOKENS = 1024
_THINKING = ("enabled", "adaptive", "disabled", "between_tools")
_DISPLAYS = ("summarized", "omitted", "updates")
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
# Up to this budget of reasoning, this effort; more is high.
_BUDGETS = ((4096, "low"), (16384, "medium"))


class OutputConfig(msgspec.Struct, kw_only=True):
    """The format of the answer, and the effort of reasoning."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether to reason."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class Metadata(msgspec.Struct, kw_only=True):
    """The end user, which has no effect here. Other members are taken, too."""

    user_id: str | None = None


class PromptFields(msgspec.Struct, kw_only=True):
    """The fields of a prompt; body of POST /v1/messages/count_tokens."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(PromptFields, kw_only=True):
    """Body of POST /v1/messages, without the `AnswerFields` in it: a msgspec struct has a single base."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    request_id: str | None = None


def check_messages(request: PromptFields, *, interleaves: bool = False) -> None:
    """Raise `StatusError` for unsupported or contradictory fields. The chat's checks do the rest.

    `interleaves`: the caller thinks between tool calls, and a budget is then one of several answers.
    """
    thinking = request.thinking
    if thinking is not None:
        if thinking.type not in _THINKING:
            raise unsupported("thinking.type", f"thinking.type must be one of {', '.join(_THINKING)}")
        if thinking.display not in (None, *_DISPLAYS):
            raise unsupported("thinking.display", f"thinking.display must be one of {', '.join(_DISPLAYS)}")
        _check_budget(thinking, request, interleaves)
    for field, config in (("output_config", request.output_config), *_configs_of_turns(request)):
        if config is None:
            continue
        if config.effort is not None and config.effort not in _EFFORTS:
            raise invalid(f"{field}.effort", f"{field}.effort must be one of {', '.join(_EFFORTS)}")
    if request.output_format is not None and request.output_config is not None and request.output_config.format:
        raise invalid("output_format", "output_format is the earlier name of output_config.format; leave it out")


def _configs_of_turns(request: PromptFields) -> Sequence[tuple[str, OutputConfig]]:
    """The settings that turns of the system bring, with their places."""
    found = []
    for position, message in enumerate(request.messages):
        if message.get("role") == "system" and message.get("output_config") is not None:
            name = f"messages[{position}].output_config"
            found.append((name, convert(message["output_config"], OutputConfig, name)))
    return found


def _check_budget(thinking: Thinking, request: PromptFields, interleaves: bool) -> None:
    if thinking.type != "enabled":
        if thinking.budget_tokens is not None:
            raise invalid("thinking.budget_tokens", "thinking.budget_tokens needs thinking.type to be enabled")
        return
    if thinking.budget_tokens is None:
        raise invalid("thinking.budget_tokens", "thinking.budget_tokens is required")
    check_range("thinking.budget_tokens", thinking.budget_tokens, MIN_BUDGET_TOKENS, 2**31 - 1)
    if isinstance(request, MessagesRequest) and not interleaves and thinking.budget_tokens >= request.max_tokens:
        raise invalid("thinking.budget_tokens", "`max_tokens` must be greater than `thinking.budget_tokens`")


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How a model reasons for a request."""

    effort: str | None
    """The chat's effort; None if the model's default is the requested behaviour."""
    is_shown: bool = True
    """Whether thoughts are part of the answer."""


def reasoning_of(request: PromptFields, template: ChatTemplate, reasons: bool) -> Reasoning:
    """How a model reasons for a checked request. Notes as a hint what the model cannot do.

    `reasons` is whether the format of the model's reasoning is known.
    """
    effort = None if request.output_config is None else request.output_config.effort
    # A setting of a turn is for the answer to that turn.
    last_answer = max((i for i, one in enumerate(request.messages) if one.get("role") == "assistant"), default=-1)
    for field, config in _configs_of_turns(request):
        if config.effort is not None and int(field[len("messages[") : field.index("]")]) > last_answer:
            effort = config.effort
    thinking = request.thinking
    can_switch = can_switch_reasoning(template)
    if not can_switch:
        if effort is not None:
            ignored("output_config.effort", f"the model {'always reasons' if reasons else 'does not reason'}")
        if thinking is not None and thinking.type == "disabled" and reasons:
            ignored("thinking", "the model always reasons, so that its thoughts are left out of the answer")
            return Reasoning(None, is_shown=False)
        if thinking is not None and thinking.type != "disabled" and not reasons:
            ignored("thinking", "the model does not reason")
        return Reasoning(None)
    if thinking is None:
        return Reasoning(None if effort is None else _EFFORTS[effort])
    if thinking.type == "disabled":
        return Reasoning("none", is_shown=False)
    if effort is not None:
        return Reasoning(_EFFORTS[effort])
    if thinking.budget_tokens is None:
        return Reasoning("medium")
    return Reasoning(next((name for most, name in _BUDGETS if thinking.budget_tokens <= most), "high"))


def chat_of(
    request: PromptFields, effort: str | None, answer: AnswerFields | None = None, *, reasons: bool = True
) -> tuple[Chat, FieldNames]:
    """The chat of a checked request, and the names of its fields. Raises `StatusError`.

    `reasons` is whether the model does; otherwise its `thinking` is a hint, and has no budget. `answer` has the other
    fields of the body of a `MessagesRequest`, if it is one.
    """
    catalogue = Catalogue(request.tools or ())
    choice, parallel = _chat_tool_choice(request.tool_choice)
    if isinstance(choice, dict):
        catalogue.name(choice["function"]["name"])
    turns = turns_of(request.messages, request.system, catalogue)
    goes_on = turns[-1].message.role == "assistant"
    if goes_on and turns[-1].message.tool_calls:
        field = f"messages[{len(request.messages) - 1}]"
        # Clients find the cause by these words of the provider.
        problem = "`tool_use` ids were found without `tool_result` blocks immediately after"
        raise invalid(field, f"{field}: {problem}; each `tool_use` needs its `tool_result` in the next message")
    tools = catalogue.offered()
    chat = Chat(
        messages=[turn.message for turn in turns],
        model=request.model,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=parallel if tools else None,
        reasoning_effort=effort,
        response_format=_response_format(request),
        continue_final_message=goes_on or None,
        chat_template=request.chat_template,
        chat_template_kwargs=request.chat_template_kwargs,
        thinking_token_budget=request.thinking.budget_tokens if request.thinking is not None and reasons else None,
    )
    if isinstance(request, MessagesRequest):
        # A worker computes a prompt only in order to sample a token.
        chat.max_tokens = request.max_tokens or 1
        chat.stop = request.stop_sequences
    if answer is not None:
        for name in AnswerFields.__struct_fields__:
            setattr(chat, name, getattr(answer, name))
    return chat, _names(turns, catalogue.places())


def _names(turns: Sequence[Turn], tools: Sequence[str]) -> FieldNames:
    def part(found: re.Match[str]) -> str:
        number = int(found[1])
        position = int(found[2])
        if number >= len(turns):
            return found[0]
        turn = turns[number]
        return turn.images[position] if position < len(turn.images) else turn.place

    def tool(found: re.Match[str]) -> str:
        number = int(found[1])
        member = found[2] or ""
        place = tools[number] if number < len(tools) else f"tools[{number}]"
        return place + member.replace(".function", "").replace(".parameters", ".input_schema")

    return FieldNames(
        [
            (r"messages\[(\d{1,9})\]\.content\[(\d{1,9})\]", part),
            messages_at([turn.place for turn in turns], r"(?:\.\w+)?"),
            (r"messages\.content\.image", "tool_result.image"),
            ("stop", "stop_sequences"),
            ("reasoning_effort", "output_config.effort"),
            ("thinking_token_budget", "thinking.budget_tokens"),
            (r"response_format\.json_schema", "output_config.format"),
            ("response_format", "output_config.format"),
            (r"tools\[(\d{1,9})\](\.function\.parameters|\.function)?", tool),
        ]
    )


def _chat_tool_choice(choice: Mapping[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """The choice as a chat has it, and whether there may be several calls."""
    if choice is None:
        return None, None
    single = choice.get("disable_parallel_tool_use")
    if single is not None and not isinstance(single, bool):
        raise invalid("tool_choice.disable_parallel_tool_use", "disable_parallel_tool_use must be true or false")
    parallel = None if single is None else not single
    kind = choice.get("type")
    if kind == "tool":
        if not isinstance(choice.get("name"), str):
            raise invalid("tool_choice.name", "tool_choice.name is required")
        return {"type": "function", "function": {"name": choice["name"]}}, parallel
    known = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in known:
        raise invalid("tool_choice.type", "tool_choice.type must be auto, any, tool or none")
    return known[kind], parallel


def _response_format(request: PromptFields) -> dict[str, Any] | None:
    name = "output_format"
    wanted = request.output_format
    if request.output_config is not None and request.output_config.format is not None:
        name = "output_config.format"
        wanted = request.output_config.format
    if wanted is None:
        return None
    if wanted.get("type") != "json_schema" or "schema" not in wanted:
        raise invalid(name, f"{name} must have the type json_schema and a schema")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted["schema"]}}
