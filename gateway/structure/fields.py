"""Reads the constraint on an answer from the fields of a request.

`response_format` is OpenAI's; the other fields are those of other open-model servers. All of them result in one
Constraint. GBNF grammars are translated in a thread, because that takes up to a second. Only the worker compiles
schemas, expressions and grammars, so only it can tell whether they are usable.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from headrace.gateway.checks import invalid, json_of
from headrace.gateway.hints import ignored
from headrace.gateway.structure.gbnf import GrammarError, is_gbnf
from headrace.gateway.structure.lark import lark_of
from headrace.gateway.structure.relaxed import checker, may_need_relaxing, relaxed
from headrace.gateway.structure.tags import lark_of_tags
from headrace.protos.inference_pb2 import Choices, Constraint, JsonObject
from headrace.protos.sampling_fields import SamplingNumbers
from headrace.protos.status import Reason, StatusError

MAX_PENDING = 32
# The place of a fault, as workers write it.
_RULE = re.compile(r"\b(\w+)( at #)")
_GUIDED = ("json", "regex", "choice", "grammar")
# Fields of llama.cpp's server and of SGLang, and their kind of constraint.
_BARE = {"json_schema": "json", "regex": "regex", "grammar": "gbnf", "ebnf": "gbnf"}
# Types of response_format, and the field that each one needs.
_FORMATS: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("schema", "json_schema"),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "structural_tag": (),
}
_SCHEMA = {"type": ["object", "string"]}
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "object.response_format": {
        "properties": {
            "type": {"enum": list(_FORMATS)},
            "json_schema": {"type": "object", "properties": {"schema": {"type": "object"}}, "required": ["schema"]},
            "schema": _SCHEMA,
            "pattern": {"type": "string"},
            "grammar": {"type": "string"},
        },
        "required": ["type"],
    },
    "object.structured_outputs": {
        "properties": {
            "json": _SCHEMA,
            "json_object": {"type": "boolean"},
            "regex": {"type": "string"},
            "choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
            "grammar": {"type": "string"},
        },
    },
}
"""The fields with constraints, by JSON type and name, as the OpenAPI document shows them."""
_REFUSED_OPTIONS = ("whitespace_pattern", "disable_additional_properties")


class ConstraintFields(SamplingNumbers, kw_only=True):
    """Fields that constrain an answer, under the names of other servers of open models. All protocols share them, and
    the numbers of sampling: a msgspec struct has a single base."""

    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None


@dataclass(frozen=True, slots=True)
class Structure:
    """A constraint and the name of the field that it comes from."""

    constraint: Constraint
    field: str
    check: Callable[[str], None] | None = None
    """Checks a whole answer for what the constraint cannot express. Raises `StatusError` (SCHEMA_VIOLATED)."""
    rules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What a caller calls the rules of the grammar that hold JSON schemas."""


@dataclass(frozen=True, slots=True)
class Gbnf:
    """A grammar in GBNF and the name of the field that it comes from."""

    text: str
    field: str

    def translated(self) -> Structure:
        """The constraint. This may take a second. Raises `StatusError` if it is malformed or cannot be expressed."""
        try:
            return Structure(Constraint(grammar=lark_of(self.text)), self.field)
        except GrammarError as error:
            raise invalid(self.field, f"{self.field} cannot be honoured: {error}") from error


_Found: TypeAlias = Structure | Gbnf


def structure_of(request: ConstraintFields) -> Structure | Gbnf | None:
    """The constraint that a request sets for its answer; None for any text. Raises `StatusError` if it is malformed."""
    found = [structure for structure in _all_of(request) if structure is not None]
    if len(found) > 1:
        raise invalid(found[1].field, f"{found[1].field} and {found[0].field} exclude each other; give one of them")
    return found[0] if found else None


def in_callers_terms(error: StatusError, structure: Structure | None) -> StatusError:
    """A worker's refusal of a constraint, with the name of the caller's field. Other errors are unchanged."""
    wire_field = error.field or ""
    if structure is None or not wire_field.startswith("sampling.constraint"):
        return error
    message = error.message.replace(wire_field, structure.field)
    message = _RULE.sub(lambda found: structure.rules.get(found[1], found[1]) + found[2], message)
    return StatusError(error.reason, message, field=structure.field, retry_after_s=error.retry_after_s)


def _all_of(request: ConstraintFields) -> list[_Found | None]:
    response_format: Mapping[str, Any] | None = getattr(request, "response_format", None)
    found: list[_Found | None] = [] if response_format is None else [_of_response_format(response_format)]
    for kind in _GUIDED:
        value = getattr(request, f"guided_{kind}")
        if value is not None:
            found.append(_guided(kind, value, f"guided_{kind}"))
    for name, kind in _BARE.items():
        value = getattr(request, name)
        if value is not None and value != "":  # llama.cpp's clients send an empty text for none
            found.append(_guided(kind, value, name))
    if request.structural_tag is not None:
        found.append(_structural_tag(request.structural_tag, "structural_tag"))
    if request.structured_outputs is not None:
        found += _of_structured_outputs(request.structured_outputs)
    return found


def _of_response_format(value: Mapping[str, Any]) -> _Found | None:
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        known = "text, json_object, json_schema, regex, grammar or structural_tag"
        raise invalid("response_format.type", f"response_format.type must be {known}")
    said = [name for name in ("schema", "json_schema", "pattern", "grammar") if value.get(name) is not None]
    for name in said:
        if name not in _FORMATS[kind]:
            raise invalid(f"response_format.{name}", f"response_format.{name} does not belong to the type {kind}")
    if len(said) > 1:
        field = f"response_format.{said[1]}"
        raise invalid(field, f"{field} and response_format.{said[0]} exclude each other; give one of them")
    if kind == "text":
        return None
    if kind == "structural_tag":
        return Structure(Constraint(grammar=lark_of_tags(value, "response_format")), "response_format")
    if kind == "grammar":
        return _guided("gbnf", value.get("grammar"), "response_format.grammar")
    if kind == "regex":
        return _guided("regex", value.get("pattern"), "response_format.pattern")
    if kind in ("json_object", "json_schema") and value.get("schema") is not None:
        return _json_schema(value["schema"], "response_format.schema")
    if kind == "json_object":
        return Structure(Constraint(json_object=JsonObject()), "response_format")
    description = value.get("json_schema")
    if not isinstance(description, dict) or "schema" not in description:
        raise invalid("response_format.json_schema", "response_format.json_schema must be an object with a schema")
    for name, wanted in (("name", str), ("description", str), ("strict", bool)):
        given = description.get(name)
        if given is not None and not isinstance(given, wanted):
            field = f"response_format.json_schema.{name}"
            raise invalid(field, f"{field} must be a {'text' if wanted is str else 'bool'}")
    return _json_schema(description["schema"], "response_format")


def _of_structured_outputs(options: Mapping[str, Any]) -> list[_Found]:
    for name in _REFUSED_OPTIONS:
        if options.get(name):
            field = f"structured_outputs.{name}"
            raise StatusError(Reason.UNSUPPORTED, f"{field} is not supported; leave it out", field=field)
    found: list[_Found] = [
        _guided(kind, options[kind], f"structured_outputs.{kind}") for kind in _GUIDED if options.get(kind) is not None
    ]
    if options.get("structural_tag") is not None:
        found.append(_structural_tag(options["structural_tag"], "structured_outputs.structural_tag"))
    wants_object = options.get("json_object")
    if not isinstance(wants_object, bool | None):
        raise invalid("structured_outputs.json_object", "structured_outputs.json_object must be true or false")
    if wants_object:
        found.append(Structure(Constraint(json_object=JsonObject()), "structured_outputs.json_object"))
    if not found:
        raise invalid(
            "structured_outputs", "structured_outputs needs json, json_object, regex, choice, grammar or structural_tag"
        )
    return found


def _structural_tag(value: Any, field: str) -> Structure:
    """A structural tag given as an object or as JSON text."""
    if isinstance(value, str):
        value = json_of(field, value)
    if not isinstance(value, dict):
        raise invalid(field, f"{field} must be an object, or the same as JSON text")
    return Structure(Constraint(grammar=lark_of_tags(value, field)), field)


def _guided(kind: str, value: Any, field: str) -> _Found:
    if kind == "json":
        return _json_schema(value, field)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
            raise invalid(field, f"{field} must be a list of texts, none of them empty")
        return Structure(Constraint(choice=Choices(texts=value)), field)
    if not isinstance(value, str) or not value:
        raise invalid(field, f"{field} must be a text")
    if kind == "regex":
        return Structure(Constraint(regex=value), field)
    if kind == "grammar" and not is_gbnf(value):
        return Structure(Constraint(grammar=value), field)
    return Gbnf(value, field)


def _json_schema(value: Any, field: str) -> Structure:
    """A schema given as JSON or as JSON text."""
    if not isinstance(value, (dict, bool, str)):
        raise invalid(field, f"{field}: a JSON schema is an object")
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if not text:
        raise invalid(field, f"{field}: the JSON schema is empty")
    if not may_need_relaxing(text):
        return Structure(Constraint(json_schema=text), field)
    try:
        schema = msgspec.json.decode(text)
        found = relaxed(schema)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        found = None  # the worker says what is wrong
    if found is None:
        return Structure(Constraint(json_schema=text), field)
    for keyword in found.dropped:
        ignored(f"{field}:{keyword}", "no grammar can express it; the answer is checked at its end")
    constraint = Constraint(json_schema=msgspec.json.encode(found.schema).decode())
    return Structure(constraint, field, checker(schema, field))


class Constraints:
    """Reads constraints. At most `MAX_PENDING` grammars wait for the threads; more are refused."""

    def __init__(self, executor: Executor) -> None:
        """`executor` translates grammars."""
        self._executor = executor
        self._num_pending = 0

    async def of(self, request: ConstraintFields) -> Structure | None:
        """The constraint that a request sets for its answer; None for any text. Raises `StatusError`."""
        found = structure_of(request)
        return await self._translated(found) if isinstance(found, Gbnf) else found

    async def _translated(self, gbnf: Gbnf) -> Structure:
        if self._num_pending >= MAX_PENDING:
            raise StatusError(Reason.QUEUE_FULL, "too many grammars are being translated", retry_after_s=1.0)
        self._num_pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, gbnf.translated)
        finally:
            self._num_pending -= 1
