"""Hermes, Qwen 2.5 and Qwen 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one pair of tags per call."""

from __future__ import annotations

from headrace.gateway.chat.output_parsers.json_text import json_calls
from headrace.gateway.chat.output_parsers.output import Output, Tools
from headrace.gateway.chat.output_parsers.source import SPACE, Source, Steps, closed_by, expect, skip, text_until

OPENING = "<tool_call>"
CLOSING = "</tool_call>"


def hermes(source: Source, output: Output, tools: Tools) -> Steps[None]:
    """Parse a whole answer."""
    while (yield from text_until(source, output.content, OPENING)):
        if (yield from json_calls(source, output, expect(source, OPENING))):
            yield from skip(source, SPACE + "}")  # models often write an extra brace
            yield from closed_by(source, CLOSING)
