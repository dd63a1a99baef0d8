"""Families that write a call as its name and JSON between special tokens. Each is a description.

DeepSeek V3, R1   <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
DeepSeek V3.1     <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
Kimi K2           <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.gateway.chat.output_parsers.json_text import MAX_NAME_CHARS, json_value
from headrace.gateway.chat.output_parsers.output import Output, Tools, attempt
from headrace.gateway.chat.output_parsers.source import (
    SPACE,
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

_WORD = re.compile(r"[^<\s]+")
_NUMBER = re.compile(r"(^|:)[0-9]+$")


@dataclass(frozen=True, slots=True)
class MarkedJson:
    """The markup around calls. An instance parses a whole answer."""

    calls_begin: str
    calls_end: str
    call_begin: str
    call_end: str
    separator: str
    prefix: str = ""
    """Text before a name that is followed by a number."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All of the markup."""
        return self.calls_begin, self.calls_end, self.call_begin, self.call_end, self.separator

    def __call__(self, source: Source, output: Output, tools: Tools) -> Steps[None]:
        """Parse a whole answer."""
        while (yield from text_until(source, output.content, self.calls_begin, self.call_begin)):
            if (yield from attempt(source, output, self._call(source, output, tools))):
                yield from skip(source, SPACE + "`")
                yield from closed_by(source, self.call_end)
                yield from skip(source)
                yield from closed_by(source, self.calls_end)

    def _call(self, source: Source, output: Output, tools: Tools) -> Steps[None]:
        if (yield from literal(source, self.calls_begin)):
            yield from skip(source)
        yield from expect(source, self.call_begin)
        name = yield from matching(source, _WORD, MAX_NAME_CHARS)
        yield from skip(source)
        yield from expect(source, self.separator)
        yield from skip(source)
        if (yield from peek(source)) != "{":
            name = yield from matching(source, _WORD, MAX_NAME_CHARS)
            yield from skip(source)
            yield from expect(source, "```json")
            yield from skip(source)
        if (yield from peek(source)) != "{":
            raise MismatchError
        output.call(self._name(name, tools))
        yield from json_value(source, output.arguments)

    def _name(self, written: str, tools: Tools) -> str:
        if not self.prefix:
            return written
        name = _NUMBER.sub("", written.removeprefix(self.prefix))
        if not name and len(tools) == 1:  # with a number alone, it can only be this one
            return next(iter(tools))
        if not name:
            raise MismatchError
        return name


DEEPSEEK = MarkedJson(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
KIMI_K2 = MarkedJson(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
    prefix="functions.",
)
