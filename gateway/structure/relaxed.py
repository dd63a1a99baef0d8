"""Keywords of JSON schemas that no grammar can express, and that are checked when the answer has ended.

The answer is generated without them. If it then violates the schema, it ends with an error (`SCHEMA_VIOLATED`) instead
of passing for valid. These are `uniqueItems`, and a `pattern` with look-around, word boundaries or back-references.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.gateway.checks import invalid
from headrace.protos.status import Reason, StatusError

# Steps back that a pattern may take on one text; then it counts as violated.
MAX_BACKTRACKS = 100_000
MAX_SHOWN_CHARS = 200
# Escapes and classes, in which nothing else has a meaning; and what makes a pattern more than a regular expression.
_LEXEMES = re.compile(r"(?P<more>\\[bB1-9]|\\k<|\(\?(?:[=!]|<[=!]))|\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]", re.DOTALL)
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLES = ("items", "additionalProperties", "additionalItems", "not", "contains")


@dataclass(frozen=True, slots=True)
class Relaxed:
    """A schema without the keywords that are checked at the end."""

    schema: Any
    dropped: tuple[str, ...]
    """Their names, each once."""


def relaxed(schema: Any) -> Relaxed | None:
    """The schema without such keywords; None if it has none of them. Raises RecursionError for one that nests too
    deeply."""
    dropped: dict[str, None] = {}
    found = _relaxed(schema, dropped)
    return Relaxed(found, tuple(dropped)) if dropped else None


def may_need_relaxing(schema: str) -> bool:
    """Whether the JSON text of a schema may have such keywords. Most do not, and need not be read."""
    return '"uniqueItems"' in schema or '"pattern"' in schema


def _relaxed(schema: Any, dropped: dict[str, None]) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    if made.get("uniqueItems") is True:
        del made["uniqueItems"]
        dropped["uniqueItems"] = None
    if isinstance(pattern := made.get("pattern"), str) and is_more_than_regular(pattern):
        del made["pattern"]
        dropped["pattern"] = None
    for keyword in _MAPS:
        if isinstance(held := schema.get(keyword), dict):
            made[keyword] = {name: _relaxed(child, dropped) for name, child in held.items()}
    for keyword in _LISTS:
        if isinstance(held := schema.get(keyword), list):
            made[keyword] = [_relaxed(child, dropped) for child in held]
    for keyword in _SINGLES:
        if isinstance(held := schema.get(keyword), dict):
            made[keyword] = _relaxed(held, dropped)
    return made


def is_more_than_regular(pattern: str) -> bool:
    """Whether a pattern looks around, at boundaries of words, or back at groups."""
    return any(found["more"] for found in _LEXEMES.finditer(pattern))


def checker(schema: Any, field: str) -> Callable[[str], None]:
    """Checks whole answers, as JSON text, against the schema: raises `StatusError` (SCHEMA_VIOLATED). Raises
    `StatusError` if the schema itself cannot be used; `field` is its name."""
    import jsonschema_rs

    try:
        validator = jsonschema_rs.validator_for(
            schema,
            validate_formats=False,
            pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=MAX_BACKTRACKS),
            retriever=_refuse_to_fetch,
        )
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        reason = str(error).partition("\n")[0][:MAX_SHOWN_CHARS]
        raise invalid(field, f"{field}: the JSON schema cannot be used: {reason}") from error

    def check(answer: str) -> None:
        try:
            value = msgspec.json.decode(answer)
        except msgspec.DecodeError:
            return  # not an answer of this schema, such as one that a stop string cut off
        first = next(iter(validator.iter_errors(value)), None)
        if first is not None:
            place = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in first.instance_path)
            reason = first.message.partition("\n")[0][:MAX_SHOWN_CHARS]
            problem = f"the answer violates {field} at ${place[:MAX_SHOWN_CHARS]}: {reason}; ask again"
            raise StatusError(Reason.SCHEMA_VIOLATED, problem, field=field)

    return check


def _refuse_to_fetch(address: str) -> Any:
    raise ValueError("a $ref may only name a schema within the schema")
