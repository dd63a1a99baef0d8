"""Values of arguments as text between tags, which the tool's schema turns into JSON: for families without JSON."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from headrace.gateway.chat.output_parsers.output import Output, Tools
from headrace.gateway.chat.output_parsers.source import MismatchError, Source, Steps, text_until


def value(source: Source, output: Output, schema: Any, *ends: str) -> Steps[None]:
    """Take a value and its end, one of `ends`. Texts are shown as they arrive. Raises `MismatchError` if none comes."""
    kinds = types_of(schema)
    if kinds <= {"string"}:
        output.arguments('"')
        end = yield from text_until(source, lambda text: output.arguments(quoted(text)[1:-1]), *ends, whole=True)
        if end:
            output.arguments('"')
    else:
        parts: list[str] = []
        end = yield from text_until(source, parts.append, *ends)
        if end:
            output.arguments(json_of_kind("".join(parts), kinds))
    if not end:
        raise MismatchError
    source.pos += len(end)


def schemas_of(tools: Tools, name: str) -> Mapping[str, Any]:
    """The schemas of a tool's arguments by their names; empty for an unknown tool."""
    properties = tools.get(name, {}).get("properties")
    return properties if isinstance(properties, Mapping) else {}


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


def json_of_kind(text: str, kinds: set[str]) -> str:
    """A written value of one of the types, as JSON; the quoted text itself if it has none of these types."""
    if "string" in kinds and text != "null":
        return quoted(text)
    for read in (_strict_json, ast.literal_eval):
        try:
            whole = json.dumps(read(text.strip()), ensure_ascii=False, allow_nan=False)
            # Half of a surrogate pair has no encoding.
            return whole.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return quoted(text)


def _strict_json(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def quoted(text: str) -> str:
    """The text as JSON."""
    return json.dumps(text, ensure_ascii=False)
