"""Prepares a caller's JSON schema for the grammar compiler. Pure.

Where the compiler would accept answers that violate the schema, the schema is narrowed or refused:

- Dates must be in the calendar, in the years 1 to 9999, and times have no leap seconds, so any parser accepts them.
- Bounds of numbers that the compiler cannot express, such as those of floats and of integers with 64 bits, become the
  next ones that it can. Bounds that leave no number are refused; the compiler would end the process.
- `propertyNames` becomes `patternProperties` or `properties`, unless it names keywords that these cannot express.
- Unknown formats are annotations, as the standard has it.
- `minProperties` is refused if only names chosen by the model could reach it, because it may choose a name twice.
- A schema cannot set the compiler's own options.
- `$ref` must name a schema in a place that is narrowed and counted too: by a JSON pointer, below keywords that hold
  schemas or `components/schemas`. Schemas lose their `$id`, which could move the root of pointers.
- The patterns of `patternProperties` are compared in pairs, at most `MAX_PATTERN_PAIRS` in a schema or grammar.
- At most `MAX_PATTERNS` patterns may apply to one text. The compiler's time grows exponentially with them, and nothing
  can interrupt it.

Answers are compact, without white space between tokens: docs/decisions/structured-output.md#compact-json.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, cast
from urllib.parse import quote, unquote

import msgspec

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
# Every fourth year, but only every fourth century.
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
# Formats that the compiler enforces.
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"},
)
# The compiler reads bounds of integers as floats and as 64 bits, and those of other numbers with 18 digits.
_MOST_INTEGER = 2**63 - 2**11
_MOST_NUMBER = 10**18
_LEAST_FRACTION = 1e-60
_LOWER_BOUNDS = ("minimum", "exclusiveMinimum")
_UPPER_BOUNDS = ("maximum", "exclusiveMaximum")
# Keywords of propertyNames that say nothing about a name, which is a string.
_OF_ANY_NAME = frozenset({"type", "title", "description", "$comment", "examples", "default", "deprecated"})
_NARROWER = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}

# Keywords by the form in which their value holds subschemas.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_IDS = ("$id", "id")
_SINGLES = ("items", "additionalProperties", "additionalItems")

MAX_PATTERNS = 8
# 100 patterns of one object take 0.05 s, 200 take 0.9 s.
MAX_PATTERN_PAIRS = 5000
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
# The parts of a grammar that may contain %json as text, as the compiler reads them: strings, comments, expressions and
# names of special tokens; and %json itself. The time is linear: no part is read twice, even if its end is missing.
_LEXEMES = re.compile(r'"(?:\\.|[^"\\])*+"?|(?:#|//)[^\n]*|/(?:\\.|[^/\\])++/?|<[^<>\s]++|(?P<json>%json)', re.DOTALL)
_RULE = re.compile(r"^(\w+)(?:\[[^\]]*\])?:", re.MULTILINE)
_OPTIONS = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":", "lenient": False}


# Schemas that are looked at to find the one at fault.
MAX_SEARCHED = 200


class UnsupportedSchema(Exception):
    """A JSON Schema that cannot be enforced. The text names the keyword and says why."""


def prepared(schema: str) -> str:
    """The narrowed schema; both are JSON text. Raises `UnsupportedSchema`."""
    try:
        root = msgspec.json.decode(schema)
        if root is True:
            root = {}
        if not isinstance(root, dict):
            raise UnsupportedSchema("no answer satisfies it" if root is False else "it is not an object")
        if "x-guidance" in root:
            raise UnsupportedSchema("x-guidance cannot be set; leave it out")
        narrowed, num_pairs = _narrowed_root(root)
        _check_pairs(num_pairs)
        return json.dumps({**narrowed, "x-guidance": _OPTIONS})
    except msgspec.DecodeError as error:
        raise UnsupportedSchema(f"it is not JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise UnsupportedSchema("it is not UTF-8") from error
    except RecursionError as error:
        raise UnsupportedSchema("it is nested too deeply") from error


def prepared_within(grammar: str) -> str:
    """Narrow the JSON schemas (`%json {...}`) of a Lark grammar in the same way. Each keeps its options for white
    space. Raises `UnsupportedSchema`."""
    parts = []
    position = 0
    num_pairs = 0
    while (found := _LEXEMES.search(grammar, position)) is not None:
        parts.append(grammar[position : found.end()])
        position = found.end()
        if found["json"] is not None:
            start = cast(re.Match[str], _SPACE.match(grammar, position)).end()
            narrowed, more_pairs, position = _narrowed_at(grammar, start)
            num_pairs += more_pairs
            _check_pairs(num_pairs)
            parts.append(f" {narrowed}")
    return "".join(parts) + grammar[position:]


def schemas_within(grammar: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON schemas of a Lark grammar that can be read, each with the name of its rule."""
    position, rule = 0, ""
    while (found := _LEXEMES.search(grammar, position)) is not None:
        names = _RULE.findall(grammar, position, found.end())
        rule = names[-1] if names else rule
        position = found.end()
        if found["json"] is None:
            continue
        start = cast(re.Match[str], _SPACE.match(grammar, position)).end()
        try:
            schema, position = _DECODER.raw_decode(grammar, start)
        except (ValueError, RecursionError):
            return
        if isinstance(schema, dict):
            yield rule, schema


def path_at_fault(root: dict[str, Any], is_supported: Callable[[str], bool]) -> str:
    """The path, such as #/properties/a, of the smallest part of an unsupported schema that is not supported by itself;
    empty if that cannot be told. `is_supported` is given schemas as JSON text, at most `MAX_SEARCHED`."""
    shared = {name: root[name] for name in ("$defs", "definitions", "components") if name in root}
    num_searched = 0
    path = "#"
    schema = root
    while True:
        for place, child in _children(schema):
            if not isinstance(child, dict):
                continue
            num_searched += 1
            if num_searched > MAX_SEARCHED:
                return path
            if not is_supported(json.dumps({**shared, **child})):
                path, schema = f"{path}/{place}", child
                break
        else:
            return path


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas inside of a schema, by their place in it. Definitions come last: others refer to them."""
    for keyword in ("properties", "patternProperties", *_LISTS, *_SINGLES, "$defs", "definitions"):
        held = schema.get(keyword)
        if keyword in _MAPS and isinstance(held, dict):
            yield from ((f"{keyword}/{name.replace('~', '~0').replace('/', '~1')}", held[name]) for name in held)
        elif keyword in _LISTS and isinstance(held, list):
            yield from ((f"{keyword}/{i}", child) for i, child in enumerate(held))
        elif keyword in _SINGLES and isinstance(held, dict):
            yield keyword, held


def _narrowed_at(grammar: str, start: int) -> tuple[str, int, int]:
    """The narrowed schema whose JSON begins at `start`, its pairs of patterns, and where its JSON ends."""
    try:
        schema, end = _DECODER.raw_decode(grammar, start)
        narrowed, num_pairs = _narrowed_root(schema) if isinstance(schema, dict) else (schema, 0)
        return json.dumps(narrowed), num_pairs, end
    except ValueError as error:
        raise UnsupportedSchema(f"the schema after %json is not JSON: {error}") from error
    except RecursionError as error:
        raise UnsupportedSchema("the schema after %json is nested too deeply") from error


def _narrowed_root(root: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The narrowed schema, with the caller's own options, but never lenient; and its pairs of patterns."""
    num_pairs = _num_pairs(root)
    narrowed: dict[str, Any] = _narrowed(root, root)
    if (schemas := _of_components(root)) is not None:
        of_components = {name: _narrowed(child, root) for name, child in schemas.items()}
        narrowed["components"] = {**root["components"], "schemas": of_components}
    if isinstance(options := root.get("x-guidance"), dict):
        narrowed["x-guidance"] = {**options, "lenient": False}
    return narrowed, num_pairs


def _narrowed(schema: Any, root: dict[str, Any], base_id: str = "") -> Any:
    """The narrowed part of a schema. `base_id` is the `$id` of a schema around it, within the root."""
    if not isinstance(schema, dict):
        return schema
    if schema is not root:
        ids = [own_id for name in _IDS if isinstance(own_id := schema.get(name), str) and not own_id.startswith("#")]
        base_id = next(filter(None, ids), base_id)
    narrowed = {name: value for name, value in schema.items() if name not in _IDS or not isinstance(value, str)}
    if narrowed.get("uniqueItems") is False:
        del narrowed["uniqueItems"]
    _narrow_bounds(narrowed)
    if isinstance(reference := schema.get("$ref"), str):
        if base_id:
            raise UnsupportedSchema(f"it has a $ref below $id {base_id[:100]}; leave out this $id")
        narrowed["$ref"] = _target(root, reference)[0]
    for keyword in _MAPS:
        if isinstance(schema.get(keyword), dict):
            narrowed[keyword] = {name: _narrowed(child, root, base_id) for name, child in schema[keyword].items()}
    for keyword in _SINGLES:
        if keyword in schema:
            narrowed[keyword] = _narrowed(schema[keyword], root, base_id)
    for keyword in _LISTS:
        if isinstance(schema.get(keyword), list):
            narrowed[keyword] = [_narrowed(child, root, base_id) for child in schema[keyword]]
    _check_min_properties(schema)
    _narrow_property_names(narrowed)
    _narrow_format(narrowed)
    return narrowed


def _has_known_format(schema: dict[str, Any]) -> bool:
    return isinstance(schema.get("format"), str) and schema["format"] in _FORMATS


def _narrow_format(schema: dict[str, Any]) -> None:
    """Replace a format by a pattern, and remove one that is unknown."""
    if isinstance(schema.get("format"), str) and not _has_known_format(schema):
        del schema["format"]
    pattern = _NARROWER.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    if pattern is None:
        return
    del schema["format"]
    if "pattern" not in schema:
        schema["pattern"] = pattern
    elif isinstance(others := schema.get("allOf", []), list):
        schema["allOf"] = [*others, {"pattern": pattern}]
    else:
        raise UnsupportedSchema("allOf must be an array")


def _narrow_bounds(schema: dict[str, Any]) -> None:
    """Move bounds that the compiler cannot express to the next ones that it can. Raises `UnsupportedSchema` if no
    number is left between them."""
    is_integer = schema.get("type") == "integer"
    most = _MOST_INTEGER if is_integer else _MOST_NUMBER
    for name in (*_LOWER_BOUNDS, *_UPPER_BOUNDS):
        bound = schema.get(name)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            continue
        is_lower = name in _LOWER_BOUNDS
        if (bound > most) if is_lower else (bound < -most):
            raise UnsupportedSchema(f"{name} is beyond {most if is_lower else -most}")
        if not is_integer and 0 < abs(bound) < _LEAST_FRACTION:
            away_from_zero = (bound > 0) is is_lower
            bound = math.copysign(_LEAST_FRACTION, bound) if away_from_zero else 0
        schema[name] = max(-most, min(most, bound))


def _narrow_property_names(schema: dict[str, Any]) -> None:
    """Express `propertyNames` by other keywords. Raises `UnsupportedSchema` if there are none."""
    if "propertyNames" not in schema:
        return
    names = schema.pop("propertyNames")
    if names is True:
        return
    said = {} if not isinstance(names, dict) else {k: v for k, v in names.items() if k not in _OF_ANY_NAME}
    if not isinstance(names, dict) or names.get("type", "string") != "string" or len(said) > 1:
        raise UnsupportedSchema("propertyNames may be strings with one pattern or an enum")
    if not said:
        return
    ((keyword, value),) = said.items()
    others = schema.get("additionalProperties", True)
    if others is False:
        raise UnsupportedSchema("propertyNames beside additionalProperties false; leave propertyNames out")
    if keyword == "enum" and isinstance(value, list) and all(isinstance(name, str) for name in value):
        if "patternProperties" in schema:
            raise UnsupportedSchema("propertyNames with an enum beside patternProperties; leave one of them out")
        known = schema.get("properties")
        known = known if isinstance(known, dict) else {}
        schema["properties"] = {name: known.get(name, others) for name in dict.fromkeys(value)}
    elif keyword == "pattern" and isinstance(value, str):
        if "properties" in schema or "patternProperties" in schema:
            raise UnsupportedSchema("propertyNames with a pattern beside properties; leave one of them out")
        schema["patternProperties"] = {value: others}
    else:
        raise UnsupportedSchema("propertyNames may be strings with one pattern or an enum")
    schema["additionalProperties"] = False


def _check_min_properties(schema: dict[str, Any]) -> None:
    least, required = schema.get("minProperties"), schema.get("required")
    names = required if isinstance(required, list) else []
    num_required = len({name for name in names if isinstance(name, str)})
    if isinstance(least, int) and least > max(1, num_required):
        raise UnsupportedSchema(f"minProperties {least} is over the number of required properties, {num_required}")


def _check_pairs(num_pairs: int) -> None:
    if num_pairs > MAX_PATTERN_PAIRS:
        problem = f"patternProperties have {num_pairs} pairs of patterns of one object, and at most {MAX_PATTERN_PAIRS}"
        raise UnsupportedSchema(f"{problem} are supported, which is 100 patterns in one object; join some patterns")


def _num_pairs(root: dict[str, Any]) -> int:
    """The pairs of patterns in `patternProperties`. Refuses a schema in which too many patterns and formats apply to
    one text."""
    counts: dict[int, int] = {}
    num_names: list[int] = []
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        schema, is_ready = waiting.pop()
        if not isinstance(schema, dict) or (id(schema) in counts and not is_ready):
            continue
        reference = schema.get("$ref")
        target = _target(root, reference)[1] if isinstance(reference, str) else None
        together = [*_listed(schema, "allOf"), target]
        either = [*_listed(schema, "anyOf"), *_listed(schema, "oneOf")]
        if is_ready:
            own = isinstance(schema.get("pattern"), str) + _has_known_format(schema)
            of_one = max((counts.get(id(child), 0) for child in either), default=0)
            counts[id(schema)] = own + of_one + sum(counts.get(id(child), 0) for child in together)
            continue
        num_names.append(len(_mapped(schema, "patternProperties")))
        counts[id(schema)] = 0  # a schema that refers to itself adds nothing
        waiting.append((schema, True))
        elsewhere = [child for keyword in _MAPS for child in _mapped(schema, keyword)]
        elsewhere += [child for keyword in ("prefixItems", "items") for child in _listed(schema, keyword)]
        waiting += ((child, False) for child in (*together, *either, *elsewhere, *map(schema.get, _SINGLES)))
    if (most := max(counts.values())) > MAX_PATTERNS:
        problem = f"{most} patterns and formats apply to one text, and at most {MAX_PATTERNS} are supported"
        raise UnsupportedSchema(f"{problem}; write them as one pattern")
    return sum(n * (n - 1) // 2 for n in num_names)


def _listed(schema: dict[str, Any], keyword: str) -> list[Any]:
    children = schema.get(keyword)
    return children if isinstance(children, list) else []


def _mapped(schema: dict[str, Any], keyword: str) -> list[Any]:
    children = schema.get(keyword)
    return list(children.values()) if isinstance(children, dict) else []


def _of_components(root: dict[str, Any]) -> dict[str, Any] | None:
    """The schemas of an OpenAPI document."""
    components = root.get("components")
    schemas = components.get("schemas") if isinstance(components, dict) else None
    return schemas if isinstance(schemas, dict) else None


def _target(root: dict[str, Any], reference: str) -> tuple[str, Any]:
    """A reference in its plainest form, and the schema that it names. Raises `UnsupportedSchema` if it names none."""
    first, *names = (name.replace("~1", "/").replace("~0", "~") for name in unquote(reference[1:]).split("/"))
    found: Any = root if reference.startswith("#") and not first else None
    rest = iter(names)
    if names[:2] == ["components", "schemas"] and found is root:
        found = _child(_of_components(root), names[2] if len(names) > 2 else "")
        rest = iter(names[3:])
    for keyword in rest:
        held = found.get(keyword) if isinstance(found, dict) else None
        if isinstance(held, dict if keyword in _MAPS else list if keyword in _LISTS else ()):
            found = _child(held, next(rest, ""))
        else:
            found = held if keyword in _SINGLES else None
    if not isinstance(found, dict | bool):
        problem = f"$ref {reference[:100]} does not name a schema within this schema"
        raise UnsupportedSchema(f"{problem} by its path, such as #/$defs/NAME or #/properties/NAME")
    escaped = (quote(name.replace("~", "~0").replace("/", "~1"), safe="") for name in names)
    return "/".join(("#", *escaped)), found


def _child(held: dict[str, Any] | list[Any] | None, name: str) -> Any:
    if isinstance(held, list):
        is_index = name.isascii() and name.isdecimal() and len(name) < 8
        return held[int(name)] if is_index and int(name) < len(held) else None
    return held.get(name) if held is not None else None
