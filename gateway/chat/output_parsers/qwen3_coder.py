"""Qwen3 Coder: arguments as tagged text, one tag per parameter. The tool's schema defines the type of each.

<tool_call>
<function=NAME>
<parameter=KEY>
value
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re

from headrace.gateway.chat.output_parsers.json_text import MAX_NAME_CHARS
from headrace.gateway.chat.output_parsers.output import Output, Tools, attempt
from headrace.gateway.chat.output_parsers.source import (
    Source,
    Steps,
    closed_by,
    expect,
    literal,
    matching,
    skip,
    text_until,
)
from headrace.gateway.chat.output_parsers.tagged_values import quoted, schemas_of, value

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
FUNCTION = "<function="
FUNCTION_END = "</function>"
PARAMETER = "<parameter="
PARAMETER_END = "</parameter>"
_NAME = re.compile(r"[^<>\n]+")


def qwen3_coder(source: Source, output: Output, tools: Tools) -> Steps[None]:
    """Parse a whole answer."""
    while (yield from text_until(source, output.content, OPENING, FUNCTION)):
        if (yield from attempt(source, output, _call(source, output, tools))):
            yield from skip(source)
            yield from closed_by(source, CLOSING)


def _call(source: Source, output: Output, tools: Tools) -> Steps[None]:
    if (yield from literal(source, OPENING)):
        yield from skip(source)
    yield from expect(source, FUNCTION)
    name = yield from matching(source, _NAME, MAX_NAME_CHARS)
    yield from expect(source, ">")
    output.call(name.strip())
    schemas = schemas_of(tools, name.strip())
    separator = "{"
    yield from skip(source)
    while not (yield from literal(source, FUNCTION_END)):
        yield from expect(source, PARAMETER)
        key = yield from matching(source, _NAME, MAX_NAME_CHARS)
        yield from expect(source, ">")
        yield from literal(source, "\n")
        output.arguments(f"{separator}{quoted(key.strip())}: ")
        separator = ", "
        # The line break in front of the end tag is not part of the value.
        yield from value(source, output, schemas.get(key.strip()), "\n" + PARAMETER_END, PARAMETER_END)
        yield from skip(source)
    output.arguments("{}" if separator == "{" else "}")
