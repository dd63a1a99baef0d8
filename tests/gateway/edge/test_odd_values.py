"""Values that a field cannot have, at every door: refused with the field's name, and by all doors alike."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf import struct_pb2

from headrace.protos import text_pb2, text_pb2_grpc
from headrace.protos.status import Reason, error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
OLLAMA, TGI, KSERVE = "/api/chat", "/generate", "/v2/models/tiny/generate"
HI = [{"role": "user", "content": "hi"}]
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": HI, "max_tokens": 5},
    OLLAMA: {"messages": HI},
    TGI: {"inputs": "hi"},
    KSERVE: {"text_input": "hi"},
}


def called(**call: Any) -> list[dict[str, Any]]:
    """A conversation with a call."""
    whole = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, **call}
    return [*HI, {"role": "assistant", "tool_calls": [whole]}]


def resulted(**result: Any) -> list[dict[str, Any]]:
    """A conversation of the Messages API with a call and its result."""
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    block = {"type": "tool_result", "tool_use_id": "c", **result}
    return [*HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [block]}]


def arguments(value: Any) -> dict[str, Any]:
    return {"function": {"name": "f", "arguments": value}}


CALL = "messages[1].tool_calls[0]"
REASONING = {"type": "reasoning", "summary": []}
ODD: list[tuple[str, str, dict[str, Any]]] = [
    # A boolean is no number, and a number no boolean.
    *[("length_penalty", path, {"length_penalty": True}) for path in (CHAT, COMPLETIONS)],
    *[("early_stopping", path, {"early_stopping": 0}) for path in (CHAT, COMPLETIONS)],
    *[("grammar_lazy", path, {"grammar_lazy": 0}) for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES, KSERVE)],
    *[("typical_p", path, {"typical_p": True}) for path in (CHAT, COMPLETIONS)],
    *[("mirostat", path, {"mirostat": False}) for path in (CHAT, COMPLETIONS)],
    # Neither is a text or a list.
    *[("xtc_probability", path, {"xtc_probability": "NaN"}) for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)],
    *[("dry_multiplier", path, {"dry_multiplier": "1"}) for path in (CHAT, COMPLETIONS)],
    *[("dynatemp_range", path, {"dynatemp_range": [0.5]}) for path in (CHAT, COMPLETIONS)],
    *[("mirostat_tau", path, {"mirostat_tau": {}}) for path in (CHAT, COMPLETIONS)],
    *[("dry_allowed_length", path, {"dry_allowed_length": 1.5}) for path in (CHAT, COMPLETIONS)],
    *[("return_hidden_states", path, {"return_hidden_states": 0}) for path in (CHAT, COMPLETIONS)],
    ("options.typical_p", OLLAMA, {"options": {"typical_p": True}}),
    ("options.mirostat", OLLAMA, {"options": {"mirostat": False}}),
    ("parameters.typical_p", TGI, {"parameters": {"typical_p": True}}),
    ("structured_outputs.json_object", CHAT, {"structured_outputs": {"json_object": "false"}}),
    ("guided_json", KSERVE, {"parameters": {"guided_json": 0}}),
    ("parameters.priority", KSERVE, {"parameters": {"priority": []}}),
    # An empty value of another type is not nothing.
    ("messages[0].images", OLLAMA, {"messages": [{**HI[0], "images": {}}]}),
    ("messages[2].content[0].content", MESSAGES, {"messages": resulted(content=0)}),
    ("messages[2].content[0].is_error", MESSAGES, {"messages": resulted(is_error="false")}),
    ("input[0].content", RESPONSES, {"input": [{**REASONING, "content": 0}]}),
    # Calls that are handed back.
    (f"{CALL}.custom", CHAT, {"messages": called(type="custom")}),
    (f"{CALL}.type", CHAT, {"messages": called(type=5)}),
    *[(f"{CALL}.id", path, {"messages": called(id=5, **arguments({}))}) for path in (CHAT, OLLAMA)],
    *[
        (f"{CALL}.function.arguments", path, {"messages": called(**arguments(value))})
        for path in (OLLAMA,)
        for value in (5, False, [], 0.5)
    ],
    ("logit_bias", CHAT, {"logit_bias": {"hello": 1}}),
]


@pytest.mark.parametrize(("field", "path", "fields"), ODD)
async def test_a_value_that_a_field_cannot_have_is_refused_by_the_name_of_the_field(
    gateway: Any, field: str, path: str, fields: dict[str, Any]
) -> None:
    model = {} if path == KSERVE else {"model": "tiny"}
    response = await gateway.http.post(path, json={**model, **BASES[path], **fields})
    assert response.status_code == 400, response.text
    assert field in response.text


async def test_a_key_of_a_wrong_type_is_named_as_a_key(gateway: Any) -> None:
    response = await gateway.http.post(CHAT, json={"messages": HI, "logit_bias": {"hello": 1}})
    assert response.json()["error"]["message"] == "logit_bias, a key: expected 'int', got 'str'"


async def test_calls_and_their_results_may_leave_out_what_is_optional(gateway: Any, router: Any) -> None:
    router.reset()
    for path, messages in (
        (CHAT, called(type=None, id=None, **arguments(None))),
        (CHAT, called(**arguments({"a": 1}))),
        (CHAT, called(**arguments(""))),
        *((CHAT, called(type=kind, **arguments({}))) for kind in ("", [])),
        *((CHAT, called(**arguments(value))) for value in (5, False, [], 0.5)),
        (OLLAMA, called(id=None, **arguments({}))),
        (MESSAGES, resulted(content=None, is_error=None)),
    ):
        response = await gateway.http.post(path, json={**BASES[path], "model": "tiny", "messages": messages})
        assert response.status_code == 200, response.text


@pytest_asyncio.fixture(loop_scope="module")
async def text(gateway: Any) -> Any:
    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        yield text_pb2_grpc.TextStub(channel)


def chat_with(**fields: Any) -> text_pb2.ChatRequest:
    return text_pb2.ChatRequest(messages=[text_pb2.ChatMessage(role="user", content="hi")], **fields)


def variables(number: float) -> struct_pb2.Struct:
    found = struct_pb2.Struct()
    found["deep"] = [{"number": number}]
    return found


async def test_numbers_and_modes_that_do_not_exist_are_refused_over_grpc(text: Any) -> None:
    unknown = text_pb2.ChatToolChoice(mode=99)
    for field, request in (
        ("chat_template_kwargs", chat_with(chat_template_kwargs=variables(float("nan")))),
        ("chat_template_kwargs", chat_with(chat_template_kwargs=variables(float("inf")))),
        ("tool_choice.mode", chat_with(tool_choice=unknown)),
        (
            "cache_eviction.aggregation_mode",
            chat_with(params=text_pb2.TextParams(cache_eviction={"max_cache_size": 64, "aggregation_mode": 77})),
        ),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in text.Chat(request):
                pass
        error = error_of(caught.value)
        assert (error.reason, error.field) == (Reason.INVALID_FIELD, field)
        assert field in error.message
