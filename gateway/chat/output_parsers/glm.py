"""GLM 4.5 and later: arguments as pairs of tags, with texts as they are and other values as JSON.

<tool_call>NAME
<arg_key>KEY</arg_key>
<arg_value>value</arg_value>
</tool_call>

From GLM 4.7 on there are no line breaks. The format is that of the models' chat templates:
https://huggingface.co/zai-org/GLM-4.5/blob/main/chat_template.jinja
"""

from __future__ import annotations

import re

from headrace.gateway.chat.output_parsers.json_text import MAX_NAME_CHARS
from headrace.gateway.chat.output_parsers.output import Output, Tools, attempt
from headrace.gateway.chat.output_parsers.source import Source, Steps, expect, literal, matching, skip, text_until
from headrace.gateway.chat.output_parsers.tagged_values import quoted, schemas_of, value

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
KEY = "<arg_key>"
KEY_END = "</arg_key>"
VALUE = "<arg_value>"
VALUE_END = "</arg_value>"
_NAME = re.compile(r"[a-zA-Z0-9_.-]+")
_KEY_NAME = re.compile(r"[^<>\n]+")


def glm(source: Source, output: Output, tools: Tools) -> Steps[None]:
    """Parse a whole answer."""
    while (yield from text_until(source, output.content, OPENING)):
        yield from attempt(source, output, _call(source, output, tools))


def _call(source: Source, output: Output, tools: Tools) -> Steps[None]:
    yield from expect(source, OPENING)
    yield from skip(source)
    name = yield from matching(source, _NAME, MAX_NAME_CHARS)
    yield from skip(source)
    # Only a tag behind the name makes it a call.
    is_closed = yield from literal(source, CLOSING)
    if not is_closed:
        yield from expect(source, KEY)
    output.call(name)
    if is_closed:
        output.arguments("{}")
        return
    schemas = schemas_of(tools, name)
    separator = "{"
    while True:
        key = yield from matching(source, _KEY_NAME, MAX_NAME_CHARS)
        yield from expect(source, KEY_END)
        yield from skip(source)
        yield from expect(source, VALUE)
        output.arguments(f"{separator}{quoted(key.strip())}: ")
        separator = ", "
        yield from value(source, output, schemas.get(key.strip()), VALUE_END)
        yield from skip(source)
        if (yield from literal(source, CLOSING)):
            output.arguments("}")
            return
        yield from expect(source, KEY)
