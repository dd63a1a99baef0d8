"""Every field of chats is applied by the other endpoints with the same models, or refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.gateway.anthropic import types as anthropic
from headrace.gateway.anthropic.fields import MESSAGES
from headrace.gateway.chat.fields import NEUTRAL_FIELDS
from headrace.gateway.chat.request import AnswerFields, Chat, SamplingFields
from headrace.gateway.fields import FieldTable, Refused
from headrace.gateway.openai import types
from headrace.gateway.openai.fields import CHAT
from headrace.gateway.responses import types as responses
from headrace.gateway.responses.fields import FIELDS as RESPONSES
from headrace.gateway.responses.tools import Offer
from headrace.protos.status import Reason, StatusError

pytestmark = pytest.mark.asyncio(loop_scope="module")
# path -> a body, its types, and the fields that it must not have
ENDPOINTS: dict[str, tuple[dict[str, Any], tuple[type[msgspec.Struct], ...], FieldTable]] = {
    "/v1/responses": ({"input": "hi"}, (responses.ResponsesRequest,), RESPONSES),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
        (anthropic.MessagesRequest, AnswerFields),
        MESSAGES,
    ),
}


def names_of(*kinds: type[msgspec.Struct]) -> set[str]:
    return {field.encode_name for kind in kinds for field in msgspec.structs.fields(kind)}


def refused() -> list[tuple[str, str]]:
    rows = [(path, name, row) for path, (*_, fields) in ENDPOINTS.items() for name, row in fields.rows.items()]
    return [(path, name) for path, name, row in rows if isinstance(row, Refused)]


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_each_field_of_chats_is_one_of_the_endpoint_or_refused(path: str) -> None:
    _, kinds, fields = ENDPOINTS[path]
    assert names_of(types.ChatRequest) <= names_of(*kinds) | fields.rows.keys()


async def test_the_table_has_no_other_fields_and_the_values_that_chats_take() -> None:
    assert NEUTRAL_FIELDS.keys() <= names_of(types.ChatRequest) | CHAT.rows.keys()
    for name, row in CHAT.rows.items():
        if isinstance(row, Refused) and name in NEUTRAL_FIELDS:
            assert NEUTRAL_FIELDS[name] == row.neutral


@pytest.mark.parametrize(("path", "name"), refused())
async def test_a_field_that_only_chats_have_is_refused(gateway: Any, router: Any, path: str, name: str) -> None:
    router.reset()
    body, _, fields = ENDPOINTS[path]
    row = fields.rows[name]
    assert isinstance(row, Refused)
    other = not row.neutral[0] if row.neutral and isinstance(row.neutral[0], bool) else {"some": "value"}
    response = await gateway.http.post(path, json={**body, name: other})
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert message.startswith(f"{name} is not supported")
    assert message.endswith(row.instead)
    assert router.streams == []


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_values_that_change_nothing_are_taken(gateway: Any, path: str) -> None:
    body, _, fields = ENDPOINTS[path]
    rows = {name: row.neutral for name, row in fields.rows.items() if isinstance(row, Refused)}
    for position in range(max(map(len, rows.values())) + 1):
        more = {name: neutral[position] if position < len(neutral) else None for name, neutral in rows.items()}
        response = await gateway.http.post(path, json={**body, **more})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_the_id_in_a_body_is_that_of_the_request(gateway: Any, router: Any, path: str) -> None:
    body = {**ENDPOINTS[path][0], "request_id": "mine-1"}
    for headers, expected in (({}, "mine-1"), ({"x-request-id": "other"}, "other")):
        response = await gateway.http.post(path, json=body, headers=headers)
        assert response.headers["x-request-id"] == expected
        assert router.streams[-1].metadata["x-request-id"] == expected
    response = await gateway.http.post(path, json={**body, "request_id": "a b"})
    assert response.status_code == 400
    assert "request_id must have" in response.text


async def test_the_shared_fields_reach_the_chat() -> None:
    """Of whatever type they are: the translation does not look at them."""
    marks = {name: object() for name in names_of(AnswerFields)}
    message = anthropic.MessagesRequest(messages=[{"role": "user", "content": "hi"}], max_tokens=5)
    chat, _ = anthropic.chat_of(message, None, AnswerFields(**marks))
    assert {name: getattr(chat, name) for name in marks} == marks
    marks = {name: object() for name in names_of(SamplingFields)}
    response = responses.chat_of(responses.ResponsesRequest(input="hi", **marks), [], Offer())
    assert {name: getattr(response.request, name) for name in marks} == marks
    assert marks.keys() <= names_of(Chat)


@pytest.mark.parametrize("value", [b"1e999", b"1" * 400, b'"\xff"'])
async def test_a_value_that_cannot_be_read_is_refused_by_its_field(value: bytes) -> None:
    with pytest.raises(StatusError) as caught:
        RESPONSES.check(b'{"input": "hi", "n": %b}' % value)
    assert (caught.value.reason, caught.value.field) == (Reason.UNSUPPORTED, "n")
