"""Turns items of the Responses API into the turns of a chat (pure).

reasoning, message, function_call, function_call  ->  one turn of the assistant
function_call_output                              ->  one turn of the tool
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.gateway.chat.request import ChatMessage
from headrace.gateway.checks import invalid, json_of, unsupported
from headrace.gateway.text.reasoning_seal import unsealed

MAX_ITEMS = 10_000
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_MAX_ECHO_CHARS = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the chat, and where the caller wrote it."""

    message: ChatMessage
    place: str


def new_id(kind: str) -> str:
    """A fresh id, such as `msg_…` for the kind `msg`."""
    return f"{kind}_{secrets.token_hex(24)}"


def input_items(value: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The input as items that can be stored and listed: all with an id, a type, and content in parts.

    Raises `StatusError` for an item that a chat cannot have.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not value:
        raise invalid("input", "input must not be empty")
    if len(value) > MAX_ITEMS:
        raise invalid("input", f"input takes at most {MAX_ITEMS} items")
    return [_item(f"input[{position}]", item) for position, item in enumerate(value)]


def turns_of(earlier: Sequence[Mapping[str, Any]], items: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """The conversation of earlier items and the input. Raises `StatusError` for an output without its call."""
    turns: list[Turn] = []
    calls: set[str] = set()
    thoughts: dict[int, list[str]] = {}  # of turns, by their numbers
    places = [*("previous_response_id" for _ in earlier), *(f"input[{i}]" for i in range(len(items)))]
    for place, item in zip(places, [*earlier, *items], strict=True):
        kind = item["type"]
        if kind == "function_call_output":
            if item["call_id"] not in calls:
                raise invalid(f"{place}.call_id", f"{place}.call_id: there is no function_call of this call_id before")
            text = _text(item["output"])
            turns.append(Turn(ChatMessage(role="tool", content=text, tool_call_id=item["call_id"]), place))
        elif kind == "message" and item["role"] != "assistant":
            turns.append(Turn(ChatMessage(role=item["role"], content=_text(item["content"])), place))
        else:
            _add_to_assistant(turns, thoughts, place, item)
            if kind == "function_call":
                calls.add(item["call_id"])
    for number, texts in thoughts.items():
        turns[number].message.reasoning_content = "".join(texts)
    for turn in turns:
        message = turn.message
        if message.role == "assistant" and message.content is None and not message.tool_calls:
            message.content = ""  # nothing but reasoning
    return turns


def _add_to_assistant(turns: list[Turn], thoughts: dict[int, list[str]], place: str, item: Mapping[str, Any]) -> None:
    """Add an item to the assistant's turn at the end, or begin one."""
    kind = item["type"]
    last = turns[-1].message if turns and turns[-1].message.role == "assistant" else None
    if last is None or (kind != "function_call" and (last.content is not None or last.tool_calls)):
        last = ChatMessage(role="assistant")
        turns.append(Turn(last, place))
    if kind == "reasoning":
        thoughts.setdefault(len(turns) - 1, []).append("\n".join(part["text"] for part in item["content"]))
    elif kind == "message":
        last.content = _text(item["content"])
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        if last.tool_calls is None:
            last.tool_calls = []
        last.tool_calls.append(call)


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part[_TEXTS[part["type"]]] for part in content)


# --- checking -------------------------------------------------------------------------------------------------------


def _item(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "message":
        return _message(where, item)
    if kind == "function_call":
        call = {name: _string(where, item, name) for name in ("call_id", "name", "arguments")}
        json_of(f"{where}.arguments", call["arguments"] or "{}")
        return {"id": _id(where, item, "fc"), "type": "function_call", "status": "completed", **call}
    if kind == "function_call_output":
        output = item.get("output")
        return {
            "id": _id(where, item, "fco"),
            "type": "function_call_output",
            "status": "completed",
            "call_id": _string(where, item, "call_id"),
            "output": output if isinstance(output, str) else _parts(f"{where}.output", output, "input_text"),
        }
    if kind == "reasoning":
        return _reasoning(where, item)
    named = kind[:_MAX_ECHO_CHARS] if isinstance(kind, str) else "of no name"
    known = "message, function_call, function_call_output, reasoning and item_reference"
    raise unsupported(f"{where}.type", f"{where}.type: items {named} are not taken, only {known}")


def _message(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}")
    kind = "output_text" if role == "assistant" else "input_text"
    parts = _parts(f"{where}.content", item.get("content"), kind)
    return {
        "id": _id(where, item, "msg"),
        "type": "message",
        "role": role,
        "status": "completed",
        "content": parts,
    }


def _parts(where: str, content: Any, kind: str) -> list[dict[str, Any]]:
    """Content in parts; a text becomes one part of this kind."""
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    if not isinstance(content, list):
        raise invalid(where, f"{where} must be a text or a list of parts")
    parts: list[dict[str, Any]] = []
    for position, part in enumerate(content):
        place = f"{where}[{position}]"
        kind_of_part = part.get("type") if isinstance(part, dict) else None
        name = _TEXTS.get(kind_of_part) if isinstance(kind_of_part, str) else None
        if name is None:
            found = f"{kind_of_part[:_MAX_ECHO_CHARS]} is not supported" if isinstance(kind_of_part, str) else "no type"
            raise unsupported(f"{place}.type", f"{place}.type: {found}; only input_text, output_text and refusal are")
        text = _string(place, part, name)
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind_of_part == "output_text" else {}
        parts.append({"type": kind_of_part, name: text, **more})
    return parts


def _reasoning(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    content = item.get("content")
    if content is None and item.get("encrypted_content") is not None:
        text = unsealed(f"{where}.encrypted_content", item["encrypted_content"])
        content = [{"type": "reasoning_text", "text": text}]
    if not content and item.get("summary"):
        field = f"{where}.summary"
        raise unsupported(field, f"{field} is not supported: hand reasoning back in content or encrypted_content")
    content = [] if content is None else content
    texts = []
    for position, part in enumerate(content if isinstance(content, list) else [None]):
        place = f"{where}.content[{position}]"
        if not isinstance(part, dict) or part.get("type") != "reasoning_text":
            raise invalid(place, f"{place} must be a part of type reasoning_text")
        texts.append({"type": "reasoning_text", "text": _string(place, part, "text")})
    return {"id": _id(where, item, "rs"), "type": "reasoning", "summary": [], "content": texts}


def _string(where: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name}", f"{where}.{name} must be a text")
    return value


def _id(where: str, item: Mapping[str, Any], kind: str) -> str:
    value = item.get("id")
    if value is None:
        return new_id(kind)
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_ECHO_CHARS * 2:
        raise invalid(f"{where}.id", f"{where}.id must be a text of 1 to {_MAX_ECHO_CHARS * 2} characters")
    return value
