"""The OpenAPI document describes all endpoints, and responses match it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import msgspec
import pytest

from headrace.gateway.operations.openapi import document
from tests.gateway.encoder_model import SCORES, VECTORS, cards
from tests.gateway.served import served

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI = [{"role": "user", "content": "hi"}]
ENDPOINTS = served()
DOCUMENT = document(ENDPOINTS)
REQUESTS = {kind for one in ENDPOINTS if one.operation is not None for kind in one.operation.requests}
# Paths for people and browsers, which no program needs described.
UNDESCRIBED = {("/", "get"), ("/console", "get")}


@pytest.fixture(autouse=True)
def _fresh(router: Any) -> None:
    router.reset()


async def test_it_lists_every_path_and_method_that_is_served_and_no_other(gateway: Any) -> None:
    served = {
        (path.replace(":path", ""), method.lower())
        for path, method in gateway.edge.paths
        if not path.startswith("/console/")
    } - UNDESCRIBED
    described = {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == served


async def test_it_is_served_and_valid(gateway: Any) -> None:
    response = await gateway.http.get("/openapi.json")
    assert response.json() == json.loads(msgspec.json.encode(DOCUMENT))
    ids = [one["operationId"] for methods in DOCUMENT["paths"].values() for one in methods.values()]
    assert len(ids) == len(set(ids))
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("kind", sorted(REQUESTS, key=str))
async def test_every_field_of_a_request_is_described_with_its_type(kind: type[msgspec.Struct]) -> None:
    schema = DOCUMENT["components"]["schemas"][kind.__name__]
    assert set(schema["properties"]) == {field.encode_name for field in msgspec.structs.fields(kind)}
    required = {field.encode_name for field in msgspec.structs.fields(kind) if field.required}
    assert set(schema.get("required", ())) == required


async def test_roles_and_efforts_are_those_that_chats_take() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert schemas["ChatMessage"]["properties"]["role"]["enum"][-1] == "function"
    (efforts,) = (one for one in schemas["ChatRequest"]["properties"]["reasoning_effort"]["anyOf"] if "enum" in one)
    assert efforts["enum"][-1] == "max"


async def test_what_generates_takes_a_time_within_which_it_must_answer(gateway: Any, router: Any) -> None:
    async def never(router: Any, stream: Any, send: Any) -> None:
        await asyncio.Event().wait()

    described = {
        path: parameter["schema"]
        for path, methods in DOCUMENT["paths"].items()
        for operation in methods.values()
        for parameter in operation.get("parameters", ())
        if parameter["name"] == "x-request-timeout" and parameter["in"] == "header"
    }
    api = {
        "chat/completions": {"messages": HI},
        "completions": {"prompt": "hi"},
        "responses": {"input": "hi"},
        "messages": {"messages": HI, "max_tokens": 9},
        "embeddings": {"model": VECTORS, "input": "hi"},
        "rerank": {"model": SCORES, "query": "hi", "documents": ["ho"]},
        "score": {"model": SCORES, "text_1": "hi", "text_2": "ho"},
    }
    bodies: dict[str, Any] = {f"{prefix}/{name}": body for prefix in ("/v1", "/v3") for name, body in api.items()}
    bodies |= {f"/{name}": api[name] for name in ("chat/completions", "completions")}
    bodies |= {"/api/chat": {"messages": HI}, "/api/generate": {"prompt": "hi"}}
    bodies |= dict.fromkeys(("/rerank", "/v2/rerank"), api["rerank"]) | {"/score": api["score"]}
    bodies |= {"/api/embed": {"model": VECTORS, "input": "hi"}}
    bodies |= {"/api/embeddings": {"model": VECTORS, "prompt": "hi"}}
    bodies |= {path: {"inputs": "hi"} for path in ("/", "/generate", "/generate_stream")}
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}
        bodies |= {f"{model}/infer": {"inputs": [text]}}
        bodies |= {f"{model}/{name}": {"text_input": "hi"} for name in ("generate", "generate_stream")}
    bodies |= {"/completion": {"prompt": "hi"}}
    # The request for a summary is longer than the model's context.
    del described["/v1/responses/compact"], described["/v3/responses/compact"]
    del described["/infill"]  # the model has no tokens for a gap, so that it is refused before
    assert set(described) == set(bodies)
    router.script, router.cards = never, cards(router)
    await gateway.models.refresh()

    async def ask(path: str, value: object, status: int) -> None:
        body = bodies[path] if path.startswith("/v2/") else {"model": "tiny", **bodies[path]}
        url, headers = path.format(name="tiny", version="1"), {"x-request-timeout": str(value)}
        response = await gateway.http.post(url, json=body, headers=headers)
        assert response.status_code == status, (path, value, response.text)
        assert status == 504 or "x-request-timeout" in response.text

    async with asyncio.TaskGroup() as asked:
        for path, schema in described.items():
            for value, status in ((0.5, 504), (schema["exclusiveMinimum"], 400), ("soon", 400)):
                asked.create_task(ask(path, value, status))
    router.reset()
    await gateway.models.refresh()


async def test_messages_take_the_fields_that_all_protocols_share() -> None:
    body = DOCUMENT["paths"]["/v1/messages"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    properties = [
        DOCUMENT["components"]["schemas"][one["$ref"].rpartition("/")[2]]["properties"] for one in body["allOf"]
    ]
    assert not set(properties[0]) & set(properties[1])
    assert {"max_tokens", "system", "temperature", "grammar"} <= set(properties[0]) | set(properties[1])


async def test_ranges_are_those_of_the_checks(gateway: Any) -> None:
    """A value just outside of each numeric range that the document states is refused by that name."""
    schema = DOCUMENT["components"]["schemas"]["ChatRequest"]
    asked = []
    for name, value in schema["properties"].items():
        for branch in value.get("anyOf", [value]):
            if branch.get("type") in ("number", "integer") and "maximum" in branch:
                asked.append((name, branch["maximum"] + 1))
                asked.append((name, branch["minimum"] - 1 if "minimum" in branch else branch["exclusiveMinimum"]))
    assert len(asked) > 30
    for name, value in asked:
        body = {"model": "tiny", "messages": HI, name: value, "logprobs": True}
        response = await gateway.http.post("/v1/chat/completions", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, name), (name, value)


async def test_the_status_of_models_is_as_openvino_model_server_tells_it(gateway: Any) -> None:
    version = {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": "OK"}}
    assert (await gateway.http.get("/v1/config")).json() == {"tiny": {"model_version_status": [version]}}
