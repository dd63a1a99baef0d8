"""Two hundred JSON schemas, for tests of structured output: written out ones, and ones put together at random."""

from __future__ import annotations

import datetime
import random
from typing import Any

import jsonschema

Schema = dict[str, Any]

FORMATS = jsonschema.FormatChecker(formats=("ipv4", "ipv6", "email", "uuid"))


@FORMATS.checks("date", raises=ValueError)
def is_date(value: object) -> bool:
    """Whether the text is a date of RFC 3339."""
    return not isinstance(value, str) or len(datetime.date.fromisoformat(value).isoformat()) == len(value)


@FORMATS.checks("date-time", raises=ValueError)
def is_date_time(value: object) -> bool:
    """Whether the text is a date and time with a time zone."""
    return not isinstance(value, str) or datetime.datetime.fromisoformat(value).tzinfo is not None


@FORMATS.checks("time", raises=ValueError)
def is_time(value: object) -> bool:
    """Whether the text is a time with a time zone."""
    return not isinstance(value, str) or datetime.time.fromisoformat(value).tzinfo is not None


def validate(value: object, schema: Schema) -> None:
    """Raise if the value is none of the schema, formats included."""
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(value)


def text(longest: int = 12, **more: Any) -> Schema:
    return {"type": "string", "maxLength": longest, **more}


def matching(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def an(kind: str) -> Schema:
    return {"type": "string", "format": kind}


def whole(least: int | None = None, most: int | None = None, **more: Any) -> Schema:
    bounds = {"minimum": least, "maximum": most}
    return {"type": "integer", **{key: value for key, value in bounds.items() if value is not None}, **more}


def record(optional: tuple[str, ...] = (), **properties: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def items(item: Schema, least: int = 0, most: int = 3) -> Schema:
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


COLOUR = {"enum": ["red", "green", "blue"]}
TREE = {
    "$defs": {"node": record(name=text(8), children=items({"$ref": "#/$defs/node"}, 0, 2))},
    "$ref": "#/$defs/node",
}
EXPRESSION = {
    "$defs": {
        "expression": {
            "anyOf": [
                whole(0, 99),
                record(op={"enum": ["+", "*"]}, left={"$ref": "#/$defs/expression"}, right=whole(-9, 9)),
            ]
        }
    },
    "type": "object",
    "properties": {"value": {"$ref": "#/$defs/expression"}},
    "required": ["value"],
    "additionalProperties": False,
}
LINKED = {
    "$defs": {
        "link": record(("next",), value=whole(0, 9), next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/link"}]})
    },
    "allOf": [{"$ref": "#/$defs/link"}],
}

WRITTEN: list[Schema] = [
    record(name=text(), age=whole(0, 120)),
    record(name=text(20, minLength=3), email=an("email")),
    record(id=an("uuid"), created=an("date-time")),
    record(day=an("date"), at=an("time")),
    record(host=an("ipv4"), port=whole(1, 65535)),
    record(length=an("duration"), name=an("hostname")),
    record(phone=matching(r"^\+?[0-9]{2,3}-[0-9]{3}-[0-9]{4}$")),
    record(code=matching(r"^[A-Z]{2}[0-9]{4}$"), colour=COLOUR),
    record(version=matching(r"^v?(0|[1-9][0-9]?)\.(0|[1-9][0-9]?)\.(0|[1-9][0-9]?)$")),
    record(plate=matching(r"^(?:[A-Z]{1,3}-[A-Z]{1,2} [1-9][0-9]{0,3})$")),
    record(hex=matching("^#[0-9a-f]{6}$"), word=matching("^(mill|race|wheel)s?$")),
    record(unanchored=matching("[0-9]{2}") | {"maxLength": 6}),
    TREE,
    EXPRESSION,
    LINKED,
    {"$ref": "#/definitions/point", "definitions": {"point": record(x=whole(-5, 5), y=whole(-5, 5))}},
    record(shape={"$ref": "#/$defs/shape"}) | {"$defs": {"shape": {"enum": ["disc", "square", "ring"]}}},
    items(whole(1, 6), 2, 5),
    items(items({"type": "boolean"}, 2, 2), 2, 2),
    items(record(k=text(5), v={"type": ["integer", "null"]}), 1, 3),
    {"type": "array", "prefixItems": [whole(0, 9), text(6), {"type": "boolean"}], "items": False, "minItems": 3},
    {"type": "array", "prefixItems": [{"const": "v1"}], "items": whole(0, 9), "minItems": 2, "maxItems": 4},
    {"enum": [1, "one", None, True, [1], {"one": 1}]},
    {"enum": ["naïve", "日本", "🐉", 'quo"te', "back\\slash", "new\nline", "tab\t", "/"]},
    {"const": {"fixed": [1, 2, {"deep": None}]}},
    record(kind={"const": "cat"}, lives={"const": 9}),
    record(größe=whole(1, 9), 名前=text(6), **{"🐉": {"type": "boolean"}, 'a"b\\c': {"type": "null"}, "": whole(0, 1)}),
    record(**{"with space": text(4), "with/slash": text(4), "with.dot": text(4), "$dollar": whole(0, 9)}),
    {"anyOf": [record(a=whole(0, 9)), record(b=text(5)), {"type": "null"}]},
    record(
        value={
            "anyOf": [
                {"type": "string", "maxLength": 4},
                whole(0, 9),
                {"type": "array", "items": whole(0, 9), "maxItems": 2},
            ]
        }
    ),
    {
        "oneOf": [
            record(type={"const": "circle"}, r=whole(1, 9)),
            record(type={"const": "box"}, w=whole(1, 9), h=whole(1, 9)),
        ]
    },
    {
        "allOf": [
            {"type": "object", "properties": {"a": whole(0)}, "required": ["a"]},
            {"properties": {"a": whole(None, 9)}, "required": ["b"]},
        ],
        "properties": {"b": text(3)},
        "maxProperties": 2,
    },
    {"type": "object", "additionalProperties": whole(0, 9), "maxProperties": 3},
    {
        "type": "object",
        "properties": {"a": whole(0, 9)},
        "additionalProperties": {"type": "boolean"},
        "required": ["a"],
    },
    {"type": "object", "patternProperties": {"^x_[a-c]$": whole(0, 9)}, "additionalProperties": False},
    {"type": "object", "minProperties": 1, "additionalProperties": text(4)},
    record(("b", "c", "d"), a=whole(0, 9), b=whole(0, 9), c=whole(0, 9), d=whole(0, 9)),
    record(("a", "b"), a=text(4), b=text(4)),
    {"type": "object"},
    {"type": ["string", "number", "null"], "maxLength": 5},
    {"type": "boolean"},
    {"type": "null"},
    whole(-17, 23),
    whole(100, 99999),
    whole(0, 1000, multipleOf=25),
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "exclusiveMinimum": -1.5, "exclusiveMaximum": 2.25},
    {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.25},
    text(30, minLength=10),
    {"type": "string", "minLength": 1, "maxLength": 1},
    record(exact=text(5, minLength=5), empty=text(0)),
    record(a=record(b=record(c=record(d=record(e=COLOUR))))),
    record(m=items(items(items(whole(0, 1), 1, 2), 1, 2), 1, 2)),
    record(
        when=an("date") | {"description": "format is a keyword here", "title": "when"}, format=text(4), type=text(4)
    ),
    record(properties=record(items=text(3)), required={"type": "boolean"}, enum=items(text(3), 0, 2)),
    record(both=an("date") | {"pattern": "^20"}, maybe={"anyOf": [an("date-time"), {"type": "null"}]}),
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/s",
        **record(ok={"type": "boolean"}),
    },
    record(
        role={"enum": ["system", "user"]},
        content={"anyOf": [text(10), items(record(type={"const": "text"}, text=text(8)), 1, 2)]},
    ),
    record(
        name={"const": "get_weather"},
        arguments=record(("unit",), city=text(12), unit={"enum": ["C", "F"]}, days=whole(1, 7)),
    ),
]


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """A schema of at most `depth` levels, put together from all that is supported."""
    leaves = (
        lambda: text(rng.randint(1, 12)),
        lambda: text(12, minLength=rng.randint(1, 5)),
        lambda: whole(-rng.randint(0, 50), rng.randint(0, 500)),
        lambda: {"type": "number", "minimum": 0, "maximum": rng.randint(1, 50)},
        lambda: {"type": "boolean"},
        lambda: {"type": ["null", "integer"], "minimum": 0, "maximum": 9},
        lambda: {"enum": rng.sample(["a", "ß", 1, None, "two words", '"', False, 2.5], 3)},
        lambda: {"const": rng.choice(["x", 0, None, "é\n"])},
        lambda: an(rng.choice(["date", "date-time", "ipv4", "uuid", "email"])),
        lambda: matching(rng.choice(["^[a-f]{2,4}$", "^(ab|cd)+$", r"^\d{1,3}%$", r"^[^\s]{1,5}$"])) | {"maxLength": 8},
    )
    if depth == 0 or rng.random() < 0.15:
        return rng.choice(leaves)()
    kind = rng.random()
    if kind < 0.2:
        least = rng.randint(0, 2)
        return items(random_schema(rng, depth - 1), least, least + rng.randint(0, 2))
    if kind < 0.35:
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(2, 3))]}
    names = rng.sample(["id", "name", "größe", "tags", "x y", "données", "kind", "n"], rng.randint(1, 4))
    optional = tuple(name for name in names if rng.random() < 0.25)
    return record(optional, **{name: random_schema(rng, depth - 1) for name in names})


def all_schemas(count: int = 200) -> list[Schema]:
    """The written ones and as many random ones as are missing."""
    rng = random.Random(7)
    return [*WRITTEN, *(random_schema(rng, rng.randint(1, 3)) for _ in range(count - len(WRITTEN)))][:count]
