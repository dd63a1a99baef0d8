"""Every failure has the one error shape, the status of the table, and the name of the field at fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.gateway.checks import MAX_NESTING
from headrace.protos.status import Reason, StatusError

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def _fresh(router: Any) -> None:
    router.reset()


async def failure(gateway: Any, path: str, status: int, body: Any, **options: Any) -> Any:
    """The error object of a request that fails with this status."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await gateway.http.post(path, content=raw, **options)
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert response.headers["x-request-id"]
    return error


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd"])
async def test_a_compressed_body_is_refused_by_its_encoding(gateway: Any, router: Any, encoding: str) -> None:
    headers = {"content-encoding": encoding}
    error = await failure(gateway, CHAT, 415, b"\x1f\x8b\x08", headers=headers)
    assert (error["param"], error["code"]) == ("content-encoding", "encoding_not_supported")
    assert encoding in error["message"]
    plain = {"model": "tiny", "messages": HI}
    for harmless in ("identity", "UTF-8"):
        response = await gateway.http.post(CHAT, json=plain, headers={"content-encoding": harmless})
        assert response.status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 10**400}, "seed"),
        ({"max_tokens": -(10**400)}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"270": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop_token_ids": [270]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"allowed_token_ids": [270]}, "allowed_token_ids"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 129}, "best_of"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x" * 65]}, "bad_words"),
        ({"bad_words": ["x"] * 65}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"return_token_ids": "yes"}, "return_token_ids"),
        ({"repetition_penalty": 101}, "repetition_penalty"),
        ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"stop_token_ids": [5] * 65}, "stop_token_ids"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"prompt_cache_key": "x" * 513}, "prompt_cache_key"),
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
        ({"prediction": {"type": "content", "content": [{"type": "image"}]}}, "prediction.content[0]"),
        ({"model": ["tiny"]}, "model"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template": 1}, "chat_template"),
    ],
)
async def test_a_bad_field_of_a_chat_is_named(gateway: Any, router: Any, fields: Any, param: str) -> None:
    error = await failure(gateway, CHAT, 400, {"model": "tiny", "messages": HI, **fields})
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.split("[")[0] in error["message"]
    assert router.streams == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "v"}}, "audio"),
        ({"num_beam_groups": 2}, "num_beam_groups"),
        ({"use_beam_search": False, "length_penalty": 0.5, "best_of": 2}, "length_penalty"),
        ({"use_beam_search": True, "n": 2, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "n": 2, "top_k": 5}, "top_k"),
        ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias"),
        ({"use_beam_search": True, "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"use_beam_search": True, "bad_words": ["x"]}, "bad_words"),
        ({"use_beam_search": True, "guided_regex": "a"}, "guided_regex"),
        ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "response_format"),
        ({"use_beam_search": True, "n": 2, "best_of": 3, "stream": True}, "best_of"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"diversity_penalty": 0.5}, "diversity_penalty"),
        ({"logits_processors": ["x"]}, "logits_processors"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"grammar_lazy": True}, "grammar_lazy"),
        ({"grammar_triggers": [{}]}, "grammar_triggers"),
        ({"documents": [{}]}, "documents"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
    ],
)
async def test_what_cannot_be_honoured_yet_is_refused_by_name(gateway: Any, fields: Any, param: str) -> None:
    error = await failure(gateway, CHAT, 400, {"model": "tiny", "messages": HI, **fields})
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "unsupported", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [270]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 3, "n": 100}, "n"),
        ({"prompt": ["a"] * 3, "best_of": 100}, "best_of"),
        ({"prompt": None}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"min_tokens": 17}, "min_tokens"),
    ],
)
async def test_a_bad_field_of_a_completion_is_named(gateway: Any, router: Any, fields: Any, param: str) -> None:
    body = {"model": "tiny", "prompt": "a", "add_special_tokens": False, **fields}
    assert (await failure(gateway, COMPLETIONS, 400, body))["param"] == param
    assert router.streams == []


@pytest.mark.parametrize(
    ("fields", "name"), [({"n": 3}, "n"), ({"best_of": 3, "n": 2}, "best_of"), ({"best_of": 3}, "best_of")]
)
async def test_a_search_that_a_worker_refuses_names_what_the_caller_wrote(
    gateway: Any, router: Any, kit: Any, fields: Any, name: str
) -> None:
    async def refuse(_: Any, stream: Any, send: Any) -> None:
        width = stream.request.sampling.beam_search.width
        problem = f"sampling.beam_search.width is {width}, and 2 is the maximum"
        raise kit.StatusError(kit.Reason.INVALID_FIELD, problem, field="sampling.beam_search.width")

    router.script = refuse
    body = {"model": "tiny", "prompt": "a", "use_beam_search": True, **fields}
    error = await failure(gateway, COMPLETIONS, 400, body)
    assert (error["param"], error["message"]) == (name, f"{name} is 3, and 2 is the maximum")


async def test_a_prompt_longer_than_the_context_says_what_clients_match_on(gateway: Any) -> None:
    error = await failure(gateway, COMPLETIONS, 400, {"model": "tiny", "prompt": "x" * 300})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "This model's maximum context length is 256 tokens" in error["message"]


async def test_prompt_and_max_tokens_must_fit_together_but_a_default_is_shortened(gateway: Any, router: Any) -> None:
    body = {"model": "tiny", "prompt": [5] * 250}
    assert (await failure(gateway, COMPLETIONS, 400, {**body, "max_tokens": 7}))["code"] == "context_length_exceeded"
    for fields, expected in (({"max_tokens": 6}, 6), ({}, 6)):
        response = await gateway.http.post(COMPLETIONS, json={**body, **fields})
        assert response.status_code == 200
        assert router.streams[-1].request.sampling.max_tokens == expected


async def test_more_messages_than_a_context_has_tokens_are_refused_before_they_are_read(gateway: Any) -> None:
    error = await failure(gateway, CHAT, 400, {"model": "tiny", "messages": HI * 257})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    ("raw", "where"),
    [
        (b'{"model": }', "byte 10"),
        (b'{"model": "a"', "byte 13"),
        (b'{"model": NaN}', "byte 10"),
        (b"", "byte 0"),
        (b'{"model": "\xff"}', "UTF-8"),
        (b'{"model": "\\ud800"}', "surrogate"),
        (b'{"metadata": ' + b"9" * 5000 + b', "model": "\\ud800"}', "truncated"),
        (b'{"metadata": ' + b"[" * 100_000, "nested too deeply"),
        (b"[1]", "expected 'object'"),
    ],
)
async def test_malformed_json_is_refused_with_its_position(gateway: Any, raw: bytes, where: str) -> None:
    error = await failure(gateway, CHAT, 400, raw)
    assert where in error["message"]


def deep(num_levels: int) -> Any:
    """A JSON schema with this many levels."""
    schema: Any = {}
    for _ in range(num_levels - 1):
        schema = {"items": schema}
    return schema


def nested(path: str, num_levels: int) -> Any:
    """A request with this many levels in each place where a caller may nest as deeply as it likes."""
    if path == "/v1/responses":
        tools = [{"type": "function", "name": "f", "parameters": deep(num_levels - 3)}]
        return {"input": "hi", "tools": tools, "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}
    if path == "/v1/messages":
        return {"max_tokens": 5, "messages": HI, "tools": [{"name": "f", "input_schema": deep(num_levels - 3)}]}
    if path == "/api/chat":
        return {"messages": HI, "stream": False, "format": deep(num_levels - 1)}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps(deep(num_levels))}}
    return {
        "messages": [*HI, {"role": "assistant", "tool_calls": [call]}, *HI],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": deep(num_levels - 4)}}],
        "response_format": {"type": "json_object", "schema": deep(num_levels - 2)},
        "chat_template_kwargs": {"x": deep(num_levels - 2)},
        "metadata": deep(num_levels - 1),
    }


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages", "/api/chat"])
async def test_whatever_is_nested_is_answered_or_refused_and_never_an_error_of_the_gateway(
    gateway: Any, router: Any, path: str
) -> None:
    response = await gateway.http.post(path, json={"model": "tiny", **nested(path, MAX_NESTING)})
    assert response.status_code in (200, 400), response.text
    assert "nested" not in response.text
    for raw in (nested(path, MAX_NESTING + 1), nested(path, 900)):
        response = await gateway.http.post(path, json={"model": "tiny", **raw})
        assert (response.status_code, "nested too deeply" in response.text) == (400, True), response.text


async def test_arguments_in_a_text_that_are_nested_too_deeply_stay_a_text(gateway: Any) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps(deep(MAX_NESTING + 1))}}
    body = {"model": "tiny", "messages": [*HI, {"role": "assistant", "tool_calls": [call]}, *HI]}
    response = await gateway.http.post("/tokenize", json=body)
    assert response.json()["count"] > 2 * MAX_NESTING


async def test_a_number_that_is_not_finite_is_refused(gateway: Any) -> None:
    raw = b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "temperature": 1e999}'
    assert (await failure(gateway, CHAT, 400, raw))["param"] == "temperature"


async def test_an_unknown_model_is_named_with_those_there_are_and_asked_for_once_more(
    gateway: Any, router: Any
) -> None:
    num_lists = router.num_lists
    error = await failure(gateway, CHAT, 404, {"model": "m" * 5000, "messages": HI})
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'tiny'" in error["message"]
    assert len(error["message"]) < 400
    assert router.num_lists == num_lists + 1


async def test_unknown_paths_and_wrong_methods_have_the_same_shape(gateway: Any) -> None:
    assert (await failure(gateway, "/v1/nothing", 404, {}))["code"] == "not_found"
    response = await gateway.http.get(CHAT)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert (await gateway.http.post("/v1/models", json={})).status_code == 405


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v2/repository/index", {"error": str}),
        ("/v2/models/tiny/config", {"error": str}),
        ("/api/nothing", {"error": str}),
        ("/v1/messages/batches", {"type": str, "error": dict, "request_id": str}),
        ("/v2/nothing/at/all", {"error": str}),
        ("/nothing", {"error": dict}),
        ("/v1/files", {"error": dict}),
    ],
)
async def test_an_unknown_path_has_the_shape_of_the_protocol_that_owns_its_beginning(
    gateway: Any, path: str, shape: dict[str, type]
) -> None:
    response = await gateway.http.get(path)
    assert response.status_code in (400, 404)
    assert {name: type(value) for name, value in response.json().items()} == shape
    assert ("request-id" in response.headers) is (path == "/v1/messages/batches")


async def test_tritons_own_parts_of_a_model_are_refused_as_such(gateway: Any) -> None:
    refused = (await gateway.http.get("/v2/models/tiny/config")).json()["error"]
    assert refused == "config of a model is Triton's own and not supported; GET /v2/models/tiny has its tensors"
    assert "does not exist" in (await gateway.http.get("/v2/models/other")).json()["error"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b"\xff\xfe{\0", "byte order"),
    ],
)
async def test_a_body_that_begins_wrongly_is_said(gateway: Any, body: bytes, said: str) -> None:
    assert said in (await failure(gateway, CHAT, 400, body))["message"]


async def test_a_body_over_the_limit_is_refused(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.edge.bodies, "max_bytes", 1000)
    assert (await failure(gateway, CHAT, 413, b"x" * 1001))["code"] == "body_too_large"
    assert "JSON" in (await failure(gateway, CHAT, 400, b"x" * 1000))["message"]


async def test_the_request_id_is_echoed_if_it_is_fit_and_else_made(gateway: Any, router: Any) -> None:
    body = {"model": "tiny", "messages": HI}
    for given, echoed in (("abc-123", True), ("x" * 129, False), ("a b", False), ("", False)):
        response = await gateway.http.post(CHAT, json=body, headers={"x-request-id": given})
        assert (response.headers["x-request-id"] == given) is echoed
        assert router.streams[-1].metadata["x-request-id"] == response.headers["x-request-id"]


async def test_the_trace_context_is_passed_on(gateway: Any, router: Any) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await gateway.http.post(CHAT, json={"model": "tiny", "messages": HI}, headers={"traceparent": trace})
    assert router.streams[0].metadata["traceparent"] == trace


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (StatusError(Reason.QUEUE_FULL, "full", retry_after_s=2.5), 429, 2.5),
        (StatusError(Reason.QUEUE_FULL, "full", retry_after_s=0.1), 429, 1.0),
        (StatusError(Reason.WORKER_LOST, "all workers were lost"), 503, 1.0),
        (StatusError(Reason.DEADLINE, "late"), 504, None),
        (StatusError(Reason.INTERNAL, "broken"), 500, None),
        (StatusError(Reason.INVALID_FIELD, "bad", field="sampling.top_k"), 400, None),
    ],
)
async def test_a_refusal_from_upstream_keeps_its_meaning(
    gateway: Any, router: Any, error: StatusError, status: int, retry_after: float | None
) -> None:
    async def refuse(_: Any, stream: Any, send: Any) -> None:
        raise error

    router.script = refuse
    for stream in (False, True):
        body = {"model": "tiny", "messages": HI, "stream": stream}
        response = await gateway.http.post(CHAT, json=body)
        assert response.status_code == status
        if retry_after is None:
            assert "retry-after" not in response.headers
        else:  # never sooner, and not at one moment for all who are refused at once
            told_ms = int(response.headers["retry-after-ms"])
            assert 1000 * retry_after <= told_ms <= 1500 * retry_after + 1
            assert int(response.headers["retry-after"]) == -(-told_ms // 1000)
        assert response.json()["error"]["message"] == error.message
        assert response.json()["error"]["param"] == error.field
    assert len(router.streams) == 2


async def test_an_error_in_the_middle_of_a_stream_is_its_last_event(gateway: Any, router: Any, kit: Any) -> None:
    async def break_off(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("ab"), 0, None)
        raise StatusError(Reason.INTERNAL, "broken")

    router.script = break_off
    response = await gateway.http.post(CHAT, json={"model": "tiny", "messages": HI, "stream": True})
    events = response.text.rstrip("\n").split("\n\n")
    assert json.loads(events[-1].removeprefix("data: ")) == {
        "error": {"message": "broken", "type": "server_error", "param": None, "code": "internal_error"}
    }
    assert "[DONE]" not in response.text
    assert '"content":"ab"' in events[-2]
