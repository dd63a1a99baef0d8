"""Phi 4 mini: functools[{"name": ..., "arguments": {...}}, ...], or <|tool_call|> and a call or an array of calls."""

from __future__ import annotations

from headrace.gateway.chat.output_parsers.json_text import json_calls
from headrace.gateway.chat.output_parsers.output import Output, Tools
from headrace.gateway.chat.output_parsers.source import Source, Steps, closed_by, expect, skip, text_until

WORD = "functools"
OPENING = "<|tool_call|>"
CLOSING = "<|/tool_call|>"


def phi4(source: Source, output: Output, tools: Tools) -> Steps[None]:
    """Parse a whole answer."""
    while end := (yield from text_until(source, output.content, WORD + "[", OPENING)):
        head = WORD if end.startswith(WORD) else OPENING
        if (yield from json_calls(source, output, expect(source, head))):
            yield from skip(source)
            yield from closed_by(source, CLOSING)
