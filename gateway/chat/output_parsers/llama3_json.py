"""Llama 3: {"name": ..., "parameters": {...}} on its own line, or after <|python_tag|>; several are separated by `;`.

Without a tag, only the name distinguishes a call from an answer in JSON: it must be that of an offered tool.
"""

from __future__ import annotations

from headrace.gateway.chat.output_parsers.json_text import json_calls
from headrace.gateway.chat.output_parsers.output import Output, Tools
from headrace.gateway.chat.output_parsers.source import MismatchError, Source, Steps, literal, peek, skip, text_until

TAG = "<|python_tag|>"


def llama3_json(source: Source, output: Output, tools: Tools) -> Steps[None]:
    """Parse a whole answer."""
    known = frozenset(tools)
    yield from _calls(source, output, known)
    while (yield from text_until(source, output.content, "\n", TAG)):
        yield from _calls(source, output, known)


def _calls(source: Source, output: Output, known: frozenset[str]) -> Steps[None]:
    separator = ""
    while (yield from json_calls(source, output, _head(source, separator), known)):
        separator = ";"


def _head(source: Source, separator: str) -> Steps[None]:
    yield from skip(source)
    if separator and (yield from literal(source, separator)):
        yield from skip(source)
    if (yield from literal(source, TAG)):
        yield from skip(source)
    if (yield from peek(source)) not in ("{", "["):
        raise MismatchError
