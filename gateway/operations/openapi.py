"""Makes the OpenAPI document from the types into which requests are decoded (pure).

Names and kinds come from these types, ranges from the tables of the checks, so the document always agrees with both.
Each endpoint has its `Operation`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from headrace.common.version import headrace_version
from headrace.gateway.chat import tools
from headrace.gateway.chat.conversation import ROLES
from headrace.gateway.chat.fields import APPLIED, OF_CHATS, OF_COMPLETIONS
from headrace.gateway.edge.endpoint import EVENTS, Endpoint, Operation
from headrace.gateway.edge.exchange import TIMEOUT_HEADER
from headrace.gateway.fields import Applied
from headrace.gateway.structure import fields as structure
from headrace.protos.sampling_fields import NUMBERS

REFERENCE = "https://github.com/headrace/headrace/blob/main/docs/reference/http-api.md"
_SCHEMAS = "#/components/schemas/{name}"

_ROWS = {**APPLIED, **OF_CHATS}
# Schemas of values that their own modules decode, not the request's: by type of value and field.
_INSIDE: Mapping[str, Mapping[str, Any]] = {
    **tools.SCHEMAS,
    **structure.SCHEMAS,
    "array.content": {
        "items": {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            "required": ["type", "text"],
        }
    },
}
_TIMEOUT = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "description": "Seconds that the client waits for the whole answer, counted from the arrival of the request",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}
# A server-sent event, as tools see it.
_EVENT = {
    "type": "object",
    "description": "With stream: server-sent events. The data is JSON, and at the end of chats and completions [DONE].",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "assistant"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
    },
    "required": ["role", "content"],
}
_OF_MESSAGES = ("MessagesRequest", "PromptFields")
_OF_CHATS = ("ChatRequest", "ChatMessage", "CompletionRequest", "TokenizeRequest")
_KEYWORDS_OF = {
    "number": ("minimum", "maximum", "exclusiveMinimum"),
    "integer": ("minimum", "maximum", "exclusiveMinimum"),
    "string": ("minLength", "maxLength", "enum"),
    "array": ("minItems", "maxItems"),
    "object": ("maxProperties", "propertyNames", "additionalProperties"),
}


def document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    described = [(one, one.operation) for one in endpoints if one.operation is not None]
    told = {
        kind
        for one, operation in described
        for kind in (operation.answer, one.errors.kind, operation.unavailable)
        if kind is not None
    }
    listed = sorted(told | {kind for _, operation in described for kind in operation.requests}, key=str)
    references, schemas = msgspec.json.schema_components(listed, ref_template=_SCHEMAS)
    for name in msgspec.json.schema_components(told)[1]:
        _require(schemas[name])
    reference_of = dict(zip(map(str, listed), references, strict=True))
    for name, schema in schemas.items():
        _bound(name, schema)
    paths: dict[str, dict[str, Any]] = {}
    for one, operation in described:
        path = one.path.replace(":path}", "}")
        paths.setdefault(path, {})[one.method.lower()] = _operation(one, path, operation, reference_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "headrace",
            "version": headrace_version(),
            "description": "The OpenAI protocol, served by OpenVINO workers.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "externalDocs": {"description": "Every field", "url": REFERENCE},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "An API key, if any is set"}
            },
        },
        "security": [{}, {"key": []}],
    }


def _operation(endpoint: Endpoint, path: str, one: Operation, reference_of: Mapping[str, Any]) -> dict[str, Any]:
    words = [word for word in path.replace("{", "").replace("}", "").split("/") if word]
    schema = {"application/json": {"schema": reference_of[str(endpoint.errors.kind)]}}
    responses: dict[str, Any] = {"default": {"description": "A failure", "content": schema}}
    if not one.is_refused:
        content: dict[str, Any] = {}
        if one.answer is not None:
            content["application/json"] = {"schema": reference_of[str(one.answer)]}
        if one.stream_type:
            content[one.stream_type] = {"schema": _EVENT if one.stream_type == EVENTS else {"type": "string"}}
        content = content or {"text/plain": {"schema": {"type": "string"}}}
        responses = {"200": {"description": "The answer", "content": content}, **responses}
    if one.unavailable is not None:
        schema = {"application/json": {"schema": reference_of[str(one.unavailable)]}}
        responses["503"] = {"description": "Not ready yet, or stopping", "content": schema}
    value: dict[str, Any] = {
        "operationId": "_".join([endpoint.method.lower(), *words]).replace(".", "_"),
        "summary": one.summary,
        "responses": responses,
    }
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in one.query.items()]
    if one.generates:
        parameters.append(_TIMEOUT)
    if parameters:
        value["parameters"] = parameters
    bodies = [reference_of[str(kind)] for kind in one.requests]
    if bodies:
        body = bodies[0] if len(bodies) == 1 else {"allOf": bodies}
        value["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return value


def _require(schema: dict[str, Any]) -> None:
    """Require the fields of an answer that have a default: they are always there. Those without one may be UNSET."""
    properties = schema.get("properties", {})
    required = schema.get("required", ())
    always = [name for name, value in properties.items() if name in required or "default" in value]
    for value in properties.values():
        value.pop("default", None)
    if always:
        schema["required"] = always


def _keywords(name: str, name_of_field: str) -> Mapping[str, Any]:
    """The JSON Schema keywords that the checks define for this type's field."""
    if (name, name_of_field) == ("ChatMessage", "role"):
        return {"enum": list(ROLES)}
    rows = _ROWS | OF_COMPLETIONS if name == "CompletionRequest" else _ROWS
    row = rows.get(name_of_field)
    return row.schema if isinstance(row, Applied) else {}


def _bound(name: str, schema: dict[str, Any]) -> None:
    """Add the ranges of its fields' checks to a type's schema."""
    for name_of_field, value in schema.get("properties", {}).items():
        if value.get("default", 0) is None:
            del value["default"]
        keywords = _keywords(name, name_of_field)
        for branch in value.get("anyOf", [value]):
            kept = _KEYWORDS_OF.get(branch.get("type"), ())
            branch.update({keyword: keywords[keyword] for keyword in kept if keyword in keywords})
            if name in _OF_MESSAGES and name_of_field == "messages":
                branch["items"] = _MESSAGE
            if name in _OF_CHATS:
                branch.update(_INSIDE.get(f"{branch.get('type')}.{name_of_field}", {}))
    for ranged, number in NUMBERS.items():
        for branch in schema.get("properties", {}).get(ranged, {}).get("anyOf", ()):
            if branch.get("type") in ("number", "integer"):
                branch["exclusiveMinimum" if number.open_below else "minimum"] = number.least
                branch["maximum"] = number.greatest
