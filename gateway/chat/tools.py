"""The tools that a chat offers, and how the model may use them (pure).

A tool of type `custom` takes a text. Models call functions only, so it becomes a function with one argument, `input`,
and what the model writes there is the text of the call (`chat.custom_input`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.gateway.chat.output_parsers.output import CUSTOM_INPUT, Tools
from headrace.gateway.chat.request import Chat
from headrace.gateway.checks import MAX_ECHO_CHARS, invalid, optional_text_in, unsupported
from headrace.gateway.structure.lark_regex import regex_of_lark

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_KINDS = ("function", "custom")
_NAMED = {
    "properties": {"type": {"const": "function"}, "function": {"type": "object", "required": ["name"]}},
    "required": ["type", "function"],
}
_CALL = {"name": {"type": "string"}, "arguments": {"type": ["object", "string"]}}
_FUNCTION = {
    "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
    "description": {"type": "string"},
    "parameters": {"type": "object"},
    "strict": {"type": "boolean"},
}
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "array.tools": {
        "items": {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": _FUNCTION, "required": ["name"]},
            },
            "required": ["type", "function"],
        }
    },
    "array.tool_calls": {
        "items": {
            "type": "object",
            "properties": {
                "id": {"type": "string"},
                "type": {"const": "function"},
                "function": {"type": "object", "properties": _CALL, "required": list(_CALL)},
            },
            "required": ["function"],
        }
    },
    "object.tool_choice": _NAMED,
    "string.tool_choice": {"enum": ["none", "auto", "required"]},
}
"""The fields of tools, by JSON type and name, as the OpenAPI document shows them."""


class LoadedTool(dict[str, Any]):
    """A tool that is loaded during the conversation and described there.

    The list of tools at the head of the prompt omits it. So loading a tool changes no prefix of the prompt, and cached
    blocks stay valid.
    """


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Checked tools. Without any, the model answers in text."""

    listed: Sequence[Mapping[str, Any]] = ()
    """The tools for the template, all of them as functions, without those that are a `LoadedTool`."""
    schemas: Tools = field(default_factory=dict)
    """JSON schema of the parameters by name, of the tools that may be called."""
    custom: frozenset[str] = frozenset()
    """The names of those that take a text."""
    required: bool = False
    """The answer must be a call."""
    named: bool = False
    """The caller named the one tool to call."""
    parallel: bool = True
    """There may be several calls in an answer."""
    strict: bool = False
    """Arguments must match the schemas, because at least one tool is strict or has a grammar."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """A tool choice: which tools may be called, and whether one must be."""

    names: Sequence[str]
    required: bool = False
    named: bool = False


def tool_use_of(request: Chat) -> ToolUse:
    """The tools of a chat. Raises `StatusError` if they are malformed or contradictory."""
    choice = request.tool_choice
    if not request.tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "tool_choice needs tools")
        if request.parallel_tool_calls is not None and request.tools is None:
            raise invalid("parallel_tool_calls", "parallel_tool_calls needs tools")
        return ToolUse()
    functions = [_function(f"tools[{i}]", tool) for i, tool in enumerate(request.tools)]
    schemas = _schemas(request.tools, functions)
    chosen = _chosen(choice, schemas)
    if chosen is None or not chosen.names:
        return ToolUse()
    custom = {
        function["function"]["name"]
        for tool, function in zip(request.tools, functions, strict=True)
        if tool["type"] == "custom"
    }
    names = set(chosen.names)
    # The named tool is a choice among all that the model knows. Of allowed tools it knows no others, as their callers
    # could not take a call of one.
    known = [
        (tool, one)
        for tool, one in zip(request.tools, functions, strict=True)
        if chosen.named or one["function"]["name"] in names
    ]
    return ToolUse(
        listed=[one for tool, one in known if not isinstance(tool, LoadedTool)],
        schemas={name: schemas[name] for name in schemas if name in names},
        custom=frozenset(custom & names),
        required=chosen.required,
        named=chosen.named,
        parallel=request.parallel_tool_calls is not False and not chosen.named,
        strict=any(one["function"].get("strict") for _, one in known),
    )


def functions_of(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools as functions, for a template. Raises `StatusError` for a malformed tool or a second one of a name."""
    functions = [_function(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
    _schemas(tools, functions)
    return functions


def _schemas(
    tools: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """Schemas of the functions' parameters by name. Raises `StatusError` for a second tool of a name."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for position, one in enumerate(functions):
        function = one["function"]
        name = function["name"]
        if name in schemas:
            field_name = f"tools[{position}].{tools[position]['type']}.name"
            raise invalid(field_name, f"{field_name}: there are two tools named '{name}'")
        schemas[name] = function.get("parameters") or {}
    return schemas


def _function(where: str, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A checked tool as a function."""
    kind = tool.get("type")
    if kind not in _KINDS:
        if isinstance(kind, str):
            raise unsupported(f"{where}.type", f"{where}.type: only tools of type function and custom are supported")
        raise invalid(f"{where}.type", f"{where}.type must be 'function' or 'custom'")
    where = f"{where}.{kind}"
    found = tool.get(kind)
    if not isinstance(found, dict):
        raise invalid(where, f"{where} is required")
    name = found.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        allowed = "1 to 128 letters, digits, underscores, hyphens and dots"
        raise invalid(f"{where}.name", f"{where}.name must have {allowed}")
    optional_text_in(where, found, "description")
    if kind == "custom":
        return _custom(where, found)
    parameters = found.get("parameters")
    if not isinstance(parameters, dict | None):
        raise invalid(f"{where}.parameters", f"{where}.parameters must be a JSON schema, an object")
    if not isinstance(found.get("strict"), bool | None):
        raise invalid(f"{where}.strict", f"{where}.strict must be true or false")
    return tool


def _custom(where: str, custom: Mapping[str, Any]) -> Mapping[str, Any]:
    """A custom tool as a function. One with a grammar is strict."""
    pattern = _pattern(f"{where}.format", custom.get("format"))
    schema: dict[str, Any] = {"type": "string"}
    if pattern is not None:
        schema["pattern"] = f"^(?:{pattern})$"
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: schema},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    function: dict[str, Any] = {"name": custom["name"]}
    if custom.get("description") is not None:
        function["description"] = custom["description"]
    function["parameters"] = parameters
    if pattern is not None:
        function["strict"] = True
    return {"type": "function", "function": function}


def _pattern(where: str, form: Any) -> str | None:
    """The regular expression that the input of a custom tool must match; None for any text."""
    if form is None or form == {"type": "text"}:
        return None
    if not isinstance(form, dict) or form.get("type") not in ("text", "grammar"):
        raise invalid(f"{where}.type", f"{where}.type must be text or grammar")
    if form["type"] == "text":
        return None
    grammar = form.get("grammar")
    if not isinstance(grammar, dict) or not isinstance(grammar.get("definition"), str):
        raise invalid(f"{where}.grammar", f"{where}.grammar needs a syntax and a definition")
    if grammar.get("syntax") == "regex":
        return str(grammar["definition"])
    if grammar.get("syntax") == "lark":
        return regex_of_lark(f"{where}.grammar.definition", grammar["definition"])
    raise invalid(f"{where}.grammar.syntax", f"{where}.grammar.syntax must be lark or regex")


# --- the choice -----------------------------------------------------------------------------------------------------


def _chosen(choice: str | dict[str, Any] | None, schemas: Mapping[str, Any]) -> _Choice | None:
    """The tools of a choice; None for none of them."""
    if choice is None or choice == "auto":
        return _Choice([*schemas])
    if choice == "none":
        return None
    if choice == "required":
        return _Choice([*schemas], required=True)
    if isinstance(choice, str):
        raise invalid("tool_choice", "tool_choice must be none, auto, required or name a tool")
    if choice.get("type") == "allowed_tools":
        return _allowed(choice, schemas)
    name = _name_of(choice)
    if name is None:
        raise invalid("tool_choice", 'tool_choice must be like {"type": "function", "function": {"name": ...}}')
    if name not in schemas:
        raise invalid("tool_choice", f"tool_choice: there is no tool named '{name[:MAX_ECHO_CHARS]}'")
    return _Choice([name], required=True, named=True)


def _name_of(tool: Any) -> str | None:
    """The name in `{"type": "function", "function": {"name": ...}}`, or in the same for `custom`."""
    if not isinstance(tool, dict) or tool.get("type") not in _KINDS:
        return None
    named = tool.get(tool["type"])
    name = named.get("name") if isinstance(named, dict) else None
    return name if isinstance(name, str) else None


def _allowed(choice: Mapping[str, Any], schemas: Mapping[str, Any]) -> _Choice:
    """The choice `allowed_tools`: the model chooses among some of the tools."""
    where = "tool_choice.allowed_tools"
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
        raise invalid(where, f"{where} must have a mode and tools")
    if allowed.get("mode", "auto") not in ("auto", "required"):
        raise invalid(f"{where}.mode", f"{where}.mode must be auto or required")
    names = []
    for position, tool in enumerate(allowed["tools"]):
        name = _name_of(tool)
        if name is None or name not in schemas:
            raise invalid(f"{where}.tools[{position}]", f"{where}.tools[{position}] must name one of the tools")
        names.append(name)
    required = allowed.get("mode") == "required"
    if required and not names:
        raise invalid(f"{where}.tools", f"{where}.tools must not be empty with the mode required")
    return _Choice(names, required)
