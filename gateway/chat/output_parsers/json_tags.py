"""Families that write calls as JSON between tags. Each is a description, from which parser and grammar follow."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from headrace.gateway.chat.output_parsers.json_text import json_calls
from headrace.gateway.chat.output_parsers.output import Output, Tools
from headrace.gateway.chat.output_parsers.source import SPACE, Source, Steps, closed_by, expect, peek, skip, text_until


class Layout(enum.Enum):
    """Where several calls stand. Parsers read every layout, because models mix them up."""

    TAGS = enum.auto()
    """Each in a pair of tags of its own."""
    LIST = enum.auto()
    """In a JSON array."""
    LINES = enum.auto()
    """Each on its line, in one pair of tags."""


@dataclass(frozen=True, slots=True)
class JsonTags:
    """Calls between two tags. An instance parses a whole answer."""

    opening: str
    closing: str
    """Empty if nothing marks the end."""
    layout: Layout = Layout.TAGS
    name: str = "name"
    arguments: str = "arguments"
    number: str = ""
    """The key of a call's number, which comes first; empty if calls have none."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All of the markup."""
        return tuple(filter(None, (self.opening, self.closing)))

    def __call__(self, source: Source, output: Output, tools: Tools) -> Steps[None]:
        """Parse a whole answer."""
        while (yield from text_until(source, output.content, self.opening)):
            taken = yield from json_calls(source, output, expect(source, self.opening))
            if not self.closing or not taken:
                continue
            while taken:
                yield from skip(source, SPACE + "}")  # models often write an extra brace
                taken = (yield from peek(source)) in ("{", "[") and (yield from json_calls(source, output))
            yield from closed_by(source, self.closing)


HERMES = JsonTags("<tool_call>", "</tool_call>")
GRANITE = JsonTags("<|tool_call|>", "", Layout.LIST)
NEMOTRON = JsonTags("<TOOLCALL>", "</TOOLCALL>", Layout.LIST)
JAMBA = JsonTags("<tool_calls>", "</tool_calls>", Layout.LIST)
MINIMAX_M1 = JsonTags("<tool_calls>", "</tool_calls>", Layout.LINES)
COHERE = JsonTags("<|START_ACTION|>", "<|END_ACTION|>", Layout.LIST, "tool_name", "parameters", number="tool_call_id")
