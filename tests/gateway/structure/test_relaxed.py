"""Parts of schemas that are checked only when the answer has ended."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from headrace.gateway.hints import HEADER
from headrace.gateway.structure.relaxed import checker, is_more_than_regular, relaxed
from headrace.protos.status import Reason, StatusError

pytestmark = pytest.mark.asyncio(loop_scope="module")
UNIQUE = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
SCHEMA = {
    "type": "object",
    "properties": {"tags": UNIQUE, "code": {"type": "string", "pattern": r"^(?=.*\d)[a-z\d]+$", "maxLength": 9}},
    "required": ["tags", "code"],
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("pattern", "is_more"),
    [
        (r"^a(?=b)", True),
        (r"(?<!x)y", True),
        (r"\bword\b", True),
        (r"(a)\1", True),
        (r"(?<n>a)\k<n>", True),
        (r"^[\b(?=)]+$", False),
        (r"a\\b", False),
        (r"(?:a|b)+\.\d{2}(?i)x", False),
        (r"[]a(?=]", False),
        (r"\(?=", False),
    ],
)
async def test_patterns_that_no_grammar_expresses_are_told(pattern: str, is_more: bool) -> None:
    assert is_more_than_regular(pattern) is is_more


async def test_only_these_keywords_are_dropped_at_any_depth() -> None:
    schema = {"$defs": {"a": {"anyOf": [UNIQUE, {"pattern": "^a+$"}]}}, "items": {"prefixItems": [SCHEMA]}}
    found = relaxed(schema)
    assert found is not None
    assert found.dropped == ("uniqueItems", "pattern")
    text = json.dumps(found.schema)
    assert ("uniqueItems" in text, "(?=" in text, "^a+$" in text, "maxLength" in text) == (False, False, True, True)
    assert "uniqueItems" in json.dumps(schema), "the caller's schema is left as it was"
    assert relaxed({"properties": {"uniqueItems": {"type": "boolean"}}, "enum": [{"uniqueItems": True}]}) is None


async def test_an_answer_is_checked_against_the_whole_schema() -> None:
    check = checker(SCHEMA, "response_format")
    check('{"tags": ["a", "b"], "code": "a1"}')
    check('{"tags": ["a", "a"], "co')  # cut off
    for tags, code, place in ((["a", "a"], "a1", ".tags"), (["a"], "ab", ".code")):
        with pytest.raises(StatusError) as caught:
            check(json.dumps({"tags": tags, "code": code}))
        assert (caught.value.reason, caught.value.field) == (Reason.SCHEMA_VIOLATED, "response_format")
        assert f"at ${place}" in caught.value.message


async def test_a_pattern_cannot_take_long() -> None:
    check = checker({"type": "string", "pattern": r"^(?=.*x)(a|a|aa)+$"}, "f")
    start_s = time.thread_time()
    with pytest.raises(StatusError):
        check(json.dumps("a" * 100_000 + "xb"))
    assert time.thread_time() - start_s < 5


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "(?=", "uniqueItems": True},
        {"$ref": "https://example.com/schema", "uniqueItems": True},
        {"type": "no-such-type", "uniqueItems": True},
    ],
)
async def test_a_schema_that_cannot_be_checked_is_refused_by_its_field(schema: Any) -> None:
    with pytest.raises(StatusError) as caught:
        checker(schema, "guided_json")
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_FIELD, "guided_json")


def body_of(path: str, schema: Any, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return {"model": "tiny", "max_tokens": 100, **prompt, "response_format": form, **fields}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_valid_answer_is_given_and_a_violation_is_an_error(
    gateway: Any, router: Any, path: str, stream: bool
) -> None:
    router.reset()
    router.answer = '{"tags":["a","b"],"code":"a1"}'
    response = await gateway.http.post(path, json=body_of(path, SCHEMA, stream=stream))
    assert response.status_code == 200, response.text
    assert response.headers[HEADER] == "response_format:uniqueItems, response_format:pattern"
    assert "schema_violated" not in response.text
    constraint = router.streams[-1].request.sampling.constraint.json_schema
    assert ("uniqueItems" in constraint, "maxLength" in constraint) == (False, True)

    router.answer = '{"tags":["a","a"],"code":"a1"}'
    response = await gateway.http.post(path, json=body_of(path, SCHEMA, stream=stream))
    if stream:
        last = response.text.rstrip().split("\n\n")[-1]
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert response.status_code == 422
        error = response.json()["error"]
    assert error["code"] == "schema_violated"
    assert "the answer violates response_format at $.tags" in error["message"]


async def test_one_of_several_answers_may_violate_the_schema(gateway: Any, router: Any, kit: Any) -> None:
    router.reset()

    async def by_seed(_: Any, stream: Any, send: Any) -> None:
        text = '["a","a"]' if stream.request.sampling.seed == 1 else '["a"]'
        await send([*kit.tokens_of(text), kit.EOS], 0, kit.inference_pb2.FINISH_REASON_STOP, kit.EOS)

    router.script = by_seed
    answer = (await gateway.http.post(CHAT, json=body_of(CHAT, UNIQUE, n=2, seed=0))).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "error"]
    assert answer["choices"][1]["error"]["code"] == "schema_violated"


async def test_an_answer_that_is_cut_off_is_no_violation(gateway: Any, router: Any, kit: Any) -> None:
    router.reset()
    router.answer = '["a","a"]'
    response = await gateway.http.post(CHAT, json=body_of(CHAT, UNIQUE, max_tokens=5))
    assert (response.status_code, response.json()["choices"][0]["finish_reason"]) == (200, "length")


async def test_schemas_without_these_keywords_are_passed_on_as_they_are(gateway: Any, router: Any) -> None:
    router.reset()
    schema = {"type": "string", "pattern": "^a+$"}
    response = await gateway.http.post(CHAT, json=body_of(CHAT, schema))
    assert HEADER not in response.headers
    assert json.loads(router.streams[-1].request.sampling.constraint.json_schema) == schema
