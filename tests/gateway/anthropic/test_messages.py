"""The Messages API over real HTTP, with a fake router that plays the model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.gateway.edge import exchange
from headrace.protos.inference_pb2 import AGGREGATION_MODE_SUM, FINISH_REASON_LENGTH, CacheEviction
from tests.gateway.tool_model import ONE, TEXTS, TWO, events_of, in_pieces, without

pytestmark = pytest.mark.asyncio(loop_scope="module")
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
NOW = {"name": "now", "description": "The time.", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(autouse=True)
def _fresh(model: Any) -> None:
    model.reset()


@pytest.fixture
def ask(front: Any, model: Any) -> Any:
    """Ask a model that writes this text; the message, or the events of its stream."""

    async def post(text: str, **fields: Any) -> Any:
        model.answer = text
        body = {"model": "tiny", "messages": HI, "max_tokens": 500, **fields}
        response = await front.http.post(MESSAGES, json=body)
        assert response.status_code == 200, response.text
        return events_of(response.text) if fields.get("stream") else response.json()

    return post


@pytest.fixture
def refused(front: Any, model: Any) -> Any:
    """Send a request that is refused. Returns the error message."""

    async def post(kind: str = "invalid_request_error", status: int = 400, **fields: Any) -> str:
        body = {"model": "tiny", "messages": HI, "max_tokens": 500, **fields}
        response = await front.http.post(MESSAGES, json={k: v for k, v in body.items() if v is not ...})
        assert response.status_code == status, response.text
        assert model.streams == []
        error = response.json()
        assert error == {"type": "error", "error": {"type": kind, "message": error["error"]["message"]}}
        return str(error["error"]["message"])

    return post


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"max_tokens": 0}])
async def test_the_id_of_the_request_is_where_the_clients_of_this_api_look(front: Any, fields: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": HI, "max_tokens": 5, **fields}
    response = await front.http.post(MESSAGES, json=body, headers={"x-request-id": "req_1"})
    assert response.headers["request-id"] == response.headers["x-request-id"] == "req_1"
    assert "request-id" not in (await front.http.get("/v1/models")).headers


# --- whole answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["/v1", "/v3"])
async def test_a_message_has_the_text_and_the_account(front: Any, model: Any, prefix: str) -> None:
    model.num_cached = 7
    body = {"model": "tiny", "messages": HI, "max_tokens": 100}
    answer = (await front.http.post(f"{prefix}/messages", json=body)).json()
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello, wörld 😀!", "citations": None}],
        "container": None,
        "diagnostics": None,
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "usage": {
            "input_tokens": len(model.streams[0].request.token_ids) - 7,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 7,
            "output_tokens": len("Hello, wörld 😀!".encode()) + 1,
            "output_tokens_details": {"thinking_tokens": 0},
            "server_tool_use": None,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "inference_geo": None,
            "service_tier": "standard",
            "speed": "standard",
        },
    }


async def test_thinking_is_a_block_of_its_own_with_a_signature(ask: Any) -> None:
    answer = await ask("<think>\nHm.\n</think>\n\nParis.")
    thinking, text = answer["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "Paris.", "citations": None}
    assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": len("\nHm.\n")}


async def test_calls_are_blocks_behind_the_text(ask: Any) -> None:
    answer = await ask(f"Look: {ONE}\n{TWO}", tools=[WEATHER, NOW])
    text, weather, now = answer["content"]
    assert text["text"] == "Look:"
    assert weather.pop("id").startswith("toolu_")
    direct = {"type": "direct"}
    assert weather == {"type": "tool_use", "name": "weather", "input": {"city": "Köln"}, "caller": direct}
    assert (now["name"], now["input"]) == ("now", {})
    assert answer["stop_reason"] == "tool_use"


async def test_a_call_that_is_cut_off_shows_its_input_as_text(ask: Any) -> None:
    answer = await ask(ONE, tools=[WEATHER], max_tokens=len(ONE.encode()) - 20)
    (call,) = answer["content"]
    assert answer["stop_reason"] == "max_tokens"
    assert '{"city": "Köln"}'.startswith(call["input"]["INVALID_JSON"])


async def test_the_reason_to_stop_is_told(ask: Any) -> None:
    answer = await ask("Hello there", max_tokens=5)
    assert (answer["stop_reason"], answer["content"][0]["text"]) == ("max_tokens", "Hello")
    answer = await ask("Hello there", stop_sequences=["zz", " th"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " th")
    assert answer["content"][0]["text"] == "Hello"


async def test_an_answer_without_a_word_has_no_blocks(ask: Any) -> None:
    assert (await ask(""))["content"] == []


# --- streams --------------------------------------------------------------------------------------------------------


async def test_a_stream_of_text_has_all_events_in_order(ask: Any, model: Any) -> None:
    model.num_cached = 5
    start, *events = await ask("Hi", stream=True)
    num_prompt = len(model.streams[0].request.token_ids)
    assert start["message"]["content"] == []
    assert start["message"]["usage"]["input_tokens"] == num_prompt
    delta = events.pop(-2)
    assert events == [
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "", "citations": None}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "H"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "i"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_stop"},
    ]
    assert delta["type"] == "message_delta"
    assert delta["delta"] == {
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
    }
    assert (delta["usage"]["input_tokens"], delta["usage"]["cache_read_input_tokens"]) == (num_prompt - 5, 5)


async def test_a_stream_of_thinking_and_calls_has_their_deltas(ask: Any) -> None:
    events = await ask(f"<think>H</think>{ONE}", stream=True, tools=[WEATHER])
    deltas = [(event["index"], event["delta"]["type"]) for event in events if event["type"] == "content_block_delta"]
    assert deltas[:2] == [(0, "thinking_delta"), (0, "signature_delta")]
    assert set(deltas[2:]) == {(1, "input_json_delta")}
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert started[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert (started[1]["name"], started[1]["input"]) == ("weather", {})


async def test_an_error_in_a_stream_is_its_last_event(front: Any, model: Any, kit: Any) -> None:
    async def fail(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("He"), 0, None)
        raise kit.StatusError(kit.Reason.TOO_LARGE_FOR_CACHE, "no room")

    model.script = fail
    body = {"model": "tiny", "messages": HI, "max_tokens": 9, "stream": True}
    *_, failed = events_of((await front.http.post(MESSAGES, json=body)).text)
    assert failed == {"type": "error", "error": {"type": "invalid_request_error", "message": "no room"}}


async def test_an_idle_stream_gets_pings(front: Any, model: Any, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.02)
    let_go = kit.asyncio.Event()
    tokens = kit.tokens_of("Hi")

    async def pause(router: Any, stream: Any, send: Any) -> None:
        await send(tokens[:1], 0, None)
        await let_go.wait()
        await send(tokens[1:], 1, FINISH_REASON_LENGTH)

    model.script = pause
    body = {"model": "tiny", "messages": HI, "max_tokens": 2, "stream": True}
    async with front.http.stream("POST", MESSAGES, json=body) as response:
        seen = ""
        async for chunk in response.aiter_text():
            seen += chunk
            if seen.endswith('event: ping\ndata: {"type": "ping"}\n\n' * 2):
                let_go.set()
    assert "message_stop" in seen


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS, data=st.data())
async def test_a_stream_adds_up_to_the_whole_answer(front: Any, model: Any, text: str, data: st.DataObject) -> None:
    model.script = in_pieces(text, data)
    fields: dict[str, Any] = {"model": "tiny", "messages": HI, "max_tokens": 3000}
    if data.draw(st.booleans(), label="tools"):
        fields["tools"] = [WEATHER, NOW]
    fields["stop_sequences"] = data.draw(st.sampled_from([None, ["é"], ["text"]]), label="stop")
    whole = (await front.http.post(MESSAGES, json=fields)).json()
    events = events_of((await front.http.post(MESSAGES, json={**fields, "stream": True})).text)
    assert without({"id"}, added_up(events)) == without({"id"}, whole)


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                delta = event["delta"]
                name = {"text_delta": "text", "thinking_delta": "thinking"}.get(delta["type"])
                if name is not None:
                    message["content"][event["index"]][name] += delta[name]
                elif delta["type"] == "signature_delta":
                    message["content"][event["index"]]["signature"] = delta["signature"]
                else:
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            case "message_delta":
                message |= {**event["delta"], "usage": {**message["usage"], **event["usage"]}}
    for index, text in inputs.items():
        try:
            message["content"][index]["input"] = json.loads(text)
        except ValueError:
            message["content"][index]["input"] = {"INVALID_JSON": text}
    return message


# --- the conversation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
async def test_the_system_prompt_comes_first(ask: Any, model: Any, system: Any) -> None:
    await ask("x", system=system)
    assert model.prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")


async def test_calls_results_and_thinking_go_back_to_the_template(ask: Any, model: Any) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "Look:"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}},
                {"type": "tool_use", "id": "t2", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "broken", "is_error": True},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    await ask("x", messages=messages, tools=[WEATHER, NOW])
    prompt = model.prompt
    assert (
        'assistant\n<think>Hm.</think>Look:<tool_call>weather{"city": "Köln"}</tool_call><tool_call>now{}</tool_call>'
    ) in prompt
    assert (
        "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>tool\nError: broken<|im_end|>\n<|im_start|>user\nSo?" in prompt
    )


async def test_turns_of_one_role_are_one(ask: Any, model: Any) -> None:
    await ask("x", messages=[*HI, {"role": "user", "content": "there"}])
    assert model.prompt.startswith("<|im_start|>user\nhi\nthere<|im_end|>")


async def test_a_last_message_of_the_assistant_goes_on(ask: Any, model: Any) -> None:
    answer = await ask(" Paris.", messages=[*HI, {"role": "assistant", "content": "It is"}])
    assert model.prompt.endswith("assistant\nIt is")
    assert answer["content"] == [{"type": "text", "text": " Paris.", "citations": None}]


async def test_thinking_that_was_omitted_comes_back_by_its_signature(ask: Any, model: Any) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    answer = await ask("<think>Hm é.</think>Yes", thinking=thinking)
    block = answer["content"][0]
    assert block["thinking"] == ""
    events = await ask("<think>Hm é.</think>Yes", thinking=thinking, stream=True)
    assert "thinking_delta" not in str(events)
    messages = [*HI, {"role": "assistant", "content": [block, {"type": "text", "text": "Yes"}]}, *HI]
    await ask("x", messages=messages)
    assert "<think>Hm é.</think>Yes" in model.prompt


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages must not be empty"),
        ([{"role": "system", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image", "source": {}}]}],
            "messages[0].content[0]: a block of type image",
        ),
        ([{"role": "user", "content": [{"type": "document"}]}], "of type document"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]: a block without a type"),
        ([{"role": "user", "content": [{"type": "tool_use"}]}], "of type tool_use"),
        ([{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}], "no tool_use of this id"),
        ([*HI, {"role": "assistant", "content": [{"type": "redacted_thinking"}]}], "redacted_thinking"),
        (
            [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": "x"}]}],
            "messages[1].content[0].input",
        ),
        (
            [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}],
            "followed by its tool_result",
        ),
        (
            [*HI, {"role": "assistant", "content": [{"type": "thinking", "thinking": "", "signature": "x"}]}, *HI],
            "messages[1].content[0].signature is not from this server",
        ),
    ],
)
async def test_what_is_wrong_with_a_message_is_named(refused: Any, messages: Any, named: str) -> None:
    assert named in await refused(messages=messages)


# --- fields ---------------------------------------------------------------------------------------------------------


async def test_sampling_fields_reach_the_worker(ask: Any, model: Any) -> None:
    await ask("x", temperature=0.5, top_p=0.25, top_k=7, seed=3, min_p=0.125, max_tokens=9)
    sampling = model.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 7, 3)
    assert (sampling.min_p, sampling.max_tokens) == (0.125, 9)


async def test_fields_that_change_nothing_are_taken(ask: Any) -> None:
    answer = await ask(
        "x", metadata={"user_id": "u"}, service_tier="auto", cache_control={"type": "ephemeral"}, speed="standard"
    )
    assert answer["content"][0]["text"] == "x"


async def test_the_template_sees_the_tools(ask: Any, model: Any) -> None:
    await ask("x", tools=[WEATHER, {**NOW, "type": "custom", "cache_control": {"type": "ephemeral"}}])
    prompt = model.prompt
    assert '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}' in prompt
    assert '"description": "The time."' in prompt
    assert "cache_control" not in prompt
    await ask("x", tools=[{**NOW, "name": "n" * 128}])
    assert f'"{"n" * 128}"' in model.prompt


async def test_the_choice_of_tools_is_enforced(ask: Any, model: Any) -> None:
    await ask(ONE, tools=[WEATHER, NOW], tool_choice={"type": "any"})
    grammar = model.sampling.constraint.grammar
    assert "weather" in grammar
    assert "now" in grammar
    answer = await ask(ONE, tools=[WEATHER, NOW], tool_choice={"type": "tool", "name": "weather"})
    assert '"now' not in model.sampling.constraint.grammar
    assert answer["stop_reason"] == "tool_use"
    answer = await ask(ONE, tools=[WEATHER], tool_choice={"type": "none"})
    assert answer["content"] == [{"type": "text", "text": ONE, "citations": None}]
    await ask(ONE, tools=[WEATHER], tool_choice={"type": "auto"})
    assert not model.sampling.HasField("constraint")


async def test_without_parallel_use_the_first_call_counts(ask: Any) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer = await ask(ONE + TWO, tools=[WEATHER, NOW], tool_choice=choice)
    assert [block["type"] for block in answer["content"]] == ["tool_use"]


async def test_thinking_is_switched_by_the_template(ask: Any, model: Any) -> None:
    for thinking, closed in (
        ({"type": "disabled"}, True),
        ({"type": "enabled", "budget_tokens": 1024}, False),
        ({"type": "adaptive"}, False),
    ):
        await ask("x", thinking=thinking, max_tokens=2000)
        assert model.prompt.endswith("</think>\n\n") is closed
    await ask("x", chat_template_kwargs={"enable_thinking": False})
    assert model.prompt.endswith("</think>\n\n")
    await ask("x", output_config={"effort": "max"})
    assert not model.prompt.endswith("</think>\n\n")


async def test_an_output_format_is_held_by_its_schema(ask: Any, model: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await ask('{"a":1}', output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(model.sampling.constraint.json_schema) == schema


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": ...}, "max_tokens is required"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"messages": ...}, "messages is required"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"stop_sequences": [str(i) for i in range(65)]}, "stop_sequences takes at most 64"),
        ({"system": [{"type": "image"}]}, "system[0]: a block of type image"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "built-in 'web_search_20250305'"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must have"),
        ({"tools": [{"name": "a" * 129, "input_schema": {}}]}, "tools[0].name must have"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name: there are two tools named"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{**WEATHER, "input_examples": [{}]}]}, "tools[0].input_examples"),
        ({"tools": [{**WEATHER, "allowed_callers": ["x"]}]}, "tools[0].allowed_callers"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "no tool named 'f'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "disable_parallel"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is required"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens must be at least 1024"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "less than max_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 2000}}, "thinking.budget_tokens needs"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, "thinking.display"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema"}}, "use output_config.format"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"speed": "fast"}, "speed"),
        ({"container": "c"}, "container"),
        ({"context_management": {}}, "context_management"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"inference_geo": "eu"}, "inference_geo"),
        ({"diagnostics": {}}, "diagnostics"),
        ({"fallbacks": [{}]}, "fallbacks"),
        ({"metadata": {"user_id": 1}}, "metadata.user_id"),
    ],
)
async def test_what_cannot_be_honoured_is_named(refused: Any, fields: Any, named: str) -> None:
    assert named in await refused(**fields)


async def test_a_prompt_that_is_too_long_is_refused(refused: Any) -> None:
    long = [{"role": "user", "content": 5000 * "x"}]
    assert "maximum context length is 4096 tokens" in await refused(messages=long)


async def test_errors_before_the_endpoint_have_its_shape(front: Any, refused: Any) -> None:
    await refused(kind="not_found_error", status=404, model="other")
    wrong = await front.http.get(MESSAGES)
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
    broken = await front.http.post(MESSAGES, content=b"{")
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_body_that_cannot_be_read_is_the_fault_of_the_request(front: Any) -> None:
    response = await front.http.post("/v1/messages", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert (response.status_code, response.json()["error"]["type"]) == (415, "invalid_request_error")


async def test_thinking_is_refused_where_the_model_has_none(gateway: Any) -> None:
    body = {"model": "tiny", "messages": HI, "max_tokens": 9, "thinking": {"type": "adaptive"}}
    response = await gateway.http.post(MESSAGES, json=body)
    assert "thinking is not supported" in response.json()["error"]["message"]
    body["thinking"] = {"type": "disabled"}
    assert (await gateway.http.post(MESSAGES, json=body)).status_code == 200


# --- count_tokens ---------------------------------------------------------------------------------------------------


async def test_the_count_is_that_of_the_prompt(front: Any, ask: Any, model: Any) -> None:
    fields = {"messages": HI, "system": "Be brief.", "tools": [WEATHER], "thinking": {"type": "disabled"}}
    await ask("x", **fields)
    response = await front.http.post(COUNT, json={"model": "tiny", **fields})
    assert response.json() == {"input_tokens": len(model.streams[0].request.token_ids)}
    assert len(model.streams) == 1


async def test_a_prompt_longer_than_the_context_is_counted(front: Any) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 5000}]}
    assert (await front.http.post(COUNT, json=body)).json()["input_tokens"] > 5000


async def test_the_count_refuses_what_a_message_refuses(front: Any) -> None:
    response = await front.http.post(COUNT, json={"model": "tiny", "messages": []})
    assert response.status_code == 400
    assert response.json()["error"] == {"type": "invalid_request_error", "message": "messages must not be empty"}
    body = {"model": "tiny", "messages": HI, "output_config": {"format": {"type": "json_schema", "schema": 5}}}
    response = await front.http.post(COUNT, json=body)
    assert response.status_code == 400
    assert "output_config.format" in response.json()["error"]["message"]


WRONG_RULES = [
    ({"bogus": 1}, "bogus"),
    (True, "cache_eviction must be false or an object"),
    ({"max_cache_size": 64, "apply_rotation": True}, "cache_eviction.apply_rotation is not supported"),
    ({"max_cache_size": 0}, "cache_eviction.max_cache_size must be at least 1"),
    ({"max_cache_size": 64, "aggregation_mode": "mean"}, "cache_eviction.aggregation_mode must be sum or norm_sum"),
    ({"max_cache_size": 64}, "cache_eviction is not possible: the model is served without --cache-eviction"),
]


@pytest.mark.parametrize(("rule", "problem"), WRONG_RULES)
async def test_a_wrong_rule_for_giving_up_blocks_is_refused(refused: Any, rule: Any, problem: str) -> None:
    assert problem in await refused(cache_eviction=rule)


async def test_a_rule_for_giving_up_blocks_reaches_the_worker(ask: Any, model: Any, front: Any) -> None:
    model.cards = [model.card(max_evicting_context_tokens=9000)]
    await front.models.refresh()
    try:
        await ask("Hi", cache_eviction={"max_cache_size": 64, "recent_size": 8, "aggregation_mode": "sum"})
        rule = CacheEviction(max_cache_size=64, recent_size=8, aggregation_mode=AGGREGATION_MODE_SUM)
        assert model.sampling.cache_eviction == rule
        await ask("Hi", cache_eviction=False)
        assert model.sampling.cache_eviction == CacheEviction(max_cache_size=0)
        await ask("Hi")
        assert not model.sampling.HasField("cache_eviction")
    finally:
        model.reset()
        await front.models.refresh()
