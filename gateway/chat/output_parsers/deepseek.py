"""DeepSeek V3, R1 and V3.1: calls between special tokens, their arguments as they are or in a block of code.

V3, R1   <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
V3.1     <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
"""

from __future__ import annotations

import re

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

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_WORD = re.compile(r"[^<\s]+")


def deepseek(source: Source, output: Output, tools: Tools) -> Steps[None]:
    """Parse a whole answer."""
    while (yield from text_until(source, output.content, CALLS_BEGIN, CALL_BEGIN)):
        if (yield from attempt(source, output, _call(source, output))):
            yield from skip(source, SPACE + "`")
            yield from closed_by(source, CALL_END)
            yield from skip(source)
            yield from closed_by(source, CALLS_END)


def _call(source: Source, output: Output) -> Steps[None]:
    if (yield from literal(source, CALLS_BEGIN)):
        yield from skip(source)
    yield from expect(source, CALL_BEGIN)
    name = yield from matching(source, _WORD, MAX_NAME_CHARS)
    yield from expect(source, SEPARATOR)
    yield from skip(source)
    if (yield from peek(source)) != "{":
        name = yield from matching(source, _WORD, MAX_NAME_CHARS)
        yield from skip(source)
        yield from expect(source, "```json")
        yield from skip(source)
    if (yield from peek(source)) != "{":
        raise MismatchError
    output.call(name)
    yield from json_value(source, output.arguments)
