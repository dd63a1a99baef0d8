"""Gemma 4 and FunctionGemma: call:NAME{key:value, ...} between tags, with texts between a pair of quotes of their own.

Gemma 4         <|tool_call>call:NAME{city:<|"|>Paris<|"|>,days:2,more:{list:[1,true]}}<tool_call|>
FunctionGemma   <start_function_call>call:NAME{city:<escape>Paris<escape>,days:2}<end_function_call>

Values in JSON are understood, too, and so are texts without quotes where they cannot be anything else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.gateway.chat.output_parsers.json_text import MAX_DEPTH, MAX_HEAD_CHARS, MAX_NAME_CHARS, json_string
from headrace.gateway.chat.output_parsers.output import Output, Tools, attempt
from headrace.gateway.chat.output_parsers.source import (
    MismatchError,
    Source,
    Steps,
    closed_by,
    expect,
    literal,
    matching,
    peek,
    skip,
    text_until,
)
from headrace.gateway.chat.output_parsers.tagged_values import json_of_kind, quoted, types_of

_NAME = re.compile(r"[\w.-]+")
_KEY = re.compile(r"""[^:{}\[\],<>"\s][^:{}\[\],<>"\n]*""")
_BARE = re.compile(r"[^,{}\[\]<]+")


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """The markup of a model. An instance parses a whole answer."""

    opening: str
    closing: str
    quote: str

    @property
    def markers(self) -> tuple[str, ...]:
        """All of the markup."""
        return self.opening, self.closing, self.quote

    def __call__(self, source: Source, output: Output, tools: Tools) -> Steps[None]:
        """Parse a whole answer."""
        while (yield from text_until(source, output.content, self.opening)):
            if (yield from attempt(source, output, self._call(source, output, tools))):
                yield from skip(source)
                yield from closed_by(source, self.closing)

    def _call(self, source: Source, output: Output, tools: Tools) -> Steps[None]:
        yield from expect(source, self.opening)
        yield from skip(source)
        yield from expect(source, "call:")
        name = yield from matching(source, _NAME, MAX_NAME_CHARS)
        yield from skip(source)
        if (yield from peek(source)) != "{":
            raise MismatchError
        output.call(name)
        yield from self._object(source, output, tools.get(name), 0)

    def _object(self, source: Source, output: Output, schema: Any, depth: int) -> Steps[None]:
        """Take an object. It is passed on as JSON."""
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        source.pos += 1
        output.arguments("{")
        separator = ""
        yield from skip(source)
        while not (yield from literal(source, "}")):
            key = yield from self._key(source)
            yield from skip(source)
            yield from expect(source, ":")
            yield from skip(source)
            output.arguments(f"{separator}{quoted(key)}: ")
            separator = ", "
            inner = properties.get(key) if isinstance(properties, Mapping) else None
            yield from self._value(source, output, inner, depth)
            yield from self._next(source, "}")
        output.arguments("}")

    def _list(self, source: Source, output: Output, schema: Any, depth: int) -> Steps[None]:
        items = schema.get("items") if isinstance(schema, Mapping) else None
        source.pos += 1
        output.arguments("[")
        separator = ""
        yield from skip(source)
        while not (yield from literal(source, "]")):
            if separator:
                output.arguments(separator)
            separator = ", "
            yield from self._value(source, output, items, depth)
            yield from self._next(source, "]")
        output.arguments("]")

    def _next(self, source: Source, end: str) -> Steps[None]:
        """Take what separates two entries. Raises `MismatchError` if neither that nor the end comes."""
        yield from skip(source)
        if (yield from literal(source, ",")):
            yield from skip(source)
        elif (yield from peek(source)) != end:
            raise MismatchError

    def _key(self, source: Source) -> Steps[str]:
        parts: list[str] = []
        for quote in (self.quote, '"'):
            if (yield from literal(source, quote)):
                if not (yield from text_until(source, _Bounded(parts, MAX_NAME_CHARS), quote)):
                    raise MismatchError
                source.pos += len(quote)
                return "".join(parts)
        return (yield from matching(source, _KEY, MAX_NAME_CHARS)).rstrip()

    def _value(self, source: Source, output: Output, schema: Any, depth: int) -> Steps[None]:
        if depth >= MAX_DEPTH:
            raise MismatchError
        kinds = types_of(schema)
        char = yield from peek(source)
        if char == "{":
            yield from self._object(source, output, schema, depth + 1)
        elif char == "[":
            yield from self._list(source, output, schema, depth + 1)
        elif char == '"':
            yield from json_string(source, output.arguments)
        elif (yield from literal(source, self.quote)):
            yield from self._text(source, output, kinds)
        else:
            text = (yield from matching(source, _BARE, MAX_HEAD_CHARS)).strip()
            if source.closed and source.pos == len(source.text):
                raise MismatchError  # more of it may have been cut off
            if not text:
                raise MismatchError
            is_text = "string" in kinds and kinds <= {"string", "null"} and text != "null"
            output.arguments(quoted(text) if is_text else json_of_kind(text, kinds - {"string"}))

    def _text(self, source: Source, output: Output, kinds: set[str]) -> Steps[None]:
        """Take the text up to the closing quote: a value of another type if the schema allows no text."""
        if not kinds or "string" in kinds or kinds == {"any"}:
            output.arguments('"')
            take = lambda text: output.arguments(quoted(text)[1:-1])  # noqa: E731
            if not (yield from text_until(source, take, self.quote, whole=True)):
                raise MismatchError
            output.arguments('"')
        else:
            parts: list[str] = []
            if not (yield from text_until(source, parts.append, self.quote)):
                raise MismatchError
            output.arguments(json_of_kind("".join(parts), kinds))
        source.pos += len(self.quote)


class _Bounded:
    """Collects text up to a limit."""

    def __init__(self, parts: list[str], max_chars: int) -> None:
        self._parts = parts
        self._left = max_chars

    def __call__(self, text: str) -> None:
        self._left -= len(text)
        if self._left < 0:
            raise MismatchError
        self._parts.append(text)


GEMMA4 = GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>")
