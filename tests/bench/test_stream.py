"""What the APIs' streams mean, in whatever pieces they arrive, and the bodies of requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.bench.apis import Options, Prompt, api_of, error_text
from headrace.bench.record import Record
from headrace.bench.stream import Stream

PROMPT = Prompt([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}], 9)
OPTIONS = Options("m", True, {"temperature": 0.5}, {"seed": 7})

STREAMS = {
    "openai": [
        'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}',
        'data: {"choices":[{"index":0,"text":"b","finish_reason":null}],"usage":null}',
        'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}',
        'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3,"total_tokens":8}}',
        "data: [DONE]",
    ],
    "openai-chat": [
        'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}',
        ": a comment",
        'data: {"choices":[{"index":0,"delta":{"reasoning_content":"a"},"finish_reason":null}]}',
        'data: {"choices":[{"index":0,"delta":{"content":"b"},"finish_reason":null}]}',
        'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}],'
        '"usage":{"prompt_tokens":5,"completion_tokens":3}}',
        "data: [DONE]",
    ],
    "openai-responses": [
        'data: {"type":"response.created","response":{"status":"in_progress","usage":null}}',
        'data: {"type":"response.reasoning_text.delta","delta":"a"}',
        "event: response.output_text.delta",
        'data: {"type":"response.output_text.delta","delta":"b"}',
        'data: {"type":"response.output_text.done","text":"b"}',
        'data: {"type":"response.incomplete","response":{"incomplete_details":{"reason":"max_output_tokens"},'
        '"usage":{"input_tokens":5,"output_tokens":3,"total_tokens":8}}}',
    ],
    "ollama": [
        '{"model":"m","message":{"role":"assistant","content":"a"},"done":false}',
        '{"model":"m","message":{"role":"assistant","content":"b"},"done":false}',
        '{"model":"m","message":{"content":""},"done":true,"done_reason":"length","prompt_eval_count":5,"eval_count":3}',
    ],
    "tgi": [
        'data:{"index":1,"token":{"id":1,"text":"a","logprob":0,"special":false},"generated_text":null,"details":null}',
        'data:{"index":2,"token":{"id":2,"text":"b","logprob":0,"special":false},"generated_text":"ab",'
        '"details":{"finish_reason":"length","generated_tokens":3,"input_length":5}}',
    ],
    "kserve": [
        'data: {"model_name":"m","text_output":"a","num_input_tokens":5,"num_output_tokens":1}',
        'data: {"model_name":"m","text_output":"b","finish_reason":"length","num_input_tokens":5,'
        '"num_output_tokens":2}',
    ],
}


def read(backend: str, pieces: list[bytes], content_type: str = "text/event-stream") -> Record:
    record = Record(0, 5, 3)
    ends: list[int] = []
    stream = Stream(api_of(backend, None), record, lambda: ends.append(0))
    stream.began(200, content_type)
    for number, piece in enumerate(pieces):
        stream.received(piece, float(number))
    assert not ends
    stream.ended(None)
    assert len(ends) == 1
    return record


def raw(backend: str) -> bytes:
    end = "\n" if backend == "ollama" else "\n\n"
    return "".join(line + end for line in STREAMS[backend]).encode()


@pytest.mark.parametrize("backend", STREAMS)
@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_a_stream_is_read_in_pieces_of_any_size(backend: str, size: int) -> None:
    whole = raw(backend)
    record = read(backend, [whole[at : at + size] for at in range(0, len(whole), size)])
    assert (record.error_kind, record.text, record.finish_reason) == ("", "ab", "length")
    assert (record.usage_prompt_tokens, record.usage_completion_tokens) == (5, 3)
    assert len(record.times) == 2


@pytest.mark.parametrize("backend", STREAMS)
def test_each_event_has_the_time_at_which_it_came(backend: str) -> None:
    end = "\n" if backend == "ollama" else "\r\n\r\n"
    record = read(backend, [(line + end).encode() for line in STREAMS[backend]])
    contents = {"openai-chat": [2, 3], "openai-responses": [1, 3]}
    assert record.times == contents.get(backend, [0, 1])
    ends = {"openai": 2, "openai-chat": 4, "openai-responses": 5, "ollama": 2, "tgi": 1, "kserve": 1}
    assert record.ended_s == ends[backend]


@pytest.mark.parametrize(
    ("details", "cached"),
    [
        ('{"cached_tokens":4}', 4),
        ('{"cached_tokens":null}', None),
        ("null", None),
        ("[4]", None),
        ('{"audio":1}', None),
    ],
)
@pytest.mark.parametrize("backend", ["openai", "openai-responses"])
def test_cached_tokens_of_a_prompt_are_those_of_the_usage_if_it_has_them(
    backend: str, details: str, cached: int | None
) -> None:
    event = '{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":3,"prompt_tokens_details":' + details + "}}"
    if backend == "openai-responses":
        usage = '{"input_tokens":5,"output_tokens":3,"input_tokens_details":' + details + "}"
        event = '{"type":"response.completed","response":{"usage":' + usage + "}}"
    record = read(backend, [f"data: {event}\n\n".encode()])
    assert (record.cached_tokens, record.usage_prompt_tokens) == (cached, 5)


@pytest.mark.parametrize("backend", ["openai", "openai-chat", "openai-responses", "ollama", "tgi"])
def test_a_stream_that_ends_too_early_is_broken_off(backend: str) -> None:
    end = "\n" if backend == "ollama" else "\n\n"
    assert read(backend, [(STREAMS[backend][0] + end).encode()]).error_kind == "broken off"


@pytest.mark.parametrize(
    ("event", "kind", "said"),
    [
        ('{"error":{"message":"no room","code":503}}', "error in the stream", "no room"),
        ("{nonsense", "malformed", "not one of this API"),
        ('{"choices":[{"text":5}]}', "malformed", "Expected `str | null`"),
    ],
)
def test_an_event_that_is_an_error_or_nonsense_fails_the_request(event: str, kind: str, said: str) -> None:
    record = read("openai", [f"data: {event}\n\ndata: [DONE]\n\n".encode()])
    assert record.error_kind == kind
    assert said in record.error


@pytest.mark.parametrize(
    "event",
    [
        '{"type":"response.failed","response":{"error":{"code":"server_error","message":"no room"}}}',
        '{"type":"error","code":"x","message":"no room"}',
    ],
)
def test_a_response_that_failed_is_an_error(event: str) -> None:
    record = read("openai-responses", [f"data: {event}\n\n".encode()])
    assert (record.error_kind, record.error) == ("error in the stream", "no room")


def test_an_answer_that_is_no_stream_fails_with_what_it_says() -> None:
    record = read("openai", [b'{"error":{"message":"use POST"}}'], "application/json")
    assert (record.error_kind, record.error) == ("not a stream", "use POST")


def test_a_tool_call_is_content() -> None:
    call = 'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{}"}}]}}]}\n\n'
    end = 'data: {"choices":[{"delta":{},"finish_reason":"tool_calls"}]}\n\ndata: [DONE]\n\n'
    record = read("openai-chat", [call.encode(), end.encode()])
    assert (record.times, record.text, record.finish_reason) == ([0.0], "", "tool_calls")


BODIES: dict[str, dict[str, Any]] = {
    "openai": {"prompt": "be brief\nhello", "max_tokens": 9, "ignore_eos": True, "temperature": 0.5},
    "openai-chat": {"messages": list(PROMPT.messages), "max_completion_tokens": 9, "temperature": 0.5},
    "openai-responses": {
        "input": list(PROMPT.messages),
        "max_output_tokens": 9,
        "store": False,
        "temperature": 0.5,
    },
    "ollama": {"messages": list(PROMPT.messages), "options": {"num_predict": 9, "temperature": 0.5}},
    "tgi": {"inputs": "be brief\nhello", "parameters": {"max_new_tokens": 9, "details": True, "temperature": 0.5}},
    "kserve": {"text_input": "be brief\nhello"},
}


@pytest.mark.parametrize("backend", BODIES)
def test_bodies_have_the_fields_of_their_api(backend: str) -> None:
    body = json.loads(api_of(backend, None).body(PROMPT, OPTIONS))
    assert body == {**body, **BODIES[backend], "seed": 7}
    assert body.get("stream", True)


def test_the_endpoint_of_chats_makes_it_a_chat() -> None:
    api = api_of("vllm", "/openai/v1/chat/completions")
    assert "messages" in json.loads(api.body(PROMPT, OPTIONS))
    assert api.path("m") == "/openai/v1/chat/completions"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":{"message":"busy"}}', "busy"),
        (b'{"detail":"not found"}', "not found"),
        (b"<html>", "<html>"),
        (b"[1]", "[1]"),
    ],
)
def test_the_message_of_a_refusal_is_found(body: bytes, text: str) -> None:
    assert error_text(body) == text
