"""Mistral: [TOOL_CALLS] and an array of calls, or [TOOL_CALLS]name[ARGS]{...} (tokenizers since v11), once per call."""

from __future__ import annotations

import re

from headrace.gateway.chat.output_parsers.json_text import MAX_NAME_CHARS, json_calls, json_value
from headrace.gateway.chat.output_parsers.output import Output, Tools, attempt
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
    text_until,
)

OPENING = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGUMENTS = "[ARGS]"
_NAME = re.compile(r"[\w.-]+")


def mistral(source: Source, output: Output, tools: Tools) -> Steps[None]:
    """Parse a whole answer."""
    while (yield from text_until(source, output.content, OPENING)):
        if (yield from _behind_tag(source)) in ("[", "{"):
            yield from json_calls(source, output, expect(source, OPENING))
        else:
            yield from attempt(source, output, _named_call(source, output))


def _behind_tag(source: Source) -> Steps[str]:
    """The first character after the tag and any white space. Consumes nothing."""
    offset = len(OPENING)
    while (yield from has(source, offset + 1)) and source.text[source.pos + offset] in SPACE:
        offset += 1
    return source.text[source.pos + offset : source.pos + offset + 1]


def _named_call(source: Source, output: Output) -> Steps[None]:
    yield from expect(source, OPENING)
    yield from skip(source)
    name = yield from matching(source, _NAME, MAX_NAME_CHARS)
    if (yield from literal(source, CALL_ID)):  # the model's own id is ignored: it need not be unique
        yield from matching(source, _NAME, MAX_NAME_CHARS)
    yield from literal(source, ARGUMENTS)
    yield from skip(source)
    if (yield from peek(source)) != "{":
        raise MismatchError
    output.call(name)
    yield from json_value(source, output.arguments)
