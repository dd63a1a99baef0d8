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

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

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
    skip,
    text_until,
)

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
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
    properties = tools.get(name.strip(), {}).get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    separator = "{"
    yield from skip(source)
    while not (yield from literal(source, FUNCTION_END)):
        yield from expect(source, PARAMETER)
        key = yield from matching(source, _NAME, MAX_NAME_CHARS)
        yield from expect(source, ">")
        yield from literal(source, "\n")
        output.arguments(f"{separator}{_quoted(key.strip())}: ")
        separator = ", "
        yield from _value(source, output, schemas.get(key.strip()))
        yield from skip(source)
    output.arguments("{}" if separator == "{" else "}")


def _value(source: Source, output: Output, schema: Any) -> Steps[None]:
    """Take a value and its end tag; the line break in front of the tag is not part of it."""
    kinds = types_of(schema)
    ends = "\n" + PARAMETER_END, PARAMETER_END
    if kinds <= {"string"}:
        output.arguments('"')
        end = yield from text_until(source, lambda text: output.arguments(_quoted(text)[1:-1]), *ends, whole=True)
        if end:
            output.arguments('"')
    else:
        parts: list[str] = []
        end = yield from text_until(source, parts.append, *ends)
        if end:
            output.arguments(_json_of("".join(parts), kinds))
    if not end:
        raise MismatchError
    source.pos += len(end)


def types_of(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty if it does not specify any, and then a value is a text."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(one) for one in kind}
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return {one for option in schema[name] for one in types_of(option) or {"any"}}
    values = schema.get("enum", [schema["const"]] if "const" in schema else ())
    if isinstance(values, list):
        return {"string" if isinstance(value, str) else "any" for value in values}
    return {"any"} if "$ref" in schema or "properties" in schema or "items" in schema else set()


def _json_of(text: str, kinds: set[str]) -> str:
    """A value of one of the types, as JSON; the quoted text itself if it has none of these types."""
    if "string" in kinds and text != "null":
        return _quoted(text)
    for read in (_strict_json, ast.literal_eval):
        try:
            whole = json.dumps(read(text.strip()), ensure_ascii=False, allow_nan=False)
            # Half of a surrogate pair has no encoding.
            return whole.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return _quoted(text)


def _strict_json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
