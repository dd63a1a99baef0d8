"""The fields that constrain an answer, and their translation for the worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.gateway.structure.lark import lark_of
from headrace.protos.inference_pb2 import Constraint
from headrace.protos.status import Reason, StatusError

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
GBNF = 'root ::= "a" | "(" root ")"'
SCHEMA = {"type": "object", "properties": {"ü": {"type": "integer", "maximum": 1e3}, "a": {"$ref": "#"}}}


@pytest.fixture(autouse=True)
def fresh(router: Any) -> Iterator[None]:
    router.reset()
    yield
    router.reset()


async def constraint_of(gateway: Any, router: Any, path: str, fields: dict[str, Any]) -> Constraint:
    """The constraint that the worker gets for these fields."""
    body = {"model": "tiny", **({"messages": HI} if path == CHAT else {"prompt": "hi"}), **fields}
    response = await gateway.http.post(path, json=body)
    assert response.status_code == 200, response.text
    sampling = router.streams[-1].request.sampling
    assert sampling.HasField("constraint")
    constraint: Constraint = sampling.constraint
    return constraint


async def failure(gateway: Any, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "tiny", **({"messages": HI} if path == CHAT else {"prompt": "hi"}), **fields}
    response = await gateway.http.post(path, json=body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": json.dumps(SCHEMA)}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"json_schema": json.dumps(SCHEMA), "grammar": ""},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA), "response_format": {"type": "text"}},
    ],
)
async def test_a_schema_reaches_the_worker_with_its_properties_in_order(
    gateway: Any, router: Any, path: str, fields: dict[str, Any]
) -> None:
    constraint = await constraint_of(gateway, router, path, fields)
    schema = json.loads(constraint.json_schema)
    assert schema == SCHEMA
    assert list(schema["properties"]) == ["ü", "a"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "json_object"}}, Constraint(json_object={})),
        ({"structured_outputs": {"json_object": True}}, Constraint(json_object={})),
        ({"guided_regex": "a+"}, Constraint(regex="a+")),
        ({"structured_outputs": {"regex": "a+"}}, Constraint(regex="a+")),
        ({"guided_choice": ["ja", "nein"]}, Constraint(choice={"texts": ["ja", "nein"]})),
        ({"structured_outputs": {"choice": ["ja"]}}, Constraint(choice={"texts": ["ja"]})),
        ({"guided_grammar": 'start: "a"'}, Constraint(grammar='start: "a"')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Constraint(grammar='start: "a"')),
        ({"regex": "a+"}, Constraint(regex="a+")),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, Constraint(regex="a+")),
        *(
            (fields, Constraint(grammar=lark_of(GBNF)))
            for fields in (
                {"grammar": GBNF},
                {"ebnf": GBNF},
                {"guided_grammar": GBNF},
                {"structured_outputs": {"grammar": GBNF}},
                {"response_format": {"type": "grammar", "grammar": GBNF}},
                {"grammar": GBNF, "grammar_lazy": False, "grammar_triggers": []},
            )
        ),
    ],
)
async def test_each_field_becomes_its_kind_of_constraint(
    gateway: Any, router: Any, path: str, fields: dict[str, Any], wanted: Constraint
) -> None:
    assert await constraint_of(gateway, router, path, fields) == wanted


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None}])
async def test_without_them_any_text_may_come(gateway: Any, router: Any, fields: dict[str, Any]) -> None:
    await gateway.http.post(CHAT, json={"model": "tiny", "messages": HI, **fields})
    assert not router.streams[-1].request.sampling.HasField("constraint")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}),
    ],
)
async def test_other_protocols_take_the_same_fields(gateway: Any, router: Any, path: str, body: Any) -> None:
    for fields, kind in (
        ({"json_schema": SCHEMA}, "json_schema"),
        ({"regex": "a"}, "regex"),
        ({"guided_choice": ["a"]}, "choice"),
        ({"ebnf": GBNF}, "grammar"),
        ({"structured_outputs": {"json_object": True}}, "json_object"),
        ({"structural_tag": TAGS}, "grammar"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, "grammar"),
    ):
        response = await gateway.http.post(path, json={"model": "tiny", **body, **fields})
        assert response.status_code == 200, response.text
        assert router.streams[-1].request.sampling.constraint.WhichOneof("kind") == kind
    for fields in ({"grammar": "root"}, {"structural_tag": {}}):
        response = await gateway.http.post(path, json={"model": "tiny", **body, **fields})
        assert response.status_code == 400
        assert next(iter(fields)) in response.json()["error"]["message"]


TAGS = {"structures": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}], "triggers": ["<a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}},
            "response_format.json_schema.strict",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "response_format"),
        ({"guided_json": ""}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_grammar": 1}, "guided_grammar"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"structural_tag": {}}, "structural_tag.structures"),
        ({"structural_tag": "x"}, "structural_tag"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format"),
        ({"grammar": 'start: "a"'}, "grammar"),
        ({"ebnf": "root ::= a"}, "ebnf"),
        ({"guided_grammar": "root ::= <think>"}, "guided_grammar"),
        ({"response_format": {"type": "grammar"}}, "response_format.grammar"),
        ({"response_format": {"type": "regex"}}, "response_format.pattern"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "regex", "pattern": "a", "grammar": GBNF}}, "response_format.grammar"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}},
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "json_object", "schema": 1}}, "response_format.schema"),
        ({"grammar": GBNF, "regex": "a"}, "grammar"),
        ({"json_schema": {}, "response_format": {"type": "json_object"}}, "json_schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids"),
    ],
)
async def test_what_is_malformed_or_contradicts_itself_is_named(
    gateway: Any, router: Any, fields: dict[str, Any], param: str
) -> None:
    error = await failure(gateway, CHAT, fields)
    assert error["param"] == param
    assert param in error["message"]
    assert router.streams == []


async def refuse(router: Any, stream: Any, send: Any) -> None:
    kind = stream.request.sampling.constraint.WhichOneof("kind")
    field = f"sampling.constraint.{kind}"
    raise StatusError(Reason.INVALID_FIELD, f"{field} cannot be kept: Unimplemented keys", field=field)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ],
)
async def test_a_refusal_by_the_worker_is_a_400_in_the_callers_terms(
    gateway: Any, router: Any, fields: dict[str, Any], param: str, n: int, stream: bool
) -> None:
    router.script = refuse
    for path in (CHAT, COMPLETIONS):
        error = await failure(gateway, path, {**fields, "stream": stream, "n": n})
        assert error["param"] == param
        assert error["message"] == f"{param} cannot be kept: Unimplemented keys"
        assert error["code"] is None
