"""Bodies of the Messages API, decoded, checked and translated to chats (pure). docs/protocol.md has every field.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.gateway.anthropic.turns import Turn, system_turn, turns_of
from headrace.gateway.chat.conversation import can_switch_reasoning
from headrace.gateway.chat.request import AnswerFields, Chat
from headrace.gateway.chat_fields import lacking
from headrace.gateway.checks import check_range, invalid, is_one_of, unsupported
from headrace.gateway.field_names import FieldNames, messages_at
from headrace.gateway.fields import FieldTable
from headrace.gateway.text.chat_template import ChatTemplate

MIN_BUDGET_TOKENS = 1024
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
    """The end user, which has no effect here."""

    user_id: str | None = None


class PromptFields(msgspec.Struct, kw_only=True):
    """The fields of a prompt; body of POST /v1/messages/count_tokens. Fields of type Any are not supported."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    container: Any = None
    context_management: Any = None
    mcp_servers: Any = None
    output_format: Any = None
    speed: Any = None


class MessagesRequest(PromptFields, kw_only=True):
    """Body of POST /v1/messages, without the `AnswerFields` in it: a msgspec struct has a single base."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    request_id: str | None = None

    diagnostics: Any = None
    fallbacks: Any = None
    inference_geo: Any = None


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "output_format": (),
    "speed": ("standard",),
}
_NEUTRAL_ANSWER: dict[str, tuple[Any, ...]] = {"diagnostics": (), "fallbacks": ([],), "inference_geo": ()}
FIELDS = FieldTable(
    "POST /v1/messages",
    (MessagesRequest, AnswerFields),
    lacking(
        (MessagesRequest, AnswerFields),
        {
            "max_completion_tokens": "use max_tokens",
            "stop": "use stop_sequences",
            "response_format": "use output_config.format",
            "reasoning_effort": "use output_config.effort",
            "enable_thinking": "use thinking",
            "include_reasoning": "use thinking.display",
            "continue_final_message": "end messages with a turn of the assistant",
            "parallel_tool_calls": "use tool_choice.disable_parallel_tool_use",
            "stream_options": "leave it out",
            "prompt_cache_key": "leave it out",
        },
    ),
)
_INSTEAD = {"output_format": "use output_config.format"}


def check_messages(request: PromptFields) -> None:
    """Raise `StatusError` for unsupported or contradictory fields. The chat's checks do the rest."""
    _refuse_unless_neutral(request, _NEUTRAL)
    if isinstance(request, MessagesRequest):
        _refuse_unless_neutral(request, _NEUTRAL_ANSWER)
        if request.service_tier not in (None, "auto", "standard_only"):
            raise invalid("service_tier", "service_tier must be auto or standard_only")
    thinking = request.thinking
    if thinking is not None:
        if thinking.type not in ("enabled", "adaptive", "disabled"):
            raise unsupported("thinking.type", "thinking.type must be enabled, adaptive or disabled")
        if thinking.display not in (None, "omitted"):
            raise unsupported("thinking.display", "thinking.display may only be omitted: there are no summaries")
        _check_budget(thinking, request)
    effort = None if request.output_config is None else request.output_config.effort
    if effort is not None and effort not in _EFFORTS:
        raise invalid("output_config.effort", f"output_config.effort must be one of {', '.join(_EFFORTS)}")


def _refuse_unless_neutral(request: PromptFields, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    for name, values in neutral.items():
        value = getattr(request, name)
        if value is not None and not is_one_of(value, values):
            raise unsupported(name, f"{name} is not supported; {_INSTEAD.get(name, 'leave it out')}")


def _check_budget(thinking: Thinking, request: PromptFields) -> None:
    if thinking.type != "enabled":
        if thinking.budget_tokens is not None:
            raise invalid("thinking.budget_tokens", "thinking.budget_tokens needs thinking.type to be enabled")
        return
    if thinking.budget_tokens is None:
        raise invalid("thinking.budget_tokens", "thinking.budget_tokens is required")
    check_range("thinking.budget_tokens", thinking.budget_tokens, MIN_BUDGET_TOKENS, 2**31 - 1)
    if isinstance(request, MessagesRequest) and thinking.budget_tokens >= request.max_tokens:
        raise invalid("thinking.budget_tokens", "thinking.budget_tokens must be less than max_tokens")


def effort_of(request: PromptFields, template: ChatTemplate, reasons: bool) -> str | None:
    """The reasoning effort for a model in a checked request; None if the model's default is the requested behaviour.

    `reasons` is whether the format of the model's reasoning is known. Raises `StatusError` if the model cannot do it.
    """
    effort = None if request.output_config is None else request.output_config.effort
    thinking = request.thinking
    if thinking is None:
        return None if effort is None else _EFFORTS[effort]
    can_switch = can_switch_reasoning(template)
    if thinking.type == "disabled":
        if not can_switch and reasons:
            raise unsupported("thinking", "thinking cannot be disabled: the model's chat template has no switch for it")
        return "none" if can_switch else None
    if not can_switch and not reasons:
        raise unsupported("thinking", "thinking is not supported: the model does not reason; leave it out")
    if effort is not None:
        return _EFFORTS[effort]
    if not can_switch:
        return None
    if thinking.budget_tokens is None:
        return "medium"
    return next((name for most, name in _BUDGETS if thinking.budget_tokens <= most), "high")


def chat_of(request: PromptFields, effort: str | None, answer: AnswerFields | None = None) -> tuple[Chat, FieldNames]:
    """The chat of a checked request, and the names of its fields. Raises `StatusError`.

    `answer` has the other fields of the body of a `MessagesRequest`, if it is one.
    """
    turns = turns_of(request.messages)
    goes_on = turns[-1].message.role == "assistant"
    if goes_on and turns[-1].message.tool_calls:
        field = f"messages[{len(request.messages) - 1}]"
        raise invalid(field, f"{field}: a tool_use must be followed by its tool_result")
    if request.system is not None:
        turns.insert(0, system_turn(request.system))
    tools = [_chat_tool(i, tool) for i, tool in enumerate(request.tools or ())]
    choice, parallel = _chat_tool_choice(request.tool_choice)
    chat = Chat(
        messages=[turn.message for turn in turns],
        model=request.model,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=parallel if tools else None,
        reasoning_effort=effort,
        response_format=_response_format(request.output_config),
        continue_final_message=goes_on or None,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    if isinstance(request, MessagesRequest):
        chat.max_tokens = request.max_tokens
        chat.stop = request.stop_sequences
    if answer is not None:
        for name in AnswerFields.__struct_fields__:
            setattr(chat, name, getattr(answer, name))
    return chat, _names(turns)


def _names(turns: Sequence[Turn]) -> FieldNames:
    return FieldNames(
        [
            messages_at([turn.place for turn in turns], r"(?:\.\w+)?"),
            ("stop", "stop_sequences"),
            ("reasoning_effort", "output_config.effort"),
            (r"response_format\.json_schema", "output_config.format"),
            ("response_format", "output_config.format"),
            (r"(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
            (r"(tools\[\d+\])\.function", r"\1"),
        ]
    )


# field of a tool -> values besides null that have no effect here
_NEUTRAL_TOOL: dict[str, tuple[Any, ...]] = {
    "input_examples": ([],),
    "defer_loading": (False,),
    "allowed_callers": (["direct"],),
}


def _chat_tool(position: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    where = f"tools[{position}]"
    kind = tool.get("type")
    if kind not in (None, "custom"):
        named = f"'{kind[:64]}'" if isinstance(kind, str) else "no name"
        raise unsupported(f"{where}.type", f"{where}.type: there is no built-in {named} here; only custom tools are")
    for name, values in _NEUTRAL_TOOL.items():
        if tool.get(name) is not None and not is_one_of(tool[name], values):
            raise unsupported(f"{where}.{name}", f"{where}.{name} is not supported; leave it out")
    if not isinstance(tool.get("input_schema"), dict):
        raise invalid(f"{where}.input_schema", f"{where}.input_schema must be a JSON schema, an object")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


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


def _response_format(config: OutputConfig | None) -> dict[str, Any] | None:
    if config is None or config.format is None:
        return None
    if config.format.get("type") != "json_schema" or "schema" not in config.format:
        raise invalid("output_config.format", "output_config.format must have the type json_schema and a schema")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": config.format["schema"]}}
