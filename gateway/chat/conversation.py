"""The messages of a chat, in the shape that the model's template takes (pure)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.gateway.chat.plain_tools import as_text, takes_tools, with_block
from headrace.gateway.chat.prompts import Conversation
from headrace.gateway.chat.request import Chat, ChatMessage, Tokenization
from headrace.gateway.checks import invalid, json_of, unsupported
from headrace.gateway.text.chat_template import ChatTemplate

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh"})
# Variables that turn reasoning on and off in templates without an effort.
_SWITCHES = ("enable_thinking", "thinking")


class Arguments(dict[str, Any]):
    """Arguments of a call in a conversation: an object, which becomes JSON text where a template adds it to a text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def conversation_of(
    request: Chat | Tokenization,
    template: ChatTemplate,
    tools: Sequence[Mapping[str, Any]] = (),
    reasons: bool = False,
) -> Conversation:
    """The conversation of a request, in the shape that this template takes. Raises `StatusError`.

    `reasons`: whether the model's format of reasoning is known.
    """
    if not request.messages:
        raise invalid("messages", "messages must not be empty")
    goes_on = bool(request.continue_final_message)
    if goes_on and request.add_generation_prompt:
        raise invalid("continue_final_message", "continue_final_message and add_generation_prompt exclude each other")
    variables = dict(request.chat_template_kwargs or {})
    if isinstance(request, Chat) and request.reasoning_effort is not None:
        variables = {**_effort(request.reasoning_effort, template, reasons), **variables}
    if isinstance(request, Chat) and request.verbosity is not None and template.uses("verbosity"):
        variables = {"verbosity": request.verbosity, **variables}
    messages = [_template_message(i, message, template) for i, message in enumerate(request.messages)]
    lists_tools = takes_tools(template)
    if not template.mentions("tool_calls") or (tools and not lists_tools):
        messages = as_text(messages)
    if tools and not lists_tools:
        messages, tools = with_block(messages, tools, template), ()
    elif tools and not template.uses("tools"):
        messages = _with_tools(messages, tools)
    return Conversation(
        messages=messages,
        tools=tools,
        add_generation_prompt=not goes_on and request.add_generation_prompt is not False,
        continue_final_message=goes_on,
        variables=variables,
        add_special_tokens=bool(request.add_special_tokens),
    )


def can_switch_reasoning(template: ChatTemplate) -> bool:
    """Whether a template reads any variable for the effort of reasoning."""
    return any(template.uses(name) for name in ("reasoning_effort", *_SWITCHES))


def _effort(effort: str, template: ChatTemplate, reasons: bool) -> dict[str, Any]:
    """The template's variables for an effort. For a model that does not reason, all efforts are the same."""
    if effort not in _EFFORTS:
        raise invalid("reasoning_effort", f"reasoning_effort must be one of {', '.join(sorted(_EFFORTS))}")
    if template.uses("reasoning_effort"):
        return {"reasoning_effort": effort}
    for switch in _SWITCHES:
        if template.uses(switch):
            return {switch: effort != "none"}
    if reasons:
        raise unsupported("reasoning_effort", "reasoning_effort is not supported: the model's template has none")
    return {}


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the tools in the system message, where templates such as that of Phi 4 mini expect them."""
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return [{**messages[0], "tools": functions}, *messages[1:]]


def _template_message(position: int, message: ChatMessage, template: ChatTemplate) -> dict[str, Any]:
    where = f"messages[{position}]"
    if message.role not in _ROLES:
        raise invalid(f"{where}.role", f"{where}.role must be one of {', '.join(sorted(_ROLES))}")
    for name in ("function_call", "audio"):
        if getattr(message, name) is not None:
            raise unsupported(f"{where}.{name}", f"{where}.{name} is not supported")
    role = message.role
    if role == "developer" and not template.mentions("developer"):
        role = "system"
    if message.content is None and not (role == "assistant" and message.tool_calls):
        raise invalid(f"{where}.content", f"{where}.content is required")
    content: str | None = _text_of(where, message.content)
    if message.content is None and template.mentions("is not none"):
        content = None
    values: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            values[name] = value
    if message.reasoning_content and not template.mentions("reasoning_content") and template.mentions(".thinking"):
        values["thinking"] = message.reasoning_content
    if message.tool_calls:
        values["tool_calls"] = [_tool_call(f"{where}.tool_calls[{i}]", c) for i, c in enumerate(message.tool_calls)]
    return values


def _text_of(where: str, content: str | list[dict[str, Any]] | None) -> str:
    """The text of a message: parts are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        kind, text = part.get("type"), part.get("text")
        if kind != "text":
            raise unsupported(
                f"{where}.content[{i}].type", f"{where}.content[{i}]: only parts of type text are supported"
            )
        if not isinstance(text, str):
            raise invalid(f"{where}.content[{i}].text", f"{where}.content[{i}].text must be a text")
        texts.append(text)
    return "\n".join(texts)


def _tool_call(where: str, call: dict[str, Any]) -> dict[str, Any]:
    """A tool call as templates expect it: the arguments as an object, not as JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{where}.function", f"{where}.function needs a name and arguments")
    if call.get("type") not in (None, "function"):
        raise unsupported(f"{where}.type", f"{where}.type may only be function")
    if not isinstance(call.get("id"), str | None):
        raise invalid(f"{where}.id", f"{where}.id must be a text")
    arguments, name = function.get("arguments"), f"{where}.function.arguments"
    if isinstance(arguments, str):
        arguments = json_of(name, arguments or "{}")
    elif not isinstance(arguments, dict | None):
        raise invalid(name, f"{name} must be a JSON object, or its text")
    if isinstance(arguments, dict):
        arguments = Arguments(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
