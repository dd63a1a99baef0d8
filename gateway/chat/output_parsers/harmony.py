"""gpt-oss: messages on channels (https://cookbook.openai.com/articles/openai-harmony).

    <|channel|>analysis<|message|>...<|end|><|start|>assistant
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|channel|>final<|message|>...<|return|>

The prompt ends with <|start|>assistant, so that an answer begins within a header.
"""

from __future__ import annotations

import re

from headrace.gateway.chat.output_parsers.json_text import json_value
from headrace.gateway.chat.output_parsers.output import Output, Tools
from headrace.gateway.chat.output_parsers.source import (
    MismatchError,
    Source,
    Steps,
    closed_by,
    has,
    peek,
    skip,
    text_until,
)

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"
MAX_HEADER_CHARS = 512
_FUNCTIONS = "functions."
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


def harmony(source: Source, output: Output, tools: Tools) -> Steps[None]:
    """Parse a whole answer. Without tools, messages to a tool are content."""
    yield from skip(source)
    header = ""
    yield from has(source, 3)
    if source.text.startswith(("<|", "to="), source.pos):
        header = yield from _header(source)
    while True:
        yield from _body(source, output, header, tools)
        for end in (END, CALL, RETURN):
            yield from closed_by(source, end)
        if not (yield from has(source, 1)):
            return
        header = yield from _header(source)
        output.separate()


def _header(source: Source) -> Steps[str]:
    """Take a message's header and the tag after it. A header that is cut off is ignored."""
    parts: list[str] = []
    num_chars = 0

    def take(text: str) -> None:
        nonlocal num_chars
        num_chars += len(text)
        if num_chars <= MAX_HEADER_CHARS:
            parts.append(text)

    if (yield from text_until(source, take, MESSAGE)):
        source.pos += len(MESSAGE)
    return "".join(parts)


def _body(source: Source, output: Output, header: str, tools: Tools) -> Steps[None]:
    """Parse the text of a message up to its end."""
    found = _CHANNEL.search(header)
    channel = found[1] if found is not None else "final"
    found = _RECIPIENT.search(header)
    recipient = found[1] if found is not None else ""
    ends = END, CALL, RETURN, START, CHANNEL
    if recipient.startswith(_FUNCTIONS) and tools:
        yield from _call(source, output, recipient.removeprefix(_FUNCTIONS))
        yield from text_until(source, output.content, *ends, whole=True)
    elif channel == "analysis":
        begin = source.position
        output.spans.append((begin, begin))

        def take(text: str) -> None:
            output.reasoning(text)
            output.spans[-1] = (begin, output.spans[-1][1] + len(text))

        yield from text_until(source, take, *ends, whole=True)
    else:
        yield from text_until(source, output.content, *ends)


def _call(source: Source, output: Output, name: str) -> Steps[None]:
    """Parse the arguments of a call, as long as they are JSON."""
    yield from skip(source)
    char = yield from peek(source)
    if char not in ("{", "<") or not name:
        return
    output.call(name)
    if char == "<":  # the message is empty
        output.arguments("{}")
        return
    try:
        yield from json_value(source, output.arguments)
    except MismatchError:
        if source.closed:
            source.pos = len(source.text)
