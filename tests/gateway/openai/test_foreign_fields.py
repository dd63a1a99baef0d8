"""Fields of other servers that are not supported: each is refused by name, and docs/protocol.md has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.gateway.edge.wire import decode_body
from headrace.gateway.openai.foreign_fields import FOREIGN_FIELDS
from headrace.gateway.openai.types import ChatRequest, check_chat_body

pytestmark = pytest.mark.asyncio(loop_scope="module")
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}
REFERENCE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", FOREIGN_FIELDS)
async def test_a_field_of_another_server_is_refused_with_what_to_use_instead(
    gateway: Any, router: Any, path: str, name: str
) -> None:
    router.reset()
    neutral, instead = FOREIGN_FIELDS[name]
    other = not neutral[0] if neutral and isinstance(neutral[0], bool) else {"some": "value"}
    response = await gateway.http.post(path, json={**BODIES[path], name: other})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, name, "unsupported")
    assert error["message"].startswith(f"{name} is not supported")
    assert error["message"].endswith(instead)
    assert router.streams == []


@pytest.mark.parametrize("value", [b"1e999", b"1" * 400, b'{"a": [1e999]}', b'"\xff"'])
async def test_a_value_that_cannot_be_read_is_refused_by_its_field(gateway: Any, value: bytes) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}], "n_predict": %b}' % value
    response = await gateway.http.post("/v1/chat/completions", content=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n_predict")


@pytest.mark.parametrize("path", BODIES)
async def test_values_that_change_nothing_are_taken(gateway: Any, path: str) -> None:
    for position in range(max(len(neutral) for neutral, _ in FOREIGN_FIELDS.values()) + 1):
        fields = {
            name: neutral[position] if position < len(neutral) else None
            for name, (neutral, _) in FOREIGN_FIELDS.items()
        }
        response = await gateway.http.post(path, json={**BODIES[path], **fields})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", FOREIGN_FIELDS)
async def test_the_reference_has_each_of_them(name: str) -> None:
    assert f"`{name}`" in REFERENCE.partition("**Fields of other servers.**")[2].partition("\n\n")[0]


@pytest.mark.parametrize("path", BODIES)
async def test_the_id_in_a_body_is_that_of_the_request_unless_the_header_has_one(
    gateway: Any, router: Any, path: str
) -> None:
    body = {**BODIES[path], "request_id": "mine-1"}
    for headers, expected in (
        ({}, "mine-1"),
        ({"x-request-id": "other"}, "other"),
        ({"x-request-id": "a b"}, "mine-1"),
    ):
        response = await gateway.http.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        assert response.headers["x-request-id"] == expected
        assert router.streams[-1].metadata["x-request-id"] == expected


@pytest.mark.parametrize("request_id", ["", "a b", "\u00e9", "\n", "x" * 129, "\ud800"])
async def test_an_id_that_cannot_be_in_a_header_is_refused(gateway: Any, request_id: str) -> None:
    body = json.dumps({**BODIES["/v1/completions"], "request_id": request_id}).encode()
    error = (await gateway.http.post("/v1/completions", content=body)).json()["error"]
    assert error["param"] == "request_id" or request_id == "\ud800"
    assert error["type"] == "invalid_request_error"


async def test_disabled_thinking_is_an_effort_of_none(gateway: Any) -> None:
    body = {**BODIES["/v1/chat/completions"], "thinking": {"type": "disabled"}}
    response = await gateway.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    request = decode_body(json.dumps(body).encode(), ChatRequest)
    check_chat_body(request)
    assert request.reasoning_effort == "none"


@pytest.mark.parametrize(
    "fields", [{"reasoning_effort": "high"}, {"enable_thinking": True}, {"thinking": {"type": "enabled"}}]
)
async def test_thinking_that_is_disabled_and_asked_for_is_refused(gateway: Any, fields: dict[str, Any]) -> None:
    body = {**BODIES["/v1/chat/completions"], "thinking": {"type": "disabled"}, **fields}
    response = await gateway.http.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "thinking")
