"""What text an answer must be, from the fields in which callers say it (pure).

response_format is OpenAI's; structured_outputs and the guided_ fields are those of other servers of open models. They
all end in one Constraint. Whether a schema, an expression or a grammar can be kept, the worker knows: it compiles them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.gateway.sampling import invalid
from headrace.protos.inference_pb2 import Choices, Constraint, JsonObject
from headrace.protos.status import Reason, StatusError

if TYPE_CHECKING:
    from headrace.gateway.openai_types import GenerationFields

_GUIDED = ("json", "regex", "choice", "grammar")
_REFUSED_OPTIONS = ("structural_tag", "whitespace_pattern", "disable_additional_properties")


@dataclass(frozen=True, slots=True)
class Structure:
    """A constraint and the name of the caller's field that it is from."""

    constraint: Constraint
    field: str


def structure_of(request: GenerationFields) -> Structure | None:
    """What a request asks of its answer's form; None for any text. Raises `StatusError` for what is malformed."""
    found = [structure for structure in _all_of(request) if structure is not None]
    if len(found) > 1:
        raise invalid(found[1].field, f"{found[1].field} and {found[0].field} exclude each other; give one of them")
    return found[0] if found else None


def in_callers_terms(error: StatusError, structure: Structure | None) -> StatusError:
    """A worker's refusal of a constraint under the name of the caller's field; any other error as it is."""
    wire_field = error.field or ""
    if structure is None or not wire_field.startswith("sampling.constraint"):
        return error
    message = error.message.replace(wire_field, structure.field)
    return StatusError(error.reason, message, field=structure.field, retry_after_s=error.retry_after_s)


def _all_of(request: GenerationFields) -> list[Structure | None]:
    found = [] if request.response_format is None else [_of_response_format(request.response_format)]
    for kind in _GUIDED:
        value = getattr(request, f"guided_{kind}")
        if value is not None:
            found.append(_guided(kind, value, f"guided_{kind}"))
    if request.structured_outputs is not None:
        found += _of_structured_outputs(request.structured_outputs)
    return found


def _of_response_format(value: Mapping[str, Any]) -> Structure | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure(Constraint(json_object=JsonObject()), "response_format")
    if kind != "json_schema":
        raise invalid("response_format.type", "response_format.type must be text, json_object or json_schema")
    description = value.get("json_schema")
    if not isinstance(description, dict) or "schema" not in description:
        raise invalid("response_format.json_schema", "response_format.json_schema must be an object with a schema")
    for name, wanted in (("name", str), ("description", str), ("strict", bool)):
        given = description.get(name)
        if given is not None and not isinstance(given, wanted):
            field = f"response_format.json_schema.{name}"
            raise invalid(field, f"{field} must be a {'text' if wanted is str else 'bool'}")
    return _json_schema(description["schema"], "response_format")


def _of_structured_outputs(options: Mapping[str, Any]) -> list[Structure | None]:
    for name in _REFUSED_OPTIONS:
        if options.get(name):
            field = f"structured_outputs.{name}"
            raise StatusError(Reason.UNSUPPORTED, f"{field} is not supported; leave it out", field=field)
    found: list[Structure | None] = [
        _guided(kind, options[kind], f"structured_outputs.{kind}") for kind in _GUIDED if options.get(kind) is not None
    ]
    if options.get("json_object"):
        found.append(Structure(Constraint(json_object=JsonObject()), "structured_outputs.json_object"))
    if not found:
        raise invalid("structured_outputs", "structured_outputs needs json, json_object, regex, choice or grammar")
    return found


def _guided(kind: str, value: Any, field: str) -> Structure:
    if kind == "json":
        return _json_schema(value, field)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
            raise invalid(field, f"{field} must be a list of texts, none of them empty")
        return Structure(Constraint(choice=Choices(texts=value)), field)
    if not isinstance(value, str) or not value:
        raise invalid(field, f"{field} must be a text")
    return Structure(Constraint(regex=value) if kind == "regex" else Constraint(grammar=value), field)


def _json_schema(value: Any, field: str) -> Structure:
    """A schema given as JSON or as JSON text."""
    if not isinstance(value, (dict, bool, str)):
        raise invalid(field, f"{field}: a JSON schema is an object")
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if not text:
        raise invalid(field, f"{field}: the JSON schema is empty")
    return Structure(Constraint(json_schema=text), field)
