"""The messages of a chat, in the shape that the model's template takes (pure)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headrace.gateway.chat_template import ChatTemplate
from headrace.gateway.openai_types import ChatMessage, ChatRequest, TokenizeRequest, unsupported
from headrace.gateway.prompts import Conversation
from headrace.gateway.sampling import invalid

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh"})
# Variables by which templates that know no effort turn reasoning on and off.
_SWITCHES = ("enable_thinking", "thinking")
_TOOLS_IN_MESSAGE = re.compile(r"""['"]tools['"] in \w+""")


class Arguments(dict[str, Any]):
    """Arguments of a call in a conversation: an object, and its JSON text to templates that add it to a text."""

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def conversation_of(
    request: ChatRequest | TokenizeRequest, template: ChatTemplate, tools: Sequence[Mapping[str, Any]] = ()
) -> Conversation:
    """The conversation of a request, in the shape that this template takes. Raises `StatusError`."""
    if not request.messages:
        raise invalid("messages", "messages must not be empty")
    goes_on = bool(request.continue_final_message)
    if goes_on and request.add_generation_prompt:
        raise invalid("continue_final_message", "continue_final_message and add_generation_prompt exclude each other")
    variables = dict(request.chat_template_kwargs or {})
    if isinstance(request, ChatRequest) and request.reasoning_effort is not None:
        variables = {**_effort(request.reasoning_effort, template), **variables}
    messages = [_template_message(i, message, template) for i, message in enumerate(request.messages)]
    if tools and not template.uses("tools"):
        messages = _with_tools(messages, tools, template)
    return Conversation(
        messages=messages,
        tools=tools,
        add_generation_prompt=not goes_on and request.add_generation_prompt is not False,
        continue_final_message=goes_on,
        variables=variables,
        add_special_tokens=bool(request.add_special_tokens),
    )


def can_switch_reasoning(template: ChatTemplate) -> bool:
    """Whether a template reads any of the variables that say how much to reason."""
    return any(template.uses(name) for name in ("reasoning_effort", *_SWITCHES))


def _effort(effort: str, template: ChatTemplate) -> dict[str, Any]:
    """The template's variables for an effort."""
    if effort not in _EFFORTS:
        raise invalid("reasoning_effort", f"reasoning_effort must be one of {', '.join(sorted(_EFFORTS))}")
    if template.uses("reasoning_effort"):
        return {"reasoning_effort": effort}
    for switch in _SWITCHES:
        if template.uses(switch):
            return {switch: effort != "none"}
    raise unsupported("reasoning_effort", "reasoning_effort is not supported: the model's template has none")


def _with_tools(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], template: ChatTemplate
) -> list[dict[str, Any]]:
    """The messages with the tools in the system message, where templates in the manner of Phi 4 mini look for them."""
    if _TOOLS_IN_MESSAGE.search(template.source) is None:
        raise unsupported("tools", "tools is not supported: the model's chat template takes no tools")
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
        calls = [_tool_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls)]
        if not template.mentions("tool_calls"):
            raise unsupported(f"{where}.tool_calls", "the model's chat template knows no tool calls")
        values["tool_calls"] = calls
    return values


def _text_of(where: str, content: str | list[dict[str, Any]] | None) -> str:
    """The text of a message: parts are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content):
        kind, text = part.get("type"), part.get("text")
        if kind != "text":
            raise unsupported(f"{where}.content[{i}].type", f"{where}.content[{i}]: only parts of type text are taken")
        if not isinstance(text, str):
            raise invalid(f"{where}.content[{i}].text", f"{where}.content[{i}].text must be a text")
        texts.append(text)
    return "\n".join(texts)


def _tool_call(where: str, call: dict[str, Any]) -> dict[str, Any]:
    """A tool call as templates expect it: the arguments as an object, not as JSON text."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{where}.function", f"{where}.function needs a name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(f"{where}.function.arguments", f"{where}.function.arguments is not JSON: {error}") from error
    if isinstance(arguments, dict):
        arguments = Arguments(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
