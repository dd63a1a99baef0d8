"""Turns the messages of the Messages API, with their blocks, into the turns of a chat (pure).

    user: tool_result, tool_result, text     ->  tool, tool, user
    assistant: thinking, text, tool_use      ->  one turn of the assistant

Consecutive turns of one role become one turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.gateway.chat.request import ChatMessage
from headrace.gateway.checks import invalid, unsupported
from headrace.gateway.text.reasoning_seal import unsealed

_ROLES = ("user", "assistant")
_MAX_ECHO_CHARS = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the chat, and where the caller wrote it."""

    message: ChatMessage
    place: str


def system_turn(system: str | Sequence[Mapping[str, Any]]) -> Turn:
    """The turn of the system prompt, a text or blocks."""
    return Turn(ChatMessage(role="system", content=_text("system", system)), "system")


def turns_of(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """The conversation as turns. Raises `StatusError` if it is not a valid chat, for example if it has a result without
    a call."""
    if not messages:
        raise invalid("messages", "messages must not be empty")
    reader = _Reader()
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise invalid(f"{where}.role", f"{where}.role must be user or assistant")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise invalid(f"{where}.content", f"{where}.content must be a text or a list of blocks")
        for i, block in enumerate(blocks):
            reader.add(role, f"{where}.content" if isinstance(content, str) else f"{where}.content[{i}]", block)
        if not blocks:
            reader.add(role, f"{where}.content", {"type": "text", "text": ""})
    reader.end_turn()
    for turn in reader.turns:
        if turn.message.content is None and not turn.message.tool_calls:
            turn.message.content = ""  # nothing but thinking
    return reader.turns


class _Reader:
    """Adds blocks to turns."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._call_ids: set[str] = set()
        # Texts of the turn at the end. They are joined only once, because there may be as many as fit into a body.
        self._texts: list[str] = []
        self._thoughts: list[str] = []

    def add(self, role: str, where: str, block: Any) -> None:
        """Add a block to the end of the conversation."""
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            self._turn(role, where)
            self._texts.append(_string(where, block, "text"))
        elif kind == "tool_result" and role == "user":
            self._tool_result(where, block)
        elif kind == "tool_use" and role == "assistant":
            self._tool_use(where, block)
        elif kind == "thinking" and role == "assistant":
            self._turn(role, where)
            text = _string(where, block, "thinking")
            if not text and block.get("signature"):
                text = unsealed(f"{where}.signature", block["signature"])
            self._thoughts.append(text)
        else:
            named = f"of type {kind[:_MAX_ECHO_CHARS]}" if isinstance(kind, str) else "without a type"
            known = "text and tool_result" if role == "user" else "text, thinking and tool_use"
            raise unsupported(f"{where}.type", f"{where}: a block {named} is not supported; only {known} are")

    def _turn(self, role: str, where: str) -> ChatMessage:
        """The turn of this role at the end."""
        if not self.turns or self.turns[-1].message.role != role:
            self._begin_turn(Turn(ChatMessage(role=role), where))
        return self.turns[-1].message

    def _begin_turn(self, turn: Turn) -> None:
        self.end_turn()
        self.turns.append(turn)

    def end_turn(self) -> None:
        """The turn at the end has all its blocks."""
        if self._texts:
            self.turns[-1].message.content = "\n".join(self._texts)
        if self._thoughts:
            self.turns[-1].message.reasoning_content = "".join(self._thoughts)
        self._texts, self._thoughts = [], []

    def _tool_result(self, where: str, block: Mapping[str, Any]) -> None:
        call_id = _string(where, block, "tool_use_id")
        if call_id not in self._call_ids:
            field = f"{where}.tool_use_id"
            raise invalid(field, f"{field}: there is no tool_use of this id before")
        content, is_error = block.get("content"), block.get("is_error")
        text = "" if content is None else _text(f"{where}.content", content)
        if not isinstance(is_error, bool | None):
            raise invalid(f"{where}.is_error", f"{where}.is_error must be true or false")
        if is_error:
            text = f"Error: {text}"  # templates have no other way to mark an error
        self._begin_turn(Turn(ChatMessage(role="tool", content=text, tool_call_id=call_id), where))

    def _tool_use(self, where: str, block: Mapping[str, Any]) -> None:
        call_id, name = _string(where, block, "id"), _string(where, block, "name")
        arguments = block.get("input")
        if not isinstance(arguments, dict):
            raise invalid(f"{where}.input", f"{where}.input must be an object")
        self._call_ids.add(call_id)
        turn = self._turn("assistant", where)
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        if turn.tool_calls is None:
            turn.tool_calls = []
        turn.tool_calls.append({"id": call_id, "type": "function", "function": function})


def _text(where: str, content: Any) -> str:
    """A text, or blocks of text joined by line breaks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, f"{where} must be a text or a list of blocks")
    texts = []
    for position, block in enumerate(content):
        place = f"{where}[{position}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text":
            named = f"of type {kind[:_MAX_ECHO_CHARS]}" if isinstance(kind, str) else "without a type"
            raise unsupported(f"{place}.type", f"{place}: a block {named} is not supported; only text is")
        texts.append(_string(place, block, "text"))
    return "\n".join(texts)


def _string(where: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name}", f"{where}.{name} must be a text")
    return value
