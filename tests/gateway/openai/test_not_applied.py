"""Fields of chats and completions that are not applied: each is a hint or refused by name, as the tables say."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from headrace.gateway import hints
from headrace.gateway.edge.wire import decode_body
from headrace.gateway.fields import FieldTable, Hint, Refused
from headrace.gateway.openai.fields import CHAT, COMPLETION
from headrace.gateway.openai.types import ChatRequest, check_chat_body

pytestmark = pytest.mark.asyncio(loop_scope="module")
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
}
TABLES: dict[str, FieldTable] = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
ROWS = [(path, name, row) for path, table in TABLES.items() for name, row in table.rows.items() if "." not in name]
REFUSED = [(path, name) for path, name, row in ROWS if isinstance(row, Refused)]
HINTS = [(path, name) for path, name, row in ROWS if isinstance(row, Hint)]


@pytest.mark.parametrize(("path", "name"), REFUSED)
async def test_a_refused_field_is_named_with_what_to_use_instead(
    gateway: Any, router: Any, path: str, name: str
) -> None:
    router.reset()
    row = TABLES[path].rows[name]
    assert isinstance(row, Refused)
    other = not row.neutral[0] if row.neutral and isinstance(row.neutral[0], bool) else {"some": "value"}
    response = await gateway.http.post(path, json={**BODIES[path], name: other})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, name, "unsupported")
    assert error["message"].startswith(f"{name} is not supported")
    assert error["message"].endswith(row.instead)
    assert router.streams == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "name"), HINTS)
async def test_a_hint_is_taken_and_named_in_a_header(gateway: Any, path: str, name: str, stream: bool) -> None:
    response = await gateway.http.post(path, json={**BODIES[path], name: {"some": "value"}, "stream": stream})
    assert (response.status_code, response.headers[hints.HEADER]) == (200, name), response.text


async def test_a_field_that_nobody_knows_is_a_hint(gateway: Any) -> None:
    body = {**BODIES["/v1/completions"], "no_such_field": 1, "an, other\u00e9": 1, "x" * 200: 1, "absent": None}
    response = await gateway.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert sorted(response.headers[hints.HEADER].split(", ")) == ["an??other?", "no_such_field", "x" * 64]


async def test_names_of_hints_are_bounded(gateway: Any) -> None:
    body = {**BODIES["/v1/completions"], **{f"made_up_{i}": i for i in range(1000)}}
    response = await gateway.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert len(response.headers[hints.HEADER].split(", ")) == hints.MAX_NAMES


async def test_an_error_names_hints_too_and_an_answer_without_hints_has_no_header(gateway: Any) -> None:
    body = {**BODIES["/v1/completions"], "temperature": 9, "store": True}
    response = await gateway.http.post("/v1/completions", json=body)
    assert (response.status_code, response.headers[hints.HEADER]) == (400, "store")
    response = await gateway.http.post("/v1/completions", json=BODIES["/v1/completions"])
    assert hints.HEADER not in response.headers


async def test_a_hint_is_logged_once(
    gateway: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, hints.__name__)
    monkeypatch.setattr(hints, "_logged", set())
    for _ in range(2):
        fields = {"logged_once": 1, "service_tier": "flex"}
        await gateway.http.post("/v1/completions", json={**BODIES["/v1/completions"], **fields})
    said = [record.getMessage() for record in caplog.records]
    assert sorted(said) == [
        "a request has logged_once, without effect: POST /v1/completions has no such field",
        "a request has service_tier, without effect: it concerns the provider's own storage, billing and monitoring",
    ]


@pytest.mark.parametrize("value", [b"1e999", b"1" * 400, b'{"a": [1e999]}', b'"\xff"'])
async def test_a_value_that_cannot_be_read_is_refused_by_its_field(gateway: Any, value: bytes) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}], "n_predict": %b}' % value
    response = await gateway.http.post("/v1/chat/completions", content=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n_predict")


@pytest.mark.parametrize("path", BODIES)
async def test_values_that_change_nothing_are_taken_without_a_word(gateway: Any, path: str) -> None:
    rows = {name: row.neutral for own, name, row in ROWS if own == path and isinstance(row, (Hint, Refused))}
    for position in range(max(map(len, rows.values())) + 1):
        fields = {name: neutral[position] if position < len(neutral) else None for name, neutral in rows.items()}
        response = await gateway.http.post(path, json={**BODIES[path], **fields})
        assert response.status_code == 200, response.text
        assert hints.HEADER not in response.headers


async def test_a_chat_with_lists_that_are_empty_is_answered(gateway: Any, router: Any) -> None:
    router.reset()
    fields = {"stop": [], "top_p": 0, "store": True, "metadata": {"a": "b"}, "stream": True}
    fields["stream_options"] = {"continuous_usage_stats": True}
    response = await gateway.http.post("/v1/chat/completions", json={**BODIES["/v1/chat/completions"], **fields})
    assert response.status_code == 200, response.text
    names = ["metadata", "store", "stream_options.continuous_usage_stats"]
    assert sorted(response.headers[hints.HEADER].split(", ")) == names
    assert 0 < router.streams[-1].request.sampling.top_p < 1e-6


async def test_stop_strings_may_be_many_and_empty_ones_end_nothing(gateway: Any, router: Any) -> None:
    router.reset()
    router.answer = "abcdef"
    stop = ["", *(f"{i}." for i in range(62)), "d"]
    response = await gateway.http.post("/v1/completions", json={**BODIES["/v1/completions"], "stop": stop})
    assert (response.json()["choices"][0]["text"], response.headers[hints.HEADER]) == ("abc", "stop")
    response = await gateway.http.post("/v1/completions", json={**BODIES["/v1/completions"], "stop": ["a"] * 65})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stop")


async def test_a_chat_gets_the_room_in_the_context_and_a_completion_is_refused(gateway: Any, router: Any) -> None:
    router.reset()
    card = (await gateway.http.get("/v1/models")).json()["data"][0]
    for name in ("max_tokens", "max_completion_tokens"):
        body = {**BODIES["/v1/chat/completions"], name: 100_000}
        response = await gateway.http.post("/v1/chat/completions", json=body)
        request = router.streams[-1].request
        room = card["max_model_len"] - len(request.token_ids)
        assert (response.headers[hints.HEADER], request.sampling.max_tokens) == (f"{name}>{room}", room)
    body = {**BODIES["/v1/completions"], "max_tokens": 100_000}
    response = await gateway.http.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert f"maximum context length is {card['max_model_len']} tokens" in error["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_whole_numbers_may_be_written_with_a_point(gateway: Any, router: Any, path: str) -> None:
    router.reset()
    fields = {"max_tokens": 7.0, "top_k": 4e1, "seed": 1.0, "stop_token_ids": [3.0], "logit_bias": {"4": 1.0}}
    response = await gateway.http.post(path, json={**BODIES[path], **fields})
    assert response.status_code == 200, response.text
    sampling = router.streams[-1].request.sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.seed) == (7, 40, 1)
    response = await gateway.http.post(path, json={**BODIES[path], "max_tokens": 7.5})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


async def test_a_prompt_is_cut_at_the_side_that_the_caller_names(gateway: Any, router: Any, kit: Any) -> None:
    router.reset()
    tokens = kit.tokens_of("abcdef")
    for side, kept in ((None, tokens[-3:]), ("left", tokens[-3:]), ("right", tokens[:3])):
        body = {"prompt": tokens, "truncate_prompt_tokens": 3, "truncation_side": side}
        response = await gateway.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert list(router.streams[-1].request.token_ids) == kept


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


@pytest.mark.parametrize("fields", [{"reasoning_effort": "high"}, {"enable_thinking": True}])
async def test_thinking_that_is_disabled_and_asked_for_is_refused(gateway: Any, fields: dict[str, Any]) -> None:
    body = {**BODIES["/v1/chat/completions"], "thinking": {"type": "disabled"}, **fields}
    response = await gateway.http.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "thinking")


async def test_enabled_thinking_is_a_variable_of_the_template(gateway: Any) -> None:
    body = {**BODIES["/v1/chat/completions"], "thinking": {"type": "enabled", "budget_tokens": 9}}
    response = await gateway.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    request = decode_body(json.dumps(body).encode(), ChatRequest)
    check_chat_body(request)
    assert request.chat_template_kwargs == {"enable_thinking": True}
    response = await gateway.http.post("/v1/chat/completions", json={**body, "enable_thinking": False})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "thinking")
