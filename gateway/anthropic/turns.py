"""Turns the messages of the Messages API, with their blocks, into the turns of a chat (pure).

    user: tool_result, tool_result, text     ->  tool, tool, user
    assistant: thinking, text, tool_use      ->  one turn of the assistant
    system: text, tool_addition              ->  a turn of the system at its place

Consecutive turns of one role become one turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from headrace.gateway.anthropic.tools import Catalogue
from headrace.gateway.chat.billing import is_billing
from headrace.gateway.chat.request import ChatMessage
from headrace.gateway.checks import MAX_ECHO_CHARS, invalid, optional_text_in, text_in, unsupported
from headrace.gateway.hints import ignored
from headrace.gateway.images.given import GivenImage, image_of_base64, image_of_url, part_of
from headrace.gateway.images.refusal import remedy_for
from headrace.gateway.text.seals import REASONING
from headrace.protos.status import StatusError

INVALID_JSON = "INVALID_JSON"
"""The key for the text of an input that was cut off."""
_ROLES = ("user", "assistant", "system")
_SKIPPED = "the model gets the texts, thoughts and calls of earlier answers"
_UNTIL_NEXT_USER = "next_user_message"
_OVERSIZED = "oversized_image"
_MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_Piece: TypeAlias = tuple[str, str | GivenImage]
"""A text or an image, and where the caller wrote it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the chat, and where the caller wrote it."""

    message: ChatMessage
    place: str
    images: list[str] = field(default_factory=list)
    """Where the caller wrote the parts of its content, if there are images."""


def turns_of(
    messages: Sequence[Mapping[str, Any]],
    system: str | Sequence[Mapping[str, Any]] | None = None,
    catalogue: Catalogue | None = None,
) -> list[Turn]:
    """The conversation as turns, with the system prompt first. It loads and withdraws tools of the catalogue.

    Raises `StatusError` if it is not a valid chat, for example if it has a result without a call.
    """
    if not messages:
        raise invalid("messages", "messages must not be empty")
    reader = _Reader(Catalogue(()) if catalogue is None else catalogue)
    if isinstance(system, str) and system:
        reader.add("system", "system", {"type": "text", "text": system})
    for i, block in enumerate(system if isinstance(system, list) else ()):
        if not _is_billing(block):
            reader.add("system", f"system[{i}]", block)
    last_user = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    for position, message in enumerate(messages):
        where = f"messages[{position}]"
        role = message.get("role")
        content = message.get("content")
        if role not in _ROLES:
            raise invalid(f"{where}.role", f"{where}.role must be user, assistant or system")
        if role == "system" and _is_over(where, message, position < last_user):
            continue
        if content is None and role == "system" and message.get("output_config") is not None:
            continue
        if content is None and role == "assistant":
            content = ""  # what some clients store of an answer without a text
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise invalid(f"{where}.content", f"{where}.content must be a text or a list of blocks")
        for i, block in enumerate(blocks):
            reader.add(role, f"{where}.content" if isinstance(content, str) else f"{where}.content[{i}]", block)
        if not blocks:
            reader.add(role, f"{where}.content", {"type": "text", "text": ""})
    reader.end_turn()
    if not reader.turns:
        raise invalid("messages", "messages must have a turn of the user")
    for turn in reader.turns:
        if turn.message.content is None and not turn.message.tool_calls:
            turn.message.content = ""  # nothing but thinking
    return reader.turns


def _is_billing(block: object) -> bool:
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and is_billing(text)


def _is_over(where: str, message: Mapping[str, Any], is_before_user: bool) -> bool:
    """Whether a system turn is no longer shown, because it applied only until the next turn of the user."""
    clear_at = message.get("clear_at")
    if clear_at not in (None, "never", _UNTIL_NEXT_USER):
        raise invalid(f"{where}.clear_at", f"{where}.clear_at must be never or {_UNTIL_NEXT_USER}")
    return clear_at == _UNTIL_NEXT_USER and is_before_user


class _Reader:
    """Adds blocks to turns."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.turns: list[Turn] = []
        self._catalogue = catalogue
        self._call_ids: set[str] = set()
        # Texts and images of the turn at the end, each with its place. They are joined only once, because there may be
        # as many as fit into a body.
        self._pieces: list[_Piece] = []
        self._thoughts: list[str] = []

    def add(self, role: str, where: str, block: Any) -> None:
        """Add a block to the end of the conversation."""
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            self._add_text(role, where, text_in(where, block, "text"))
        elif role == "assistant" and isinstance(kind, str):
            self._add_of_assistant(where, kind, block)
        elif role == "user" and kind == "image":
            self._turn(role, where)
            self._pieces.append((where, _image(where, block)))
        elif role == "user" and kind == "tool_result":
            self._tool_result(where, block)
        elif role == "user" and kind in _READABLE:
            self._turn(role, where)
            self._pieces += _READABLE[kind](where, block)
        elif role == "system" and kind in ("tool_addition", "tool_removal"):
            self._add_text(role, where, _tool_change(where, block, self._catalogue))
        elif role == "user" and kind == "compaction":
            self._add_text(role, where, _text(f"{where}.content", block.get("content") or ""))
        else:
            known = {"user": "text, image, tool_result, document and search_result", "system": "text"}.get(role)
            raise _not_supported(where, kind, known or "text, thinking and tool_use")

    def _add_of_assistant(self, where: str, kind: str, block: Mapping[str, Any]) -> None:
        if kind == "tool_use":
            self._tool_use(where, block)
        elif kind == "thinking":
            self._turn("assistant", where)
            self._thoughts.append(_thinking(where, block))
        elif kind == "compaction":
            self._add_text("assistant", where, _text(f"{where}.content", block.get("content") or ""))
        elif kind == "tool_result":
            raise _not_supported(where, kind, "text, thinking and tool_use")
        else:
            # Redacted thinking, and the tools that the provider's servers run. The text of the turn has their results.
            ignored(f"messages.{kind}", _SKIPPED, is_known=False)
            self._turn("assistant", where)

    def _add_text(self, role: str, where: str, text: str) -> None:
        self._turn(role, where)
        self._pieces.append((where, text))

    def _turn(self, role: str, where: str) -> ChatMessage:
        """The turn of this role at the end."""
        if not self.turns or self.turns[-1].message.role != role:
            self._begin_turn(Turn(ChatMessage(role=role), where))
        return self.turns[-1].message

    def _begin_turn(self, turn: Turn) -> None:
        self.end_turn()
        self.turns.append(turn)

    def end_turn(self) -> None:
        """Complete the turn at the end, which has all its blocks."""
        if self._pieces:
            _fill(self.turns[-1], self._pieces)
        if self._thoughts:
            self.turns[-1].message.reasoning_content = "".join(self._thoughts)
        self._pieces = []
        self._thoughts = []

    def _tool_result(self, where: str, block: Mapping[str, Any]) -> None:
        call_id = text_in(where, block, "tool_use_id")
        if call_id not in self._call_ids:
            field = f"{where}.tool_use_id"
            # Clients find the cause by these words of the provider.
            problem = f"{field}: unexpected `tool_use_id` found in `tool_result` blocks: {call_id[:MAX_ECHO_CHARS]}"
            raise invalid(field, f"{problem}; there is no `tool_use` of this id before")
        content = block.get("content")
        is_error = block.get("is_error")
        pieces = [] if content is None else self._result(f"{where}.content", content)
        if not isinstance(is_error, bool | None):
            raise invalid(f"{where}.is_error", f"{where}.is_error must be true or false")
        if is_error:  # templates have no other way to mark an error
            first = pieces[0][1] if pieces and isinstance(pieces[0][1], str) else None
            pieces = [(where, f"Error: {first or ''}"), *(pieces if first is None else pieces[1:])]
        self._begin_turn(Turn(ChatMessage(role="tool", content="", tool_call_id=call_id), where))
        _fill(self.turns[-1], pieces)

    def _result(self, where: str, content: Any) -> list[_Piece]:
        """The texts and images of a tool's result, with their places. Other blocks become notes, so that the chat can
        continue without them."""
        if isinstance(content, str):
            return [(where, content)]
        if not isinstance(content, list):
            raise invalid(where, f"{where} must be a text or a list of blocks")
        pieces: list[_Piece] = []
        for position, block in enumerate(content):
            place = f"{where}[{position}]"
            kind = block.get("type") if isinstance(block, dict) else None
            if not isinstance(kind, str):
                raise _not_supported(place, kind, "text")
            if kind == "text":
                pieces.append((place, text_in(place, block, "text")))
            elif kind == "image":
                pieces.append((place, _image(place, block)))
            elif kind == "tool_reference":
                pieces.append((place, self._catalogue.load(text_in(place, block, "tool_name"))))
            elif kind == "search_result" or (kind == "document" and _is_readable(block)):
                pieces += _READABLE[kind](place, block)
            else:
                ignored(f"tool_result.{kind}", "the model cannot read it, and gets a note instead", is_known=False)
                note = f"[The tool returned a block of type {kind[:MAX_ECHO_CHARS]}, which cannot be shown.]"
                pieces.append((place, note))
        return pieces

    def _tool_use(self, where: str, block: Mapping[str, Any]) -> None:
        call_id = text_in(where, block, "id")
        name = text_in(where, block, "name")
        arguments = block.get("input")
        if isinstance(arguments, str | None):
            arguments = input_of(arguments or "")  # what some clients store of an input that was cut off
        if not isinstance(arguments, dict):
            raise invalid(f"{where}.input", f"{where}.input must be an object")
        self._call_ids.add(call_id)
        turn = self._turn("assistant", where)
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        if turn.tool_calls is None:
            turn.tool_calls = []
        turn.tool_calls.append({"id": call_id, "type": "function", "function": function})


def _fill(turn: Turn, pieces: Sequence[_Piece]) -> None:
    """Give a turn its content: a text, or a list of parts if there are images."""
    if any(isinstance(piece, GivenImage) for _, piece in pieces):
        turn.images[:] = [place for place, _ in pieces]
        turn.message.content = [
            {"type": "text", "text": piece} if isinstance(piece, str) else part_of(piece, "image")
            for _, piece in pieces
        ]
    else:
        turn.message.content = "\n".join(str(piece) for _, piece in pieces)


def _image(where: str, block: Mapping[str, Any]) -> GivenImage:
    """The image of a block. Raises `StatusError`."""
    image = _image_of_source(where, block)
    image.is_refused_if_reduced = _refuses_reduced(f"{where}.transformations", block.get("transformations"))
    return image


def _refuses_reduced(where: str, transformations: object) -> bool:
    """Whether `transformations` wants an error for images that are too large, instead of smaller ones. Raises
    `StatusError`."""
    if transformations is None:
        return False
    if not isinstance(transformations, dict):
        raise invalid(where, f"{where} must be an object")
    for name in transformations:
        if name != _OVERSIZED:
            field = f"{where}.{str(name)[:MAX_ECHO_CHARS]}"
            raise unsupported(field, f"{field} is not supported; there is {_OVERSIZED}")
    chosen = transformations.get(_OVERSIZED)
    if chosen not in (None, "downsize", "error"):
        raise invalid(f"{where}.{_OVERSIZED}", f"{where}.{_OVERSIZED} must be downsize or error")
    return chosen == "error"


def _image_of_source(where: str, block: Mapping[str, Any]) -> GivenImage:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(source, dict) and kind == "base64":
        media_type = source.get("media_type")
        # The file itself tells its format. Clients also write image/jpg, or the type of another format.
        is_image = isinstance(media_type, str) and media_type[:6].lower() == "image/"
        if media_type is not None and not is_image:
            name = f"{where}.source.media_type"
            raise invalid(name, f"{name} must be one of {', '.join(_MEDIA_TYPES)}")
        return image_of_base64(f"{where}.source.data", source.get("data"))
    if isinstance(source, dict) and kind == "url":
        return image_of_url(f"{where}.source.url", source.get("url"))
    named = f"of type {kind[:MAX_ECHO_CHARS]}" if isinstance(kind, str) else "without a type"
    problem = f"{where}.source: a source {named} is not supported; send the image as base64 or as a url"
    raise unsupported(f"{where}.source.type", problem)


def input_of(text: str) -> dict[str, Any]:
    """The input of a call from its text, which may have been cut off."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: text}


def _thinking(where: str, block: Mapping[str, Any]) -> str:
    """The text of a thought; empty if only another server can read it."""
    text = optional_text_in(where, block, "thinking") or ""
    if text or not block.get("signature"):
        return text
    try:
        return REASONING.unsealed(f"{where}.signature", block["signature"])
    except StatusError:
        ignored("messages.thinking.signature", "only the server that thought this can read it")
        return ""


def _tool_change(where: str, block: Mapping[str, Any], catalogue: Catalogue) -> str:
    """The text of a system turn that adds or removes a tool."""
    tool = block.get("tool")
    kind = tool.get("type") if isinstance(tool, dict) else None
    if isinstance(tool, dict) and kind == "tool_reference":
        name = text_in(f"{where}.tool", tool, "name")
        return catalogue.load(name) if block["type"] == "tool_addition" else catalogue.withdraw(name)
    if isinstance(tool, dict) and kind == "tool_definition" and isinstance(tool.get("definition"), dict):
        return catalogue.define(f"{where}.tool.definition", tool["definition"])
    if isinstance(kind, str) and kind.startswith("mcp_"):
        ignored(f"messages.{kind}", "the server connects to no MCP servers", is_known=False)
        return ""
    raise invalid(f"{where}.tool", f"{where}.tool must be a tool_reference or a tool_definition")


# --- documents ------------------------------------------------------------------------------------------------------


def _is_readable(block: Mapping[str, Any]) -> bool:
    """Whether a document is text, perhaps with images."""
    source = block.get("source")
    return isinstance(source, dict) and source.get("type") in ("text", "content")


def _document(where: str, block: Mapping[str, Any]) -> list[_Piece]:
    """A document of texts and images with its title and context. Raises `StatusError` for one that is a file."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind not in ("text", "content"):
        named = f"of type {kind[:MAX_ECHO_CHARS]}" if isinstance(kind, str) else "without a type"
        problem = f"{where}.source: a block of type document with a source {named} is not supported"
        raise unsupported(f"{where}.source", f"{problem}: {remedy_for('document')}")
    if kind == "text":
        body: list[_Piece] = [(where, text_in(f"{where}.source", source, "data"))]
    elif isinstance(content := source.get("content"), list):
        place = f"{where}.source.content"
        body = [_piece_of_document(f"{place}[{position}]", part) for position, part in enumerate(content)]
    else:
        body = [(where, _text(f"{where}.source.content", content))]
    return _titled(where, block, ("title", "context"), body)


def _piece_of_document(where: str, block: Any) -> _Piece:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return where, text_in(where, block, "text")
    if kind == "image":
        return where, _image(where, block)
    raise _not_supported(where, kind, "text and image")


def _search_result(where: str, block: Mapping[str, Any]) -> list[_Piece]:
    return _titled(where, block, ("title", "source"), [(where, _text(f"{where}.content", block.get("content")))])


_READABLE = {"document": _document, "search_result": _search_result}


def _titled(where: str, block: Mapping[str, Any], names: Sequence[str], body: Sequence[_Piece]) -> list[_Piece]:
    citations = block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled"):
        ignored("citations", "answers do not cite their sources")
    lines = [
        f"{name.capitalize()}: {text_in(where, block, name)}" for name in names if block.get(name) not in (None, "")
    ]
    return [(where, "\n".join([f"<{block['type']}>", *lines])), *body, (where, f"</{block['type']}>")]


# --- values ---------------------------------------------------------------------------------------------------------


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
            raise _not_supported(place, kind, "text")
        texts.append(text_in(place, block, "text"))
    return "\n".join(texts)


def _not_supported(where: str, kind: object, known: str) -> StatusError:
    named = f"of type {kind[:MAX_ECHO_CHARS]}" if isinstance(kind, str) else "without a type"
    return unsupported(f"{where}.type", f"{where}: a block {named} is not supported; only {known} may be here")
