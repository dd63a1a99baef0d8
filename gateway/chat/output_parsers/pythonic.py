"""Families that write calls in Python: [f(a=1, b="x"), g()], in a list or in tags. Each is a description.

Llama 3.2 and 4, LFM2, ToolACE   in a list, on a line of its own or in tags
MiniCPM 3                        on lines of their own in a block of code, in tags
Olmo 3                           on lines of their own in <function_calls>

The calls must be those of offered tools, with arguments by name and of literals only: anything else is text. In tags,
LFM2 may also write them as JSON, if the prompt asks for that.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.gateway.chat.output_parsers.json_text import MAX_NAME_CHARS, JsonCall
from headrace.gateway.chat.output_parsers.output import Output, Tools, attempt
from headrace.gateway.chat.output_parsers.source import (
    SPACE,
    MismatchError,
    Source,
    Steps,
    closed_by,
    expect,
    has,
    literal,
    matching,
    peek,
    skip,
    text_until,
)

MAX_VALUE_CHARS = 1024 * 1024
# Maximum characters of a value outside of its texts. Python parses 32 KiB of them in about 20 ms, and nothing else runs
# then.
MAX_CODE_CHARS = 32 * 1024
_CHARS_OF_A_TEXT = 8
"""The number of characters for which a text of any length counts as code."""
_NAME = re.compile(r"[\w.-]+")
_PLAIN = re.compile(r"""[^'"\\()\[\]{},]+""")
_NAMED = {"true": True, "false": False, "null": None, "none": None}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_FENCE = "```"
_LINE_START = re.compile(r"[\w{]")
_IN_TEXT = re.compile(r"\\.|[\x00-\x1f]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """Where calls stand. An instance parses a whole answer."""

    tags: Sequence[tuple[str, str]]
    """Pairs of tags around calls."""
    may_be_bare: bool = False
    """A list of calls may stand on a line without tags."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All of the markup."""
        return tuple(tag for pair in self.tags for tag in pair)

    def __call__(self, source: Source, output: Output, tools: Tools) -> Steps[None]:
        """Parse a whole answer."""
        ends = ["\n"] * self.may_be_bare + [opening for opening, _ in self.tags]
        if self.may_be_bare:
            yield from self._calls(source, output, tools)
        while (yield from text_until(source, output.content, *ends)):
            yield from self._calls(source, output, tools)

    def _calls(self, source: Source, output: Output, tools: Tools) -> Steps[None]:
        """Take the calls if they come next."""
        closing = ""
        is_list = False

        def first() -> Steps[None]:
            nonlocal closing, is_list
            yield from skip(source)
            for opening, end in self.tags:
                if (yield from literal(source, opening)):
                    closing = end
            yield from skip(source)
            if closing and (yield from literal(source, _FENCE)):
                yield from literal(source, "python")
                yield from skip(source)
            if not closing:
                yield from expect(source, "[")
                is_list = True
            else:
                is_list = yield from literal(source, "[")
            yield from skip(source)
            yield from any_call()

        def following() -> Steps[None]:
            if (yield from literal(source, ",")):
                yield from skip(source)
            yield from any_call()

        def any_call() -> Steps[None]:
            if closing and (yield from peek(source)) == "{":
                yield from JsonCall(output, frozenset(tools)).steps(source)
            else:
                yield from _call(source, output, tools)

        taken = yield from attempt(source, output, first())
        while taken:
            yield from skip(source)
            if is_list and (yield from literal(source, "]")):
                break
            char = yield from peek(source)
            if char != "," and (is_list or _LINE_START.match(char) is None):
                break
            taken = yield from attempt(source, output, following())
        if taken and closing:
            yield from skip(source, SPACE + "`")
            yield from closed_by(source, closing)
        elif taken:
            yield from skip(source)


def _call(source: Source, output: Output, tools: Tools) -> Steps[None]:
    name = yield from matching(source, _NAME, MAX_NAME_CHARS)
    if name not in tools:
        raise MismatchError
    yield from expect(source, "(")
    yield from skip(source)
    if (yield from literal(source, ")")):
        output.call(name)
        output.arguments("{}")
        return
    shown = False
    while not (shown and (yield from literal(source, ")"))):
        key = yield from matching(source, _NAME, MAX_NAME_CHARS)
        yield from skip(source)
        yield from expect(source, "=")
        text = yield from _expression(source)
        value = _json_of(text)
        if not shown:
            output.call(name)
        output.arguments(f"{', ' if shown else '{'}{json.dumps(key, ensure_ascii=False)}: {value}")
        shown = True
        if (yield from literal(source, ",")):
            yield from skip(source)
    output.arguments("}")


def _expression(source: Source) -> Steps[str]:
    """Parse an expression up to the next comma or bracket."""
    parts: list[str] = []
    num_chars = num_code_chars = 0
    stack: list[str] = []
    while True:
        char = yield from peek(source)
        if not char:
            raise MismatchError
        found = _PLAIN.match(source.text, source.pos)
        code = ""  # what Python is to read, if that is not what the model wrote
        if found is not None:
            part = found[0]
        elif not stack and char in ",)":
            return "".join(parts)
        elif char in "'\"":
            part = yield from _quoted(source)
            # Models break lines within a text, which Python allows between three quotes only.
            code = part if part.startswith(char * 3) else _IN_TEXT.sub(_escaped, part)
        elif stack and char == stack[-1]:
            part = stack.pop()
        elif char in _CLOSERS:
            stack.append(_CLOSERS[char])
            part = char
        elif char == ",":
            part = char
        else:
            raise MismatchError
        source.pos += len(part)
        parts.append(code or part)
        num_chars += len(part)
        num_code_chars += _CHARS_OF_A_TEXT if code else len(part)
        if num_chars > MAX_VALUE_CHARS or num_code_chars > MAX_CODE_CHARS:
            raise MismatchError


def _escaped(found: re.Match[str]) -> str:
    """A control character as an escape sequence; a backslash in front of it stands for itself."""
    written = found[0]
    if written[-1] >= " ":
        return written
    return "\\\\" * (len(written) - 1) + f"\\x{ord(written[-1]):02x}"


def _quoted(source: Source) -> Steps[str]:
    """The string literal that comes next, quotes included, without taking it."""
    quote = source.text[source.pos]
    if (yield from has(source, 3)) and source.text.startswith(quote * 3, source.pos):
        quote *= 3
    num_chars = len(quote)
    while True:
        if not (yield from has(source, num_chars + len(quote))):
            raise MismatchError
        at = source.pos + num_chars
        if source.text[at] == "\\":
            num_chars += 2
        elif source.text.startswith(quote, at):
            return source.text[source.pos : at + len(quote)]
        else:
            num_chars += 1
        if num_chars > MAX_VALUE_CHARS:
            raise MismatchError


def _json_of(text: str) -> str:
    """A Python literal as JSON. Raises `MismatchError` if the text is not a literal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about needless backslashes
            value = _value(ast.parse(text.strip(), mode="eval").body)
        whole = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return whole.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise MismatchError from error


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and not isinstance(node.value, bytes | complex | type(...)):
        return node.value
    if isinstance(node, ast.Name) and node.id in _NAMED:
        return _NAMED[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(one) for key, one in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand)
        if isinstance(value, int | float):
            return -value
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key that is no text")


PYTHONIC = PythonCalls(
    (("<|python_start|>", "<|python_end|>"), ("<|tool_call_start|>", "<|tool_call_end|>")), may_be_bare=True
)
OLMO3 = PythonCalls((("<function_calls>", "</function_calls>"),))
