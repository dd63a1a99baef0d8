"""Checks JSON from models while it arrives: the output is always the beginning of valid JSON.

Mistakes with a single reading are corrected: raw control characters and needless backslashes in strings, a comma after
the last entry, Python's True, False and None. Half of a surrogate pair becomes U+FFFD, and an escape sequence is passed
on whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.gateway.chat.output_parsers.output import CUSTOM_INPUT, Output, attempt
from headrace.gateway.chat.output_parsers.source import (
    SPACE,
    MismatchError,
    Source,
    Steps,
    expect,
    has,
    literal,
    matching,
    peek,
    skip,
)

MAX_DEPTH = 128
MAX_NUMBER_CHARS = 512
MAX_NAME_CHARS = 256
# Limit for the text in front of a call's name, which can be shown only after the name.
MAX_HEAD_CHARS = 65536

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER_CHARS = re.compile(r"[-+.0-9eE]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORD_CHARS = re.compile(r"[A-Za-z]+")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_CLOSER = {"{": "}", "[": "]"}

Emit = Callable[[str], None]


def json_value(source: Source, emit: Emit) -> Steps[None]:
    """Take one JSON value and pass it on while it arrives. Raises `MismatchError` where it is not JSON."""
    stack: list[str] = []
    comma = ""  # held until an entry follows it
    want = "value"
    while True:
        char = yield from _next_char(source, emit if stack and not comma else _ignore)
        if stack and char == _CLOSER[stack[-1]] and want in ("first", "next", "key"):
            emit(char)
            source.pos += 1
            stack.pop()
            comma = ""
        elif want == "next":
            if char != ",":
                raise MismatchError
            source.pos += 1
            comma, want = ",", "key" if stack[-1] == "{" else "first"
            continue
        else:
            if comma:
                emit(comma + " ")
                comma = ""
            if stack and stack[-1] == "{":
                yield from _key(source, char, emit)
                char = yield from _next_char(source, emit)
            if char in _CLOSER:
                if len(stack) >= MAX_DEPTH:
                    raise MismatchError
                emit(char)
                source.pos += 1
                stack.append(char)
                want = "key" if char == "{" else "first"
                continue
            yield from _scalar(source, char, emit)
        if not stack:
            return
        want = "next"


def _key(source: Source, char: str, emit: Emit) -> Steps[None]:
    if char != '"':
        raise MismatchError
    yield from json_string(source, emit)
    if (yield from _next_char(source, emit)) != ":":
        raise MismatchError
    source.pos += 1
    emit(":")


def _next_char(source: Source, emit: Emit) -> Steps[str]:
    """The next character that is not white space. Raises `MismatchError` at the end."""
    while (yield from has(source, 1)):
        char = source.text[source.pos]
        if char not in SPACE:
            return char
        emit(char)
        source.pos += 1
    raise MismatchError


def _ignore(_: str) -> None:
    pass


def _scalar(source: Source, char: str, emit: Emit) -> Steps[None]:
    if char == '"':
        yield from json_string(source, emit)
        return
    if char in "-0123456789":
        text = yield from matching(source, _NUMBER_CHARS, MAX_NUMBER_CHARS)
        if source.closed and source.pos == len(source.text):
            raise MismatchError  # more digits may have been cut off
        if _NUMBER.fullmatch(text) is None:
            raise MismatchError
        emit(text)
        return
    word = yield from matching(source, _WORD_CHARS, MAX_NUMBER_CHARS)
    if word not in _WORDS:
        raise MismatchError
    emit(_WORDS[word])


def json_string(source: Source, emit: Emit) -> Steps[None]:
    """Take a JSON string and pass it on while it arrives. Raises `MismatchError` if it does not end."""
    source.pos += 1
    emit('"')
    while True:
        found = _PLAIN.match(source.text, source.pos)
        if found is not None:
            source.pos = found.end()
            emit(found[0])
        if not (yield from has(source, 1)):
            raise MismatchError
        char = source.text[source.pos]
        if char == '"':
            source.pos += 1
            emit(char)
            return
        if char == "\\":
            yield from _escape(source, emit)
        elif char < " ":
            source.pos += 1
            emit(json.dumps(char)[1:-1])


def _escape(source: Source, emit: Emit) -> Steps[None]:
    if not (yield from has(source, 2)):
        raise MismatchError
    char = source.text[source.pos + 1]
    if char == "u":
        unit = yield from _code_unit(source, 0)
        if unit is not None:
            yield from _surrogates(source, unit, emit)
            return
    if char in '"\\/bfnrt':
        source.pos += 2
        emit("\\" + char)
    elif char == "'":
        source.pos += 2
        emit("'")
    else:  # a backslash that stands for itself
        source.pos += 1
        emit("\\\\")


def _surrogates(source: Source, unit: int, emit: Emit) -> Steps[None]:
    """Parse an escaped code unit, and the second half of its pair."""
    escaped = source.text[source.pos : source.pos + 6]
    if 0xD800 <= unit < 0xDC00:
        low = yield from _code_unit(source, 6)
        if low is not None and 0xDC00 <= low < 0xE000:
            emit(source.text[source.pos : source.pos + 12])
            source.pos += 12
            return
    source.pos += 6
    emit("\\ufffd" if 0xD800 <= unit < 0xE000 else escaped)


def _code_unit(source: Source, offset: int) -> Steps[int | None]:
    """The escaped code unit after `offset` more characters; None if there is none."""
    for num_chars in range(offset + 1, offset + 7):
        if not (yield from has(source, num_chars)):
            return None
        if not "\\u".startswith(source.text[source.pos + offset : source.pos + num_chars][:2]):
            return None
    found = _HEX.match(source.text, source.pos + offset + 2)
    return None if found is None else int(found[0], 16)


# --- calls ----------------------------------------------------------------------------------------------------------


class _Buffer:
    """Collects text that cannot be shown yet, up to a limit."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._num_chars = 0

    def __call__(self, text: str) -> None:
        self._parts.append(text)
        self._num_chars += len(text)
        if self._num_chars > MAX_HEAD_CHARS:
            raise MismatchError

    @property
    def text(self) -> str:
        return "".join(self._parts)


class JsonCall:
    """Reads `{"name": ..., "arguments": {...}}`, in any order, into a call.

    `known` are the names that calls may have; without it, all are allowed. With it, an unknown key is also a mismatch,
    because such JSON may be the answer itself.
    """

    def __init__(self, output: Output, known: frozenset[str] | None = None) -> None:
        self._output = output
        self._known = known
        self._name = ""
        self._early = ""  # arguments in front of the name
        self._shown = False

    def steps(self, source: Source) -> Steps[None]:
        """Take the call. Raises `MismatchError`; then the call was shown only if its name and arguments had begun."""
        yield from expect(source, "{")
        yield from self._entries(source)
        if not self._shown:
            self._show(self._early or "{}")

    def _entries(self, source: Source) -> Steps[None]:
        yield from skip(source)
        while not (yield from literal(source, "}")):
            key = yield from _text(source)
            yield from skip(source)
            yield from expect(source, ":")
            yield from skip(source)
            yield from self._entry(source, key)
            yield from skip(source)
            if self._shown and (yield from peek(source)) not in (",", "}"):
                return  # the call is complete except for its last brace
            if not (yield from literal(source, ",")):
                yield from expect(source, "}")
                return
            yield from skip(source)

    def _entry(self, source: Source, key: str) -> Steps[None]:
        if key in ("arguments", "parameters") and not self._shown:
            yield from self._arguments(source)
        elif key == "function" and (yield from peek(source)) == "{":
            source.pos += 1
            yield from self._entries(source)
        elif key in ("name", "function", "tool_name"):
            self._name = yield from _text(source)
            if not self._name or (self._known is not None and self._name not in self._known):
                raise MismatchError
        elif key in ("id", "type") or self._known is None:
            value = _Buffer()
            yield from json_value(source, value)
        else:
            raise MismatchError

    def _arguments(self, source: Source) -> Steps[None]:
        first = yield from peek(source)
        if first == "{" and self._name:
            self._show("")
            yield from json_value(source, self._output.arguments)
            return
        value = _Buffer()
        yield from json_value(source, value)
        text = value.text
        if first == '"':
            text = str(json.loads(text))
            if self._name in self._output.custom:
                # Models write the text of a custom tool without the object around it, too.
                text = json.dumps({CUSTOM_INPUT: text}, ensure_ascii=False)
            _check_object(text)
        elif text == "null":
            text = "{}"
        elif first != "{":
            raise MismatchError
        self._early = text
        if self._name:
            self._show(text)

    def _show(self, arguments: str) -> None:
        if not self._name:
            raise MismatchError
        self._output.call(self._name)
        if arguments:
            self._output.arguments(arguments)
        self._shown = True


def _check_object(text: str) -> None:
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise MismatchError from error


def _text(source: Source) -> Steps[str]:
    """Parse a JSON string and return its text. Raises `MismatchError`."""
    if (yield from peek(source)) != '"':
        raise MismatchError
    value = _Buffer()
    yield from json_string(source, value)
    text = str(json.loads(value.text))
    if len(text) > MAX_NAME_CHARS:
        raise MismatchError
    return text


def json_calls(
    source: Source, output: Output, head: Steps[None] | None = None, known: frozenset[str] | None = None
) -> Steps[bool]:
    """Take a call, or an array of calls, after the text that `head` takes. Returns whether there was any."""
    array = False

    def first() -> Steps[None]:
        nonlocal array
        if head is not None:
            yield from head
        yield from skip(source)
        array = yield from literal(source, "[")
        yield from skip(source)
        yield from JsonCall(output, known).steps(source)

    def following() -> Steps[None]:
        yield from expect(source, ",")
        yield from skip(source)
        yield from JsonCall(output, known).steps(source)

    if not (yield from attempt(source, output, first())):
        return False
    while array:
        yield from skip(source)
        if (yield from literal(source, "]")):
            break
        if (yield from peek(source)) != "," or not (yield from attempt(source, output, following())):
            break
    return True
