"""Every response and event matches the published schema of its protocol.

The types in OpenAI's and Anthropic's packages are checked in this environment and in that of the clients. They allow
nullable fields to be missing that the published schemas require. Those fields are listed here.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.gateway.tool_model import ONE, TWO, events_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
CLIENTS = Path(__file__).parents[3] / ".make" / "clients" / "bin" / "python"
CHECKER = Path(__file__).with_name("sdk_types.py")
HI = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
REASONED = "<think>\nHm.\n</think>\n\nParis."
CALLED = f"Look: {ONE}\n{TWO}"
SCHEMA = {"name": "answer", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}

RESPONSE = """id object created_at completed_at status incomplete_details model previous_response_id instructions output
    error tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs
    temperature reasoning user usage max_output_tokens max_tool_calls store background service_tier metadata
    safety_identifier prompt_cache_key"""
USAGE = "input_tokens cache_creation_input_tokens cache_read_input_tokens output_tokens output_tokens_details "
MESSAGE_USAGE = USAGE + "server_tool_use cache_creation inference_geo service_tier speed"
# What must be there even if it is null: by place, `type` in the answer, and the names.
REQUIRED: dict[str, dict[str, str]] = {
    "response": {
        "response": RESPONSE,
        "message": "type id status role content",
        "reasoning": "type id summary",
        "reasoning of response": "effort summary",
        "text of response": "format verbosity",
        "function_call": "type id call_id name arguments status",
        "function_call_output": "type id call_id output status",
        "output_text": "type text annotations logprobs",
        "tools": "type name description parameters strict",
        "json_schema": "type name description schema strict",
        "usage": "input_tokens input_tokens_details output_tokens output_tokens_details total_tokens",
        "input_tokens_details": "cached_tokens cache_write_tokens",
        "output_tokens_details": "reasoning_tokens",
        "logprobs": "token logprob bytes top_logprobs",
        "top_logprobs": "token logprob bytes",
        "response.created": "type sequence_number response",
        "response.in_progress": "type sequence_number response",
        "response.completed": "type sequence_number response",
        "response.incomplete": "type sequence_number response",
        "response.failed": "type sequence_number response",
        "response.output_item.added": "type sequence_number output_index item",
        "response.output_item.done": "type sequence_number output_index item",
        "response.content_part.added": "type sequence_number item_id output_index content_index part",
        "response.content_part.done": "type sequence_number item_id output_index content_index part",
        "response.output_text.delta": "type sequence_number item_id output_index content_index delta logprobs",
        "response.output_text.done": "type sequence_number item_id output_index content_index text logprobs",
        "response.reasoning_text.delta": "type sequence_number item_id output_index content_index delta",
        "response.reasoning_text.done": "type sequence_number item_id output_index content_index text",
        "response.function_call_arguments.delta": "type sequence_number item_id output_index delta",
        "response.function_call_arguments.done": "type sequence_number item_id output_index arguments name",
    },
    "message": {
        "message": "id type role model container content diagnostics stop_reason stop_sequence stop_details usage",
        "text": "type text citations",
        "thinking": "type thinking signature",
        "tool_use": "type id name input caller",
        "message_start": "type message",
        "message_delta": "type delta usage",
        "delta of message_delta": "stop_reason stop_sequence stop_details container",
        "usage": MESSAGE_USAGE,
        "usage of message_delta": USAGE + "server_tool_use",
        "content_block_start": "type index content_block",
        "content_block_delta": "type index delta",
        "content_block_stop": "type index",
        "error": "type",
    },
    "chat": {
        "chat.completion": "id object created model choices usage",
        "chat.completion.chunk": "id object created model choices",
        "choices of chat.completion": "index message logprobs finish_reason",
        "choices of chat.completion.chunk": "index delta logprobs finish_reason",
        "message": "role content refusal",
        "logprobs": "content refusal",
        "content": "token logprob bytes top_logprobs",
        "usage": "prompt_tokens completion_tokens total_tokens",
    },
    "completion": {
        "logprobs": "tokens token_logprobs top_logprobs text_offset",
        "usage": "prompt_tokens completion_tokens total_tokens",
        "text_completion": "id object created model choices",
        "choices of text_completion": "index text logprobs finish_reason",
        "model": "id object created owned_by",
        "error": "message type param code",
    },
}


def missing(protocol: str, value: Any, name: str = "", parent: str = "") -> Iterator[str]:
    """The required fields that are missing in an answer, at any depth."""
    if isinstance(value, list):
        for one in value:
            yield from missing(protocol, one, name, parent)
    if not isinstance(value, dict) or name in ("parameters", "schema", "input", "metadata"):
        return
    kind = value.get("type") if isinstance(value.get("type"), str) else value.get("object")
    wanted = REQUIRED[protocol]
    for title in (f"{name} of {parent}", name, kind or ""):
        if title in wanted:
            absent = [field for field in wanted[title].split() if field not in value]
            yield from (f"{title} has no {field}" for field in absent)
            break
    for key, child in value.items():
        yield from missing(protocol, child, key, kind or name)


async def problems(python: Path | str, answers: list[tuple[str, Any]]) -> list[str]:
    """The errors that this interpreter's packages find in the answers."""
    process = await asyncio.create_subprocess_exec(
        str(python), str(CHECKER), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate(json.dumps(answers).encode())
    assert process.returncode == 0
    found: list[str] = json.loads(out)
    return found


def chunks_of(text: str) -> list[Any]:
    """The chunks of a stream of chats or completions."""
    *events, done = text.rstrip("\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def typed(chunk: Any) -> Any:
    """A chunk of a completion as its type has it. OpenAI's streams say null until a choice ends; the type does not."""
    for choice in chunk["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
    return chunk


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def openai_answers(front: Any, model: Any) -> list[tuple[str, Any]]:
    """Chats and completions of every kind, with their types."""
    found: list[tuple[str, Any]] = []
    chat, completion = "openai.types.chat.ChatCompletion", "openai.types.Completion"
    tools = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "now")]
    for written, path, fields in (
        ("Hi", "chat/completions", {"logprobs": True, "top_logprobs": 2, "n": 2}),
        (REASONED, "chat/completions", {}),
        (CALLED, "chat/completions", {"tools": tools}),
        ("Hello there", "chat/completions", {"max_tokens": 3, "return_token_ids": True, "prompt_logprobs": 1}),
        ("Hi", "completions", {"logprobs": 2}),
        ("Hi", "completions", {"echo": True}),
        ("Hi", "completions", {"max_tokens": 1}),
    ):
        model.reset()
        model.answer = written
        is_chat = path.startswith("chat")
        body = {"model": "tiny", **({"messages": HI} if is_chat else {"prompt": "hi"}), **fields}
        whole = await front.http.post(f"/v1/{path}", json=body)
        assert whole.status_code == 200, whole.text
        found.append((chat if is_chat else completion, whole.json()))
        body |= {"stream": True, "stream_options": {"include_usage": True}, "prompt_logprobs": None}
        streamed = chunks_of((await front.http.post(f"/v1/{path}", json=body)).text)
        found += [
            ("openai.types.chat.ChatCompletionChunk", chunk) if is_chat else (completion, typed(chunk))
            for chunk in streamed
        ]
    listed = (await front.http.get("/v1/models")).json()
    return [*found, *(("openai.types.Model", one) for one in listed["data"])]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def response_answers(front: Any, model: Any) -> list[tuple[str, Any]]:
    """Responses of every kind and all their events."""
    found: list[tuple[str, Any]] = []
    kind, event_kind = "openai.types.responses.Response", "openai.types.responses.ResponseStreamEvent"
    tools = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in ("weather", "now")]
    json_schema = {"type": "json_schema", **SCHEMA}
    named = {"type": "function", "name": "now"}
    earlier = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "12"},
        {"role": "assistant", "content": "noon"},
        {"role": "user", "content": "thanks"},
    ]
    for written, fields in (
        ("Hi", {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0.7, "top_p": 0.9}),
        (REASONED, {"include": ["reasoning.encrypted_content"], "instructions": "Brief.", "metadata": {"a": "b"}}),
        (CALLED, {"tools": tools, "tool_choice": "auto", "safety_identifier": "x", "user": "u"}),
        (TWO, {"tools": tools, "tool_choice": named, "max_tool_calls": 3}),
        ("Hello there", {"max_output_tokens": 3, "truncation": "auto", "prompt_cache_key": "k"}),
        ('{"a":1}', {"text": {"format": json_schema}, "presence_penalty": 0.1, "frequency_penalty": -0.3}),
        ("{}", {"text": {"format": {"type": "json_object"}}, "input": earlier}),
    ):
        model.reset()
        model.answer = written
        body = {"model": "tiny", "input": "hi", **fields}
        whole = await front.http.post("/v1/responses", json=body)
        assert whole.status_code == 200, whole.text
        found.append((kind, whole.json()))
        found.append((kind, (await front.http.get(f"/v1/responses/{whole.json()['id']}")).json()))
        items = (await front.http.get(f"/v1/responses/{whole.json()['id']}/input_items")).json()
        found += [("openai.types.responses.ResponseItem", item) for item in items["data"]]
        streamed = await front.http.post("/v1/responses", json={**body, "stream": True})
        found += [(event_kind, event) for event in events_of(streamed.text)]
    background = await front.http.post("/v1/responses", json={**body, "background": True})
    counted = await front.http.post("/v1/responses/input_tokens", json={"model": "tiny", "input": "hi"})
    found.append(("openai.types.responses.InputTokenCountResponse", counted.json()))
    return [*found, (kind, background.json())]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def message_answers(front: Any, model: Any) -> list[tuple[str, Any]]:
    """Messages of every kind and all their events."""
    found: list[tuple[str, Any]] = []
    tools = [{"name": name, "input_schema": PARAMETERS} for name in ("weather", "now")]
    for written, fields in (
        ("Hi", {}),
        (REASONED, {"service_tier": "auto"}),
        (CALLED, {"tools": tools}),
        ("Hello there", {"max_tokens": 3}),
        ("Hello there", {"stop_sequences": ["th"]}),
    ):
        model.reset()
        model.answer = written
        body = {"model": "tiny", "messages": HI, "max_tokens": 500, **fields}
        found.append(("anthropic.types.Message", (await front.http.post("/v1/messages", json=body)).json()))
        streamed = events_of((await front.http.post("/v1/messages", json={**body, "stream": True})).text)
        events = [event for event in streamed if event["type"] != "ping"]
        found += [("anthropic.types.RawMessageStreamEvent", event) for event in events]
    counted = await front.http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": HI})
    refused = await front.http.post("/v1/messages", json={"model": "other", "messages": HI, "max_tokens": 1})
    return [
        *found,
        ("anthropic.types.MessageTokensCount", counted.json()),
        ("anthropic.types.ErrorResponse", {"request_id": None, **refused.json()}),
    ]


@pytest.fixture(params=["here", "clients"])
def python(request: pytest.FixtureRequest) -> Path | str:
    """Interpreters whose packages differ by a year or so."""
    if request.param == "here":
        return sys.executable
    if not CLIENTS.exists():
        pytest.skip("the clients are not installed: make test")
    return CLIENTS


async def test_answers_and_events_are_of_the_makers_types(
    openai_answers: list[Any], response_answers: list[Any], message_answers: list[Any], python: Path | str
) -> None:
    answers = [*openai_answers, *response_answers]
    assert await problems(python, answers if python == sys.executable else [*answers, *message_answers]) == []


async def test_required_fields_are_there_even_if_null(
    openai_answers: list[Any], response_answers: list[Any], message_answers: list[Any]
) -> None:
    protocols = {"openai.types.chat": "chat", "openai.types": "completion", "openai.types.responses": "response"}
    found = set()
    for name, value in [*openai_answers, *response_answers, *message_answers]:
        found.update(missing(protocols.get(name.rpartition(".")[0], "message"), value))
    assert sorted(found) == []


async def test_numbers_are_told_as_they_were_sent(front: Any, model: Any) -> None:
    model.reset()
    sent = {"temperature": 0.7, "top_p": 0.95, "presence_penalty": 0.1, "frequency_penalty": -1.3}
    answer = (await front.http.post("/v1/responses", json={"model": "tiny", "input": "hi", **sent})).json()
    assert {name: answer[name] for name in sent} == sent


async def test_numbers_of_the_model_are_told_as_its_makers_wrote_them(front: Any, model: Any, kit: Any) -> None:
    model.reset()
    recommended = {"temperature": 0.2, "top_p": 0.85}
    model.cards = [model.card(name="tuned", default_sampling=kit.inference_pb2.SamplingParams(**recommended))]
    answer = (await front.http.post("/v1/responses", json={"model": "tuned", "input": "hi"})).json()
    model.reset()
    assert {name: answer[name] for name in recommended} == recommended
    assert (answer["presence_penalty"], answer["frequency_penalty"]) == (0, 0)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "responses/resp_1/input_tokens"),
        ("PUT", "responses/resp_1"),
        ("DELETE", "models/tiny"),
        ("POST", "chat/completions/x"),
        ("GET", "messages/batches"),
        ("POST", "messages/batches"),
        ("POST", "images/generations"),
    ],
)
async def test_paths_of_other_services_are_not_found(front: Any, method: str, path: str) -> None:
    response = await front.http.request(method, f"/v1/{path}", json={})
    error = response.json()["error"]
    kind = ("type", "not_found_error") if path.startswith("messages/") else ("code", "not_found")
    assert (response.status_code, error[kind[0]]) == (404, kind[1])
