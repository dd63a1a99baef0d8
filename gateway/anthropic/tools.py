"""The tools of the Messages API as functions of a chat (pure).

    custom                          ->  a function
    bash, text_editor, memory        ->  a function with the inputs that Anthropic documents; the caller executes it
    web_search, code_execution, ...  ->  left out, and named as hints: they run on Anthropic's servers or need images
    defer_loading                    ->  not in the prompt; where the conversation loads it, its definition is text

https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/overview
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.gateway.chat.tools import LoadedTool
from headrace.gateway.checks import MAX_ECHO_CHARS, invalid, unsupported
from headrace.gateway.hints import ignored

_DATED = re.compile(r"(?P<family>[a-z_]+?)(?:_(?P<date>\d{8}))?")
_TOOL_SEARCH = ("tool_search_tool_regex", "tool_search_tool_bm25")
_UNDATED = ("mcp_toolset", *_TOOL_SEARCH)
_NO_UNDO_SINCE = "20250429"

_PATH = {"type": "string", "description": "Absolute path of a file or directory"}
_EDITING: dict[str, dict[str, Any]] = {
    "path": _PATH,
    "file_text": {"type": "string", "description": "For create: the content of the file"},
    "old_str": {"type": "string", "description": "For str_replace: the text to replace, which must be unique"},
    "new_str": {"type": "string", "description": "For str_replace: the new text"},
    "insert_line": {"type": "integer", "description": "For insert: the line after which to insert; 0: at the start"},
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "For view: the first and the last line to show; -1 means the end of the file",
    },
}


def _object(properties: Mapping[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def _commands(*names: str) -> dict[str, Any]:
    return {"command": {"type": "string", "enum": list(names)}}


def _bash(_: str) -> tuple[str, dict[str, Any]]:
    command = {"type": "string", "description": "The command to run"}
    restart = {"type": "boolean", "description": "Restart the shell instead of running a command"}
    return "Run a command in a persistent bash shell.", _object({"command": command, "restart": restart})


def _text_editor(date: str) -> tuple[str, dict[str, Any]]:
    has_undo = date < _NO_UNDO_SINCE
    commands = ("view", "create", "str_replace", "insert", *(("undo_edit",) if has_undo else ()))
    inserted = {"type": "string", "description": "For insert: the text to insert"}
    name = "new_str" if has_undo else "insert_text"
    both = {"type": "string", "description": "For str_replace and insert: the new text"}
    properties = {**_commands(*commands), **_EDITING, name: both if has_undo else inserted}
    return "View, create and edit files.", _object(properties, ("command", "path"))


def _memory(_: str) -> tuple[str, dict[str, Any]]:
    properties = {
        **_commands("view", "create", "str_replace", "insert", "delete", "rename"),
        **_EDITING,
        "insert_text": {"type": "string", "description": "For insert: the text to insert"},
        "old_path": {"type": "string", "description": "For rename: the present path"},
        "new_path": {"type": "string", "description": "For rename: the new path"},
    }
    about = "Keep notes that outlive the conversation, as files under /memories. View that directory first."
    return about, _object(properties, ("command",))


_OF_CALLERS = {"bash": _bash, "text_editor": _text_editor, "memory": _memory}
"""Tools that the caller executes and whose inputs are text: family -> date -> description and schema."""


@dataclass(slots=True)
class _Tool:
    place: str
    function: dict[str, Any]
    is_listed: bool
    """It is in the prompt from the beginning."""
    is_offered: bool

    def text(self) -> str:
        return json.dumps({"type": "function", "function": self.function}, ensure_ascii=False)


class Catalogue:
    """The tools of a request. The conversation may load and withdraw some of them."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Raises `StatusError` for a malformed tool or an unknown type."""
        self._tools: list[_Tool] = []
        self._left_out: set[str] = set()
        families = {_family(tool.get("type")) for tool in tools}
        self._searches = not families.isdisjoint(_TOOL_SEARCH)
        for position, tool in enumerate(tools):
            self._add(f"tools[{position}]", tool)

    def _add(self, place: str, tool: Mapping[str, Any], *, is_loaded: bool = False) -> _Tool | None:
        function = _function(place, tool)
        if function is None:
            if isinstance(tool.get("name"), str):
                self._left_out.add(tool["name"])
            return None
        is_deferred = _flag(place, tool, "defer_loading")
        if is_deferred and self._searches:
            # Nobody searches, so that the model would never see it.
            ignored("tools.defer_loading", "there is no hosted search for tools, so that all tools are in the prompt")
            is_deferred = False
        added = _Tool(place, function, not is_deferred and not is_loaded, not is_deferred or is_loaded)
        self._tools.append(added)
        return added

    def load(self, name: str) -> str:
        """Make the tool of this name available, because the conversation loads it. Returns the text that tells the
        model."""
        tool = self._find(name)
        if tool is None:
            ignored("tool_reference", "it names no tool of the request")
            return f"The tool {name} is not available."
        tool.is_offered = True
        return f"The tool {name} is available." if tool.is_listed else tool.text()

    def define(self, place: str, tool: Mapping[str, Any]) -> str:
        """Add a tool that the conversation brings. Returns the text that tells the model. Raises `StatusError`."""
        added = self._add(place, tool, is_loaded=True)
        return "" if added is None else added.text()

    def withdraw(self, name: str) -> str:
        """Withdraw the tool of this name, because the conversation does. Returns the text that tells the model."""
        tool = self._find(name)
        if tool is not None and not tool.is_listed:
            tool.is_offered = False
        return f"The tool {name} is no longer available. Do not call it."

    def name(self, name: str) -> None:
        """Check that the tool that the caller chooses is available. Raises `StatusError` if it was left out."""
        if name in self._left_out:
            problem = f"tool_choice.name: the tool '{name[:MAX_ECHO_CHARS]}' is not available here, because the server"
            raise unsupported("tool_choice.name", f"{problem} runs no hosted tools; choose another one")
        tool = self._find(name)
        if tool is not None and not tool.is_offered:
            tool.is_listed = tool.is_offered = True

    def _find(self, name: str) -> _Tool | None:
        return next((tool for tool in reversed(self._tools) if tool.function.get("name") == name), None)

    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call, as a chat has them."""
        offered = (tool for tool in self._tools if tool.is_offered)
        return [
            (dict if tool.is_listed else LoadedTool)({"type": "function", "function": tool.function})
            for tool in offered
        ]

    def places(self) -> list[str]:
        """Where the caller wrote each of them."""
        return [tool.place for tool in self._tools if tool.is_offered]


def _family(kind: object) -> str:
    found = _DATED.fullmatch(kind) if isinstance(kind, str) else None
    return "" if found is None else found["family"]


def _function(place: str, tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """The function of a chat; None if the tool is left out."""
    kind = tool.get("type")
    if not _is_called_directly(place, tool):
        return None
    if kind in (None, "custom"):
        schema = tool.get("input_schema")
        if not isinstance(schema, dict):
            raise invalid(f"{place}.input_schema", f"{place}.input_schema must be a JSON schema, an object")
        description = tool.get("description")
        return _described(place, tool, description, schema)
    found = _DATED.fullmatch(kind) if isinstance(kind, str) else None
    if found is None or (found["date"] is None and kind not in _UNDATED):
        named = f"'{kind[:MAX_ECHO_CHARS]}'" if isinstance(kind, str) else "no name"
        raise unsupported(f"{place}.type", f"{place}.type: there is no tool of type {named}; use custom")
    if found["family"] in _OF_CALLERS:
        return _described(place, tool, *_OF_CALLERS[found["family"]](found["date"]))
    ignored(f"tools.{kind}", "the server runs no hosted tools, so that the model does not get this one", is_known=False)
    return None


def _is_called_directly(place: str, tool: Mapping[str, Any]) -> bool:
    callers = tool.get("allowed_callers")
    if callers is None or callers == ["direct"]:
        return True
    if not isinstance(callers, list):
        raise invalid(f"{place}.allowed_callers", f"{place}.allowed_callers must be a list")
    ignored("tools.allowed_callers", "models call tools only directly; others than these callers are left out")
    return "direct" in callers


def _described(place: str, tool: Mapping[str, Any], description: object, schema: Mapping[str, Any]) -> dict[str, Any]:
    examples = tool.get("input_examples")
    if examples is not None and not isinstance(examples, list):
        raise invalid(f"{place}.input_examples", f"{place}.input_examples must be a list")
    if examples and isinstance(description, str | None):
        lines = [json.dumps(example, ensure_ascii=False) for example in examples]
        description = "\n".join([*([description] if description else []), "Examples of its input:", *lines])
    found = {"name": tool.get("name"), "description": description, "strict": tool.get("strict")}
    return {**{name: value for name, value in found.items() if value is not None}, "parameters": schema}


def _flag(place: str, tool: Mapping[str, Any], name: str) -> bool:
    value = tool.get(name)
    if not isinstance(value, bool | None):
        raise invalid(f"{place}.{name}", f"{place}.{name} must be true or false")
    return bool(value)
