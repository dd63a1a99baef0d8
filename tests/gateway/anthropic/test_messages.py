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
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
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
        request_id = response.headers["request-id"]
        assert error == {
            "type": "error",
            "error": {"type": kind, "message": error["error"]["message"]},
            "request_id": request_id,
        }
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
        "content": [{"type": "text", "text": "Hello, wörld 😀!", "citations": []}],
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
    assert text == {"type": "text", "text": "Paris.", "citations": []}
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
    usage = start["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (num_prompt - 5, 5)
    delta = events.pop(-2)
    assert events == [
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "", "citations": []}},
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


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("TOO_LARGE_FOR_CACHE", "invalid_request_error"), ("MODEL_CHANGED", "overloaded_error")],
)
async def test_an_error_in_a_stream_is_its_last_event(front: Any, model: Any, kit: Any, reason: str, kind: str) -> None:
    async def fail(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("He"), 0, None)
        raise kit.StatusError(kit.Reason[reason], "no room")

    model.script = fail
    body = {"model": "tiny", "messages": HI, "max_tokens": 9, "stream": True}
    *_, failed = events_of((await front.http.post(MESSAGES, json=body)).text)
    assert failed["error"] == {"type": kind, "message": "no room"}


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
    assert answer["content"] == [{"type": "text", "text": " Paris.", "citations": []}]


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
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "system", "content": "x", "clear_at": "soon"}], "messages[0].clear_at"),
        ([{"role": "system", "content": [{"type": "image"}]}], "messages[0].content[0]: a block of type image"),
        ([{"role": "system", "content": [{"type": "tool_addition"}]}], "messages[0].content[0].tool"),
        ([{"role": "system", "content": "x", "output_config": {"effort": "vast"}}], "messages[0].output_config.effort"),
        ([{"role": "user"}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image", "source": {}}]}],
            "messages[0].content[0].source: a source without a type is not supported",
        ),
        ([{"role": "user", "content": [{"type": "document"}]}], "of type document"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]: a block without a type"),
        ([{"role": "user", "content": [{"type": "tool_use"}]}], "of type tool_use"),
        (
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}],
            "unexpected `tool_use_id` found in `tool_result` blocks: t; there is no `tool_use` of this id",
        ),
        (
            [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": ""}}]}],
            "messages[0].content[0].source: a block of type document with a source of type base64",
        ),
        ([{"role": "user", "content": [{"type": "container_upload", "file_id": "f"}]}], "of type container_upload"),
        (
            [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": [1]}]}],
            "messages[1].content[0].input",
        ),
        (
            [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}],
            "`tool_use` ids were found without `tool_result` blocks immediately after",
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
    assert answer["content"] == [{"type": "text", "text": ONE, "citations": []}]
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
    wanted = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        await ask('{"a":1}', **fields)
        assert json.loads(model.sampling.constraint.json_schema) == schema


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": ...}, "max_tokens is required"),
        ({"messages": ...}, "messages is required"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"max_tokens": -1}, "max_tokens must be at least 1"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences takes at most 64"),
        ({"system": [{"type": "image"}]}, "system[0]: a block of type image"),
        ({"tools": [{"type": "web_search", "name": "web_search"}]}, "no tool of type 'web_search'"),
        ({"tools": [{"type": 1, "name": "f"}]}, "no tool of type no name"),
        (
            {"tools": [SEARCH, WEATHER], "tool_choice": {"type": "tool", "name": "web_search"}},
            "the tool 'web_search' is not available here",
        ),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [SEARCH, {"name": "a b", "input_schema": {}}]}, "tools[1].name must have"),
        ({"tools": [{**WEATHER, "strict": 1}]}, "tools[0].strict must be true or false"),
        ({"tools": [{**WEATHER, "defer_loading": 1}]}, "tools[0].defer_loading must be true or false"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must have"),
        ({"tools": [{"name": "a" * 129, "input_schema": {}}]}, "tools[0].name must have"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name: there are two tools named"),
        ({"tools": [{**WEATHER, "input_examples": {}}]}, "tools[0].input_examples"),
        ({"tools": [{**WEATHER, "allowed_callers": "x"}]}, "tools[0].allowed_callers"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "no tool named 'f'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "disable_parallel"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is required"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens must be at least 1024"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
            "`max_tokens` must be greater than `thinking.budget_tokens`",
        ),
        ({"thinking": {"type": "adaptive", "budget_tokens": 2000}}, "thinking.budget_tokens needs"),
        ({"thinking": {"type": "adaptive", "display": "large"}}, "thinking.display"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format"),
        ({"output_format": {"type": "text"}}, "output_format must have"),
        (
            {"output_format": {}, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "output_format is the earlier name",
        ),
        ({"metadata": {"user_id": 1}}, "metadata.user_id"),
        ({"compaction": {}}, "compaction is not supported; ask for a summary"),
        ({"thread": {"type": "create"}}, "thread is not supported; send all turns"),
    ],
)
async def test_what_cannot_be_honoured_is_named(refused: Any, fields: Any, named: str) -> None:
    assert named in await refused(**fields)


async def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(
    front: Any, refused: Any
) -> None:
    messages = [{"role": "user", "content": "x" * 5000}]
    count = (await front.http.post(COUNT, json={"model": "tiny", "messages": messages})).json()["input_tokens"]
    assert await refused(messages=messages) == f"prompt is too long: {count} tokens > 4095 maximum"


async def test_an_answer_gets_the_room_that_the_prompt_leaves(front: Any, ask: Any, model: Any) -> None:
    answer = await ask("Hello", max_tokens=64000)
    num_prompt = len(model.streams[0].request.token_ids)
    assert model.sampling.max_tokens == 4096 - num_prompt
    assert answer["stop_reason"] == "end_turn"
    messages = [{"role": "user", "content": "x" * (4096 - num_prompt)}]
    answer = await ask("Hello", messages=messages, max_tokens=64000)
    assert (answer["content"][0]["text"], answer["stop_reason"]) == ("He", "model_context_window_exceeded")
    body = {"model": "tiny", "messages": messages, "max_tokens": 64000}
    assert (await front.http.post(MESSAGES, json=body)).headers["x-headrace-ignored"] == "max_tokens>2"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_computed_into_the_cache_without_an_answer(ask: Any, model: Any, stream: bool) -> None:
    answer = await ask("Hello", max_tokens=0, stream=stream)
    answer = added_up(answer) if stream else answer
    assert (answer["content"], answer["stop_reason"], answer["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert model.sampling.max_tokens == 1


async def test_errors_before_the_endpoint_have_its_shape(front: Any, refused: Any) -> None:
    await refused(kind="not_found_error", status=404, model="other")
    wrong = await front.http.get(MESSAGES)
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
    broken = await front.http.post(MESSAGES, content=b"{")
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_body_that_cannot_be_read_is_the_fault_of_the_request(front: Any) -> None:
    response = await front.http.post("/v1/messages", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert (response.status_code, response.json()["error"]["type"]) == (415, "invalid_request_error")


@pytest.mark.parametrize(
    ("reason", "status", "kind"),
    [
        ("MODEL_CHANGED", 529, "overloaded_error"),
        ("QUEUE_FULL", 529, "overloaded_error"),
        ("QUOTA", 429, "rate_limit_error"),
        ("DEADLINE", 504, "timeout_error"),
        ("INTERNAL", 500, "api_error"),
    ],
)
async def test_errors_have_the_status_and_type_of_the_provider(
    front: Any, model: Any, kit: Any, reason: str, status: int, kind: str
) -> None:
    async def fail(*_: Any) -> None:
        raise kit.StatusError(kit.Reason[reason], "not now", retry_after_s=3)

    model.script = fail
    response = await front.http.post(MESSAGES, json={"model": "tiny", "messages": HI, "max_tokens": 9})
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert ("retry-after" in response.headers) == (status in (429, 529))


async def test_a_body_that_is_too_large_has_the_type_of_the_provider(
    front: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front.edge.bodies, "max_bytes", 1000)
    response = await front.http.post(MESSAGES, content=b" " * 1001)
    assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")


# --- hints ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hinted(front: Any, model: Any) -> Any:
    """Send a request, and the same to count_tokens. Returns what the header of the first one names."""

    async def post(**fields: Any) -> list[str]:
        model.answer = "x"
        headers = fields.pop("headers", {})
        body = {"model": "tiny", "messages": HI, **fields}
        counted = await front.http.post(COUNT, json=body, headers=headers)
        assert counted.status_code == 200, counted.text
        response = await front.http.post(MESSAGES, json={"max_tokens": 2000, **body}, headers=headers)
        assert response.status_code == 200, response.text
        assert counted.json()["input_tokens"] == len(model.streams[-1].request.token_ids)
        named = response.headers.get("x-headrace-ignored", "")
        return named.split(", ") if named else []

    return post


@pytest.mark.parametrize(
    "fields",
    [
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": {}}]}},
        {"metadata": {"user_id": "u", "session": 5}},
        {"service_tier": "priority"},
        {"inference_geo": "eu"},
        {"speed": "fast"},
        {"container": {"skills": []}},
        {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]},
        {"diagnostics": {"previous_message_id": None}},
        {"fallbacks": [{"model": "other"}]},
        {"betas": ["context-1m-2025-08-07"]},
        {"what_comes_next_year": {"type": "on"}},
    ],
)
async def test_what_the_provider_takes_and_nobody_misses_is_named(hinted: Any, fields: dict[str, Any]) -> None:
    assert await hinted(**fields) == list(fields)


async def test_members_without_effect_are_named(hinted: Any) -> None:
    fields = {"thinking": {"type": "adaptive", "block_binding": {"x": 1}}, "output_config": {"task_budget": 1, "x": 1}}
    named = ["thinking.block_binding", "output_config.task_budget", "output_config.x"]
    assert sorted(await hinted(**fields)) == sorted(named)


@pytest.mark.parametrize(
    "fields",
    [
        {"context_management": {"edits": []}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"mcp_servers": []},
        {"container": None, "inference_geo": None, "fallbacks": [], "service_tier": "standard_only"},
        {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"thinking": {"type": "adaptive", "display": "summarized"}},
        {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}, "citations": []}]},
        {"tools": [{**WEATHER, "type": "custom", "eager_input_streaming": True, "allowed_callers": ["direct"]}]},
        {"headers": {"anthropic-version": "2023-06-01", "anthropic-beta": "context-1m-2025-08-07,effort-2025-11-24"}},
    ],
)
async def test_what_asks_for_nothing_is_not_named(hinted: Any, fields: dict[str, Any]) -> None:
    assert await hinted(**fields) == []


async def test_a_budget_is_named_where_no_token_ends_the_reasoning(hinted: Any) -> None:
    thinking, headers = (
        {"type": "enabled", "budget_tokens": 20000},
        {"anthropic-beta": "interleaved-thinking-2025-05-14"},
    )
    assert await hinted(thinking=thinking, headers=headers) == ["thinking.budget_tokens"]


async def test_the_answer_says_that_the_context_was_not_edited(ask: Any, front: Any) -> None:
    edits = {"edits": [{"type": "clear_thinking_20251015"}]}
    assert (await ask("x", context_management=edits))["context_management"] == {"applied_edits": []}
    *_, delta, _ = await ask("x", context_management=edits, stream=True)
    assert delta["context_management"] == {"applied_edits": []}
    body = {"model": "tiny", "messages": HI, "context_management": edits}
    counted = (await front.http.post(COUNT, json=body)).json()
    assert counted["context_management"] == {"original_input_tokens": counted["input_tokens"]}


# --- turns of the system, history as it comes ------------------------------------------------------------------------


async def test_a_turn_of_the_system_stays_at_its_place(hinted: Any, model: Any) -> None:
    """As Claude Code sends it since 2.1.154."""
    assert await hinted(system="Be kind.", messages=[*HI, {"role": "system", "content": "Be brief."}]) == []
    assert model.prompt.startswith(
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>system\nBe brief."
    )


async def test_a_turn_of_the_system_at_the_start_belongs_to_the_system_prompt(hinted: Any, model: Any) -> None:
    await hinted(system="Be kind.", messages=[{"role": "system", "content": "Be brief."}, *HI])
    assert model.prompt.startswith("<|im_start|>system\nBe kind.\nBe brief.<|im_end|>\n<|im_start|>user\nhi")


async def test_a_turn_of_the_system_may_end_with_the_turn_that_it_is_for(hinted: Any, model: Any) -> None:
    once = {"role": "system", "content": "Be brief.", "clear_at": "next_user_message"}
    await hinted(messages=[*HI, once])
    assert "Be brief." in model.prompt
    await hinted(messages=[*HI, once, {"role": "assistant", "content": "x"}, *HI])
    assert "Be brief." not in model.prompt


async def test_a_turn_of_the_system_sets_the_effort_of_one_answer(hinted: Any, model: Any) -> None:
    turn = {"role": "system", "output_config": {"effort": "low"}}
    await hinted(messages=[*HI, turn], output_config={"effort": "high", "task_budget": {"type": "tokens", "total": 9}})
    await hinted(messages=[*HI, {**turn, "content": []}, {"role": "assistant", "content": "x"}, *HI])


async def test_the_first_lines_of_claude_code_do_not_reach_the_prompt(hinted: Any, model: Any) -> None:
    system = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: cc_version=2.1.1;", "Be kind.")]
    await hinted(system=system)
    assert model.prompt.startswith("<|im_start|>system\nBe kind.<|im_end|>")


async def test_blocks_of_earlier_answers_that_only_the_provider_reads_are_left_out(hinted: Any, model: Any) -> None:
    blocks = [
        {"type": "redacted_thinking", "data": "xx"},
        {"type": "thinking", "thinking": "", "signature": "theirs"},
        {"type": "thinking", "thinking": "Hm.", "signature": "theirs"},
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        {"type": "of_next_year"},
        {"type": "text", "text": "Paris.", "citations": None},
    ]
    named = await hinted(messages=[*HI, {"role": "assistant", "content": blocks}, *HI])
    assert named == [
        "messages.redacted_thinking",
        "messages.thinking.signature",
        "messages.server_tool_use",
        "messages.web_search_tool_result",
        "messages.of_next_year",
    ]
    assert "assistant\n<think>Hm.</think>Paris.<|im_end|>" in model.prompt


async def test_a_summary_of_earlier_turns_is_text(hinted: Any, model: Any) -> None:
    blocks = [{"type": "compaction", "content": "We spoke of rain."}, {"type": "compaction", "content": None}]
    await hinted(messages=[*HI, {"role": "assistant", "content": blocks}, *HI])
    assert "assistant\nWe spoke of rain.\n<|im_end|>" in model.prompt


CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {}}]}


def result(*content: Any) -> dict[str, Any]:
    """A turn of the user with a result of the call."""
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": list(content)}]}


@pytest.mark.parametrize(
    ("stored", "shown"),
    [(None, "{}"), ('{"city": "Köln"}', '{"city": "Köln"}'), ('{"city": "Kö', r'{"INVALID_JSON": "{\"city\": \"Kö"}')],
)
async def test_inputs_that_were_cut_off_come_back_as_they_are(hinted: Any, model: Any, stored: Any, shown: str) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": stored}
    assert (
        await hinted(messages=[*HI, {"role": "assistant", "content": [call]}, result({"type": "text", "text": "rain"})])
        == []
    )
    assert f"<tool_call>weather{shown}</tool_call>" in model.prompt


async def test_an_answer_without_a_text_may_be_null(hinted: Any, model: Any) -> None:
    await hinted(messages=[*HI, {"role": "assistant", "content": None}, *HI], system="")
    assert model.prompt.startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<|im_end|>")


async def test_what_a_result_has_besides_text_becomes_a_note(hinted: Any, model: Any) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    messages = [*HI, CALL, result({"type": "text", "text": "Here:"}, image, pdf)]
    assert await hinted(messages=messages) == ["tool_result.document", "tool_result.image"]
    note = "[The tool returned a block of type document, which cannot be shown.]"
    assert f"tool\nHere:\n[image: omitted, because this model cannot read it]\n{note}" in model.prompt


async def test_documents_and_search_results_are_text(hinted: Any, model: Any) -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    document = {
        "type": "document",
        "source": plain,
        "title": "Log",
        "context": "of May",
        "citations": {"enabled": True},
    }
    blocks = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "It snows."}]}}
    text = [{"type": "text", "text": "It pours."}]
    found = {"type": "search_result", "title": "T", "source": "http://x", "content": text, "citations": {}}
    log = "<document>\nTitle: Log\nContext: of May\nIt rains.\n</document>"
    snow = "<document>\nIt snows.\n</document>"
    pours = "<search_result>\nTitle: T\nSource: http://x\nIt pours.\n</search_result>"
    assert await hinted(messages=[{"role": "user", "content": [document, blocks, found]}]) == ["citations"]
    assert f"user\n{log}\n{snow}\n{pours}<|im_end|>" in model.prompt
    await hinted(messages=[*HI, CALL, result(document, blocks, found)])
    assert f"tool\n{log}\n{snow}\n{pours}<|im_end|>" in model.prompt


# --- tools ----------------------------------------------------------------------------------------------------------


async def test_hosted_tools_beside_own_ones_are_left_out_and_named(hinted: Any, model: Any) -> None:
    hosted = [
        SEARCH,
        {"type": "mcp_toolset", "mcp_server_name": "x"},
        {"type": "computer_20250124", "name": "computer"},
    ]
    named = [f"tools.{tool['type']}" for tool in hosted]
    assert await hinted(tools=[*hosted, WEATHER]) == named
    assert '"weather"' in model.prompt
    assert "web_search" not in model.prompt
    assert await hinted(tools=hosted, tool_choice={"type": "auto", "disable_parallel_tool_use": True}) == named
    called = {"name": "inner", "input_schema": {}, "allowed_callers": ["code_execution_20250825"]}
    assert await hinted(tools=[called, WEATHER]) == ["tools.allowed_callers"]
    assert "inner" not in model.prompt


async def test_tools_that_the_caller_runs_have_the_inputs_that_it_expects(ask: Any, hinted: Any, model: Any) -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 1000},
        {"type": "memory_20250818", "name": "memory"},
    ]
    assert await hinted(tools=tools, max_tokens=9) == []
    for text in ('"restart"', '"insert_text"', '"old_path"', '"str_replace_based_edit_tool"', '"rename"'):
        assert text in model.prompt
    assert "undo_edit" not in model.prompt
    await hinted(tools=[{"type": "text_editor_20250124", "name": "str_replace_editor"}])
    assert '"undo_edit"' in model.prompt
    assert "insert_text" not in model.prompt
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    assert (await ask(call, tools=tools))["content"][0]["input"] == {"command": "ls"}


async def test_examples_of_inputs_are_part_of_the_description(hinted: Any, model: Any) -> None:
    await hinted(tools=[{**NOW, "input_examples": [{"zone": "CET"}]}])
    assert '"description": "The time.\\nExamples of its input:\\n{\\"zone\\": \\"CET\\"}"' in model.prompt


async def test_many_tools_are_taken(front: Any) -> None:
    tools = [{**NOW, "name": f"tool_{i}"} for i in range(300)]
    response = await front.http.post(COUNT, json={"model": "tiny", "messages": HI, "tools": tools})
    assert response.json()["input_tokens"] > 300 * len("tool_100")


LATER = {**WEATHER, "defer_loading": True}
REFERENCE = {"type": "tool_reference", "tool_name": "weather"}


async def test_a_deferred_tool_is_in_the_prompt_where_it_was_loaded(ask: Any, hinted: Any, model: Any) -> None:
    """The beginning of the prompt stays the same, and with it the cache."""
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "now", "input": {}}]}
    assert await hinted(tools=[NOW, LATER]) == []
    before, _, _ = model.prompt.partition("<|im_start|>user")
    assert "weather" not in before
    messages = [*HI, call, result(REFERENCE)]
    answer = await ask(ONE, messages=messages, tools=[NOW, LATER])
    assert model.prompt.startswith(before)
    assert 'tool\n{"type": "function", "function": {"name": "weather"' in model.prompt
    assert [block["name"] for block in answer["content"]] == ["weather"]
    # Whoever searches for tools is not here, so that all are there from the beginning.
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    named = ["tools.tool_search_tool_regex_20251119", "tools.defer_loading"]
    assert sorted(await hinted(tools=[search, NOW, LATER])) == sorted(named)
    assert '"weather"' in model.prompt
    # A choice loads it, too.
    await ask(ONE, tools=[NOW, LATER], tool_choice={"type": "tool", "name": "weather"})
    assert '"weather"' in model.prompt
    assert await hinted(messages=[*HI, call, result({**REFERENCE, "tool_name": "f"})], tools=[NOW]) == [
        "tool_reference"
    ]


async def test_the_conversation_adds_and_removes_tools(ask: Any, hinted: Any, model: Any) -> None:
    def change(kind: str, tool: Any) -> dict[str, Any]:
        return {"role": "system", "content": [{"type": f"tool_{kind}", "tool": tool}]}

    reference = {"type": "tool_reference", "name": "weather"}
    added = change("addition", {"type": "tool_definition", "definition": WEATHER})
    answer = await ask(ONE, messages=[*HI, added], tools=[NOW])
    assert 'system\n{"type": "function", "function": {"name": "weather"' in model.prompt
    assert answer["stop_reason"] == "tool_use"
    await hinted(messages=[*HI, change("addition", reference)], tools=[NOW, LATER])
    assert 'system\n{"type": "function", "function": {"name": "weather"' in model.prompt
    messages = [*HI, added, {"role": "assistant", "content": "x"}, *HI, change("removal", reference)]
    await hinted(messages=messages, tools=[NOW])
    assert "system\nThe tool weather is no longer available" in model.prompt
    assert await hinted(messages=[*HI, change("addition", {"type": "mcp_tool_reference"})]) == [
        "messages.mcp_tool_reference"
    ]


# --- thinking -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "thinking",
    [{"type": "adaptive", "display": "omitted"}, {"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}],
)
async def test_thinking_is_a_hint_where_the_model_has_none(gateway: Any, thinking: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": HI, "thinking": thinking, "output_config": {"effort": "high"}}
    headers = {"anthropic-beta": "interleaved-thinking-2025-05-14"}
    response = await gateway.http.post(MESSAGES, json={**body, "max_tokens": 9}, headers=headers)
    assert response.status_code == 200, response.text
    named = ["output_config.effort", *(() if thinking["type"] == "disabled" else ("thinking",))]
    assert response.headers["x-headrace-ignored"].split(", ") == named
    assert (await gateway.http.post(COUNT, json=body)).status_code == 200


async def test_thoughts_are_left_out_where_they_were_disabled(ask: Any) -> None:
    answer = await ask("<think>Hm.</think>Paris.", thinking={"type": "disabled"})
    assert [block["type"] for block in answer["content"]] == ["text"]


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
