"""The tools that a chat offers, and how the model may use them (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.gateway.chat.output_parsers.output import Tools
from headrace.gateway.chat.request import Chat
from headrace.gateway.checks import invalid, unsupported

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_MAX_ECHO_CHARS = 64


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Checked tools. Without any, the model answers in text."""

    listed: Sequence[Mapping[str, Any]] = ()
    """The tools as the caller wrote them, for the template."""
    schemas: Tools = field(default_factory=dict)
    """JSON schema of the parameters by name, of the tools that may be called."""
    required: bool = False
    """The answer must be a call."""
    named: bool = False
    """The caller named the one tool to call."""
    parallel: bool = True
    """There may be several calls in an answer."""
    strict: bool = False
    """Arguments must match the schemas, because at least one tool is strict."""


def tool_use_of(request: Chat) -> ToolUse:
    """The tools of a chat. Raises `StatusError` if they are malformed or contradictory."""
    choice = request.tool_choice
    if request.tools is None:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice needs tools")
        if request.parallel_tool_calls is not None:
            raise invalid("parallel_tool_calls", "parallel_tool_calls needs tools")
        return ToolUse()
    if not request.tools:
        raise invalid("tools", "tools must not be an empty list; leave the field out")
    if len(request.tools) > MAX_TOOLS:
        raise invalid("tools", f"tools takes at most {MAX_TOOLS} tools")
    schemas = schemas_of(request.tools)
    name = _named(choice, schemas)
    if choice == "none":
        return ToolUse()
    return ToolUse(
        listed=request.tools,
        schemas=schemas if name is None else {name: schemas[name]},
        required=choice == "required" or name is not None,
        named=name is not None,
        parallel=request.parallel_tool_calls is not False and name is None,
        strict=any(tool["function"].get("strict") for tool in request.tools),
    )


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Schemas of the tools' parameters by name. Raises `StatusError` for a malformed tool or a second one of a name."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for position, tool in enumerate(tools):
        where = f"tools[{position}]"
        kind = tool.get("type")
        if kind != "function":
            if isinstance(kind, str):
                raise unsupported(f"{where}.type", f"{where}.type: only tools of type function are supported")
            raise invalid(f"{where}.type", f"{where}.type must be 'function'")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise invalid(f"{where}.function", f"{where}.function is required")
        name = function.get("name")
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            allowed = "1 to 128 letters, digits, underscores, hyphens and dots"
            raise invalid(f"{where}.function.name", f"{where}.function.name must have {allowed}")
        if name in schemas:
            raise invalid(f"{where}.function.name", f"{where}.function.name: there are two tools named '{name}'")
        schemas[name] = _schema(f"{where}.function", function)
    return schemas


def _schema(where: str, function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{where}.parameters", f"{where}.parameters must be a JSON schema, an object")
    for name, kind, what in (("description", str, "a text"), ("strict", bool, "true or false")):
        if function.get(name) is not None and not isinstance(function[name], kind):
            raise invalid(f"{where}.{name}", f"{where}.{name} must be {what}")
    return parameters or {}


def _named(choice: str | dict[str, Any] | None, schemas: Mapping[str, Any]) -> str | None:
    """The name of the one tool that is to be called, if the choice is one."""
    if choice is None or choice in ("none", "auto", "required"):
        return None
    if isinstance(choice, str):
        raise invalid("tool_choice", "tool_choice must be none, auto, required or name a function")
    if choice.get("type") == "allowed_tools":
        raise unsupported("tool_choice", "tool_choice: allowed_tools is not supported; list only the tools allowed")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise invalid("tool_choice", 'tool_choice must be like {"type": "function", "function": {"name": ...}}')
    if name not in schemas:
        raise invalid("tool_choice", f"tool_choice: there is no tool named '{name[:_MAX_ECHO_CHARS]}'")
    return name
