"""Families that write each argument as text between tags. Each is a description, from which parser and grammar follow.

Qwen3 Coder     <tool_call> <function=NAME> <parameter=KEY> value </parameter> </function> </tool_call>
Seed OSS        the same in <seed:tool_call>
MiniMax M2      <minimax:tool_call> <invoke name="NAME"> <parameter name="KEY">value</parameter> </invoke> ...
DeepSeek V3.2   <｜DSML｜function_calls> <｜DSML｜invoke name="NAME"> <｜DSML｜parameter name="KEY" string="true">...
Step 3          <｜tool_calls_begin｜> <｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME"> ...
MiniCPM 5       <function name="NAME"><param name="KEY">value</param></function>
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.gateway.chat.output_parsers.json_text import MAX_NAME_CHARS
from headrace.gateway.chat.output_parsers.output import Output, Tools, attempt
from headrace.gateway.chat.output_parsers.source import (
    MismatchError,
    Source,
    Steps,
    closed_by,
    expect,
    literal,
    matching,
    next_of,
    peek,
    skip,
    text_until,
)
from headrace.gateway.chat.output_parsers.tagged_values import quoted, schemas_of, value

CDATA = "<![CDATA["
CDATA_END = "]]>"
_NAME = re.compile(r"[^<>\n]+")
_QUOTED_NAME = re.compile(r"""[^<>\n"']+""")
_ATTRIBUTES = re.compile(r"[^<>]+")


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """The tags of a family. An instance parses a whole answer."""

    opening: str
    closing: str
    """The tags around calls; empty if there are none."""
    call: str
    """The tag of a call, before its name."""
    call_end: str
    parameter: str
    """The tag of an argument, before its name."""
    parameter_end: str
    markers: tuple[str, ...] = ()
    """What may be special tokens."""
    is_quoted: bool = True
    """Names are in quotes."""
    before: str = ""
    after: str = ""
    """Markup around each call, within the tags around all."""
    line: str = "\n"
    """What the model writes between tags."""
    around: str = ""
    """What it writes around each value."""
    holds_several: bool = True
    """One pair of tags is around all calls, instead of around each."""
    may_be_bare: bool = False
    """Models forget the tags around calls."""
    has_types: bool = False
    """An attribute tells whether a value is text or JSON."""
    has_cdata: bool = False
    """Values with markup are CDATA."""

    def __call__(self, source: Source, output: Output, tools: Tools) -> Steps[None]:
        """Parse a whole answer."""
        first = self.before or self.call
        starts = (
            [self.opening, first] if self.opening and (self.may_be_bare or self.before) else [self.opening or first]
        )
        while (yield from text_until(source, output.content, *starts)):
            taken = yield from attempt(source, output, self._first(source, output, tools))
            while taken:
                yield from skip(source)
                if self.after:
                    yield from closed_by(source, self.after)
                    yield from skip(source)
                if not self.opening or (yield from next_of(source, first, self.closing)) != first:
                    break
                taken = yield from attempt(source, output, self._call(source, output, tools))
            if taken and self.closing:
                yield from closed_by(source, self.closing)

    def _first(self, source: Source, output: Output, tools: Tools) -> Steps[None]:
        if self.opening and (yield from literal(source, self.opening)):
            yield from skip(source)
        yield from self._call(source, output, tools)

    def _call(self, source: Source, output: Output, tools: Tools) -> Steps[None]:
        if self.before:
            yield from expect(source, self.before)
            yield from skip(source)
        name, _ = yield from self._tag(source, self.call)
        if not self.opening and name not in tools:  # nothing else distinguishes it from other XML
            raise MismatchError
        output.call(name)
        schemas = schemas_of(tools, name)
        separator = "{"
        yield from skip(source)
        while not (yield from literal(source, self.call_end)):
            key, attributes = yield from self._tag(source, self.parameter)
            output.arguments(f"{separator}{quoted(key)}: ")
            separator = ", "
            schema = schemas.get(key)
            if self.has_types and "string=" in attributes:
                schema = {"type": "string" if "true" in attributes else "any"}
            # The line break in front of the end tag is not part of the value.
            if self.around:
                yield from literal(source, self.around)
            ends = [self.around + self.parameter_end, self.parameter_end] if self.around else [self.parameter_end]
            if self.has_cdata and (yield from literal(source, CDATA)):
                ends = [CDATA_END + self.parameter_end]
            yield from value(source, output, schema, *ends)
            yield from skip(source)
        output.arguments("{}" if separator == "{" else "}")

    def _tag(self, source: Source, tag: str) -> Steps[tuple[str, str]]:
        """Take a tag. Returns the name in it, and what follows the name."""
        yield from expect(source, tag)
        attributes = ""
        if not self.is_quoted:
            name = yield from matching(source, _NAME, MAX_NAME_CHARS)
        else:
            quote = '"' if (yield from literal(source, '"')) else "'"
            if quote == "'":
                yield from expect(source, quote)
            name = yield from matching(source, _QUOTED_NAME, MAX_NAME_CHARS)
            yield from expect(source, quote)
            if (yield from peek(source)) != ">":
                attributes = yield from matching(source, _ATTRIBUTES, MAX_NAME_CHARS)
        yield from expect(source, ">")
        return name.strip(), attributes


QWEN3_CODER = XmlCalls(
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
    ("<tool_call>", "</tool_call>"),
    is_quoted=False,
    around="\n",
    holds_several=False,
    may_be_bare=True,
)
SEED_OSS = XmlCalls(
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
    ("<seed:tool_call>", "</seed:tool_call>"),
    is_quoted=False,
    holds_several=False,
    may_be_bare=True,
)
MINIMAX_M2 = XmlCalls(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<invoke name=",
    "</invoke>",
    "<parameter name=",
    "</parameter>",
    ("<minimax:tool_call>", "</minimax:tool_call>"),
)
STEP3 = XmlCalls(
    "<｜tool_calls_begin｜>",
    "<｜tool_calls_end｜>",
    "<steptml:invoke name=",
    "</steptml:invoke>",
    "<steptml:parameter name=",
    "</steptml:parameter>",
    (
        "<｜tool_calls_begin｜>",
        "<｜tool_calls_end｜>",
        "<｜tool_call_begin｜>",
        "<｜tool_call_end｜>",
        "<｜tool_sep｜>",
    ),
    before="<｜tool_call_begin｜>function<｜tool_sep｜>",
    after="<｜tool_call_end｜>",
)
MINICPM5 = XmlCalls("", "", "<function name=", "</function>", "<param name=", "</param>", line="", has_cdata=True)


def _dsml(around: str) -> XmlCalls:
    mark = "｜DSML｜"
    return XmlCalls(
        f"<{mark}{around}>",
        f"</{mark}{around}>",
        f"<{mark}invoke name=",
        f"</{mark}invoke>",
        f"<{mark}parameter name=",
        f"</{mark}parameter>",
        (mark,),
        has_types=True,
    )


DEEPSEEK_V32 = _dsml("function_calls")
DEEPSEEK_V4 = _dsml("tool_calls")
