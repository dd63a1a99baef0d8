"""The Responses API over real HTTP, with a fake router that plays the model."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.gateway.hints import HEADER
from headrace.gateway.responses import store as response_store
from headrace.protos.inference_pb2 import AGGREGATION_MODE_SUM, CacheEviction
from tests.gateway.tool_model import ONE, TEXTS, TWO, events_of, in_pieces, without
from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")
RESPONSES = "/v1/responses"
OF_THE_MOMENT = {"id", "call_id", "created_at", "completed_at"}
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
NOW = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
SEARCH = {"type": "web_search"}
ALLOWED = {"type": "allowed_tools", "mode": "auto"}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "+" /[a-z]+/'}


@pytest.fixture(autouse=True)
def _fresh(model: Any) -> None:
    model.reset()


@pytest.fixture
def ask(front: Any, model: Any) -> Any:
    """Create a response of a model that writes this text; give it, or the events of its stream."""

    async def post(written: str, /, **fields: Any) -> Any:
        model.answer = written
        response = await front.http.post(RESPONSES, json={"model": "tiny", "input": "hi", **fields})
        assert response.status_code == 200, response.text
        return events_of(response.text) if fields.get("stream") else response.json()

    return post


@pytest.fixture
def refused(front: Any, model: Any) -> Any:
    """Send a request that is refused. Returns the error."""

    async def post(status: int = 400, **fields: Any) -> Any:
        response = await front.http.post(RESPONSES, json={"model": "tiny", "input": "hi", **fields})
        assert response.status_code == status, response.text
        assert model.streams == []
        return response.json()["error"]

    return post


def text_of(response: Any) -> str:
    """All text of a response's messages."""
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for message in messages for part in message["content"])


# --- whole answers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["/v1", "/v3"])
async def test_a_response_has_the_text_and_the_account(front: Any, model: Any, prefix: str) -> None:
    model.num_cached = 7
    answer = (await front.http.post(f"{prefix}/responses", json={"model": "tiny", "input": "hi"})).json()
    assert answer["object"] == "response"
    assert answer["id"].startswith("resp_")
    assert answer["status"] == "completed"
    assert answer["model"] == "tiny"
    assert answer["error"] is None
    assert answer["incomplete_details"] is None
    (message,) = answer["output"]
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
    assert message["content"] == [
        {"type": "output_text", "text": "Hello, wörld 😀!", "annotations": [], "logprobs": []}
    ]
    num_prompt, num_answer = len(model.streams[0].request.token_ids), len("Hello, wörld 😀!".encode()) + 1
    assert answer["usage"] == {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 7, "cache_write_tokens": 0},
        "output_tokens": num_answer,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_answer,
    }


async def test_reasoning_is_an_item_of_its_own_and_counted(ask: Any) -> None:
    answer = await ask("<think>\nHm.\n</think>\n\nParis.")
    reasoning, message = answer["output"]
    assert reasoning["id"].startswith("rs_")
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert reasoning["summary"] == []
    assert "encrypted_content" not in reasoning
    assert message["content"][0]["text"] == "Paris."
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == len("\nHm.\n")


async def test_calls_are_items_behind_the_text(ask: Any) -> None:
    answer = await ask(f"Look: {ONE}\n{TWO}", tools=[WEATHER, NOW])
    message, weather, now = answer["output"]
    assert message["content"][0]["text"] == "Look:"
    assert weather["id"].startswith("fc_")
    assert weather["call_id"].startswith("call_")
    assert (weather["type"], weather["name"], weather["arguments"]) == ("function_call", "weather", '{"city": "Köln"}')
    assert (now["name"], now["arguments"]) == ("now", "{}")
    assert now["call_id"] != weather["call_id"]
    assert answer["status"] == "completed"


async def test_an_answer_that_is_cut_off_is_incomplete(ask: Any) -> None:
    answer = await ask("Hello there", max_output_tokens=5)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert text_of(answer) == "Hello"
    assert answer["output"][0]["status"] == "incomplete"
    assert answer["max_output_tokens"] == 5


async def test_an_answer_without_a_word_has_an_empty_message(ask: Any) -> None:
    answer = await ask("")
    assert text_of(answer) == ""
    assert len(answer["output"]) == 1


# --- streams --------------------------------------------------------------------------------------------------------


async def test_a_stream_of_text_has_all_events_in_order(ask: Any) -> None:
    events = await ask("Hi", stream=True)
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(10))
    created, in_progress, added, part, *_ = events
    assert created["response"]["status"] == in_progress["response"]["status"] == "in_progress"
    assert created["response"]["output"] == []
    assert (added["output_index"], added["item"]["status"], added["item"]["content"]) == (0, "in_progress", [])
    assert part["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert part["content_index"] == 0
    assert {event["item_id"] for event in events if "item_id" in event} == {added["item"]["id"]}
    assert events[6]["text"] == "Hi"
    assert events[-1]["response"]["output"] == [events[-2]["item"]]


async def test_a_stream_of_reasoning_and_calls_has_their_events(ask: Any) -> None:
    events = await ask(f"<think>Hm</think>{ONE}", stream=True, tools=[WEATHER])
    kinds = [kind for kind, _ in itertools.groupby(event["type"].removeprefix("response.") for event in events)]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    done = next(event for event in events if event["type"] == "response.function_call_arguments.done")
    assert (done["name"], done["arguments"], done["output_index"]) == ("weather", '{"city": "Köln"}', 1)


async def test_a_stream_that_is_cut_off_ends_as_incomplete(ask: Any) -> None:
    events = await ask("Hello there", stream=True, max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_an_error_in_a_stream_is_its_last_event(front: Any, model: Any, kit: Any) -> None:
    async def fail(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("He"), 0, None)
        raise kit.StatusError(kit.Reason.TOO_LARGE_FOR_CACHE, "no room")

    model.script = fail
    response = await front.http.post(RESPONSES, json={"model": "tiny", "input": "hi", "stream": True})
    *_, failed = events_of(response.text)
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "invalid_prompt", "message": "no room"}


async def hang(_: Any, stream: Any, send: Any) -> None:
    """Write one token and no more."""
    await send([100], 0, None)
    await asyncio.Event().wait()


async def test_a_gateway_that_stops_says_so_in_the_last_event(front: Any, model: Any) -> None:
    model.script = hang
    async with front.http.stream("POST", RESPONSES, json={"model": "tiny", "input": "hi", "stream": True}) as response:
        chunks = response.aiter_text()
        seen = await anext(chunks)
        front.edge.interrupt()
        seen += "".join([chunk async for chunk in chunks])
    *_, failed = events_of(seen)
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert [event["sequence_number"] for event in events_of(seen)] == list(range(failed["sequence_number"] + 1))
    async with asyncio.timeout(patience(10)):
        await model.streams[0].cancelled.wait()


async def test_a_client_that_leaves_cancels_its_response(front: Any, model: Any) -> None:
    model.script = hang
    async with front.http.stream("POST", RESPONSES, json={"model": "tiny", "input": "hi", "stream": True}) as response:
        await anext(response.aiter_text())
    async with asyncio.timeout(patience(10)):
        await model.streams[0].cancelled.wait()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS, data=st.data())
async def test_a_stream_adds_up_to_the_whole_answer(front: Any, model: Any, text: str, data: st.DataObject) -> None:
    model.script = in_pieces(text, data)
    fields: dict[str, Any] = {"model": "tiny", "input": "hi", "store": False}
    if data.draw(st.booleans(), label="tools"):
        fields |= {"tools": [WEATHER, NOW], "parallel_tool_calls": data.draw(st.booleans(), label="parallel")}
    if data.draw(st.booleans(), label="logprobs"):
        fields |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = (await front.http.post(RESPONSES, json=fields)).json()
    events = events_of((await front.http.post(RESPONSES, json={**fields, "stream": True})).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert without(OF_THE_MOMENT, events[-1]["response"]) == without(OF_THE_MOMENT, whole)
    assert without(OF_THE_MOMENT, added_up(events)) == without(OF_THE_MOMENT, whole["output"])


def added_up(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items of a stream's deltas alone."""
    items: list[dict[str, Any]] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "content_part.added":
                items[event["output_index"]]["content"].append(event["part"])
            case "output_text.delta" | "reasoning_text.delta":
                part = items[event["output_index"]]["content"][event["content_index"]]
                part["text"] += event["delta"]
                if "logprobs" in part:
                    part["logprobs"] += event["logprobs"]
            case "function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "custom_tool_call_input.delta":
                items[event["output_index"]]["input"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == items[event["output_index"]]["content"][event["content_index"]]["text"]
            case "content_part.done":
                assert event["part"] == items[event["output_index"]]["content"][event["content_index"]]
            case "output_item.done":
                items[event["output_index"]]["status"] = event["item"]["status"]
                assert event["item"] == items[event["output_index"]]
    return items


# --- the conversation -----------------------------------------------------------------------------------------------


async def test_instructions_come_first_and_hold_for_one_response(ask: Any, model: Any) -> None:
    first = await ask("Paris.", instructions="Be brief.", input=[{"role": "user", "content": "Capital?"}])
    assert first["instructions"] == "Be brief."
    assert model.prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCapital?<|im_end|>\n<|im_start|>assistant\n"
    )
    second = await ask("Seine.", input="River?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert model.prompt == (
        "<|im_start|>user\nCapital?<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>\n"
        "<|im_start|>user\nRiver?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_items_of_all_kinds_are_turns_of_the_chat(ask: Any, model: Any) -> None:
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look:"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Köln"}'},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    await ask("x", input=items, tools=[WEATHER, NOW])
    prompt = model.prompt
    assert "system\nd<|im_end|>\n<|im_start|>user\na\nb<|im_end|>" in prompt
    assert (
        '<think>Hm.</think>Look:<tool_call>weather{"city": "Köln"}</tool_call><tool_call>now{}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>assistant\nNo."
    ) in prompt


async def test_calls_are_answered_across_responses(ask: Any, model: Any) -> None:
    first = await ask(f"<think>Hm.</think>{ONE}", tools=[WEATHER])
    call_id = first["output"][1]["call_id"]
    output = {"type": "function_call_output", "call_id": call_id, "output": "rain"}
    await ask("Wet.", input=[output], previous_response_id=first["id"], tools=[WEATHER])
    assert (
        'assistant\n<think>Hm.</think><tool_call>weather{"city": "Köln"}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n"
    ) in model.prompt


@pytest.mark.parametrize("background", [False, True])
async def test_stored_items_are_referred_to_by_their_ids(ask: Any, model: Any, background: bool) -> None:
    question = {"role": "user", "content": "Rain?"}
    events = await ask(
        f"<think>Hm.</think>{ONE}", tools=[WEATHER], input=[question], stream=True, background=background
    )
    reasoning, call = events[-1]["response"]["output"]
    second = await ask("Wet.", input="And now?")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    references = [{"type": "item_reference", "id": item["id"]} for item in (reasoning, call, second["output"][0])]
    items = [question, *references[:2], output, references[2], {"role": "user", "content": "Sure?"}]
    third = await ask("Yes.", input=items, tools=[WEATHER])
    assert model.prompt.endswith(
        'assistant\n<think>Hm.</think><tool_call>weather{"city": "Köln"}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\nWet.<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text_of(third) == "Yes."


async def test_what_is_not_stored_cannot_be_referred_to_and_nothing_twice(ask: Any, front: Any) -> None:
    answer = await ask("Wet.")
    kept = {"type": "item_reference", "id": answer["output"][0]["id"]}
    forgotten = {"type": "item_reference", "id": (await ask("Wet.", store=False))["output"][0]["id"]}
    for items, message in (([forgotten], "was its response stored?"), ([kept, kept], "is in the input already")):
        response = await front.http.post(RESPONSES, json={"model": "tiny", "input": items})
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == f"input[{len(items) - 1}].id"


async def test_reasoning_goes_around_without_a_store(ask: Any, model: Any) -> None:
    include = ["reasoning.encrypted_content"]
    first = await ask("<think>Hm é.</think>Yes.", store=False, include=include)
    reasoning, message = first["output"]
    assert reasoning["encrypted_content"]
    del reasoning["content"]
    await ask("x", input=[reasoning, message, {"role": "user", "content": "Why?"}], store=False, include=include)
    assert "<think>Hm é.</think>Yes.<|im_end|>\n<|im_start|>user\nWhy?" in model.prompt


async def test_truncation_drops_the_oldest_turns_that_do_not_fit(ask: Any, refused: Any, model: Any) -> None:
    turns = [{"role": role, "content": f"{i} " + 1000 * "x"} for i in range(4) for role in ("user", "assistant")]
    items = [*turns, {"role": "user", "content": "last"}]
    error = await refused(input=items, instructions="Be brief.")
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
    answer = await ask("x", input=items, instructions="Be brief.", truncation="auto", max_output_tokens=50)
    assert answer["truncation"] == "auto"
    prompt = model.prompt
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n3 x")
    # A limit over the context drops no more turns than one that the context has.
    answer = await ask("x", input=items, instructions="Be brief.", truncation="auto", max_output_tokens=100_000)
    assert answer["max_output_tokens"] == 100_000
    assert model.prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert model.sampling.max_tokens == 4096 - len(model.streams[-1].request.token_ids)
    error = await front_error(refused, input=5000 * "x", truncation="auto", streams=model.streams)
    assert error["code"] == "context_length_exceeded"


async def front_error(refused: Any, *, streams: list[Any], **fields: Any) -> Any:
    """The error of a request that is refused after others were answered."""
    streams.clear()
    return await refused(**fields)


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([], "input"),
        ([{"role": "tool", "content": "x"}], "input[0].role"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0].image_url"),
        ([{"role": "user", "content": [{"type": "input_file"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text", "text": 1}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": 1}], "input[0].content"),
        ([{"role": "user", "content": ["x"]}], "input[0].content[0].type"),
        ([{"role": "user", "content": "x", "id": 1}], "input[0].id"),
        ([{"type": "item_reference", "id": "x"}], "input[0].id"),
        ([{"type": "item_reference"}], "input[0].id"),
        ([{"type": "item_reference", "id": "msg_" + 48 * "0"}], "input[0].id"),
        (1025 * [{"type": "item_reference", "id": "x"}], "input"),
        ([{"type": "function_call", "call_id": "c", "name": "f"}], "input[0].arguments"),
        ([{"type": "function_call_output", "output": "x"}], "input[0].call_id"),
        ([{"type": "function_call_output", "call_id": "c", "output": 1}], "input[0].output"),
        ([{"type": "function_call_output", "call_id": "c", "output": [{}]}], "input[0].output[0].type"),
        ([{"type": "shell_call_output", "call_id": 1}], "input[0].call_id"),
        ([{"type": "made_up_call", "id": "x"}], "input[0].type"),
        ([{"type": 1}], "input[0].type"),
        ([{"type": "reasoning", "content": ["x"]}], "input[0].content[0]"),
        ([{"type": "reasoning", "summary": "x"}], "input[0].summary"),
    ],
)
async def test_what_is_wrong_with_an_item_is_named(refused: Any, items: Any, param: str) -> None:
    error = await refused(input=items)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


# --- fields ---------------------------------------------------------------------------------------------------------


async def test_sampling_fields_reach_the_worker(ask: Any, model: Any) -> None:
    answer = await ask("x", temperature=0.5, top_p=0.25, top_k=7, seed=3, min_p=0.125, max_output_tokens=9)
    sampling = model.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 7, 3)
    assert (sampling.min_p, sampling.max_tokens) == (0.125, 9)
    assert (answer["temperature"], answer["top_p"], answer["max_output_tokens"]) == (0.5, 0.25, 9)


async def test_a_response_says_how_it_was_asked_for(ask: Any) -> None:
    asked = {
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "max_tool_calls": 3,
        "parallel_tool_calls": False,
        "truncation": "disabled",
        "tool_choice": "auto",
    }
    answer = await ask("x", **asked, tools=[WEATHER], service_tier="auto", prompt_cache_retention="in_memory")
    assert {name: answer[name] for name in asked} == asked
    assert answer["service_tier"] == "default"
    assert answer["tools"] == [{**WEATHER, "strict": False, "description": None}]
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert answer["store"] is True
    assert answer["background"] is False


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"service_tier": "flex"}, "service_tier"),
        ({"client_metadata": {"a": 1}}, "client_metadata"),
        ({"context_management": [{"type": "compaction", "compact_threshold": 9000}]}, "context_management"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
        ({"include": ["file_search_call.results"]}, "include.file_search_call.results"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"generate_summary": "concise"}}, "reasoning.generate_summary"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"max_output_tokens": 9_999}, "max_output_tokens>4075"),
        ({"conversation": None, "some_day": 1}, "some_day"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_hints_are_taken_and_named(front: Any, fields: Any, name: str, stream: bool) -> None:
    response = await front.http.post(RESPONSES, json={"model": "tiny", "input": "hi", "stream": stream, **fields})
    assert (response.status_code, response.headers[HEADER]) == (200, name), response.text
    assert '"service_tier":"default"' in response.text


async def test_what_asks_for_nothing_is_not_named(front: Any) -> None:
    fields = {
        "service_tier": "auto",
        "context_management": [],
        "prompt_cache_retention": "in_memory",
        "reasoning": {"summary": "auto", "context": "auto", "mode": "standard"},
        "tools": [],
        "tool_choice": "auto",
        "conversation": None,
    }
    response = await front.http.post(RESPONSES, json={"model": "tiny", "input": "hi", **fields})
    assert (response.status_code, HEADER in response.headers) == (200, False), response.text


async def test_a_cache_key_is_a_hint_to_the_router(ask: Any, model: Any) -> None:
    await ask("x", prompt_cache_key="k")
    assert model.streams[-1].request.session_key == "k"


async def test_log_probabilities_come_with_the_text(ask: Any) -> None:
    answer = await ask("Hi", include=["message.output_text.logprobs"], top_logprobs=2)
    (part,) = answer["output"][0]["content"]
    assert [one["token"] for one in part["logprobs"]] == ["H", "i"]
    assert all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])
    assert answer["top_logprobs"] == 2


async def test_the_template_sees_the_tools_as_a_chat_has_them(ask: Any, model: Any) -> None:
    await ask("x", tools=[WEATHER])
    assert '{"type": "function", "function": {"name": "weather", "parameters": {' in model.prompt
    await ask("x", tools=[])
    assert "<|im_start|>tools" not in model.prompt


async def test_the_choice_of_tools_is_enforced(ask: Any, model: Any) -> None:
    await ask(ONE, tools=[WEATHER, NOW], tool_choice="required")
    grammar = model.sampling.constraint.grammar
    assert "weather" in grammar
    assert "now" in grammar
    await ask(ONE, tools=[WEATHER, NOW], tool_choice={"type": "function", "name": "weather"})
    assert '"now' not in model.sampling.constraint.grammar
    answer = await ask(ONE, tools=[WEATHER], tool_choice="none")
    assert text_of(answer) == ONE


async def test_strict_tools_are_held_by_a_grammar(ask: Any, model: Any) -> None:
    await ask("x", tools=[{**WEATHER, "strict": True}])
    assert model.sampling.constraint.grammar


async def test_without_parallel_calls_the_first_one_counts(ask: Any) -> None:
    answer = await ask(ONE + TWO, tools=[WEATHER, NOW], parallel_tool_calls=False)
    assert len(answer["output"]) == 1


async def test_a_format_is_held_by_its_schema(ask: Any, model: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    answer = await ask('{"a":1}', text={"format": form})
    assert json.loads(model.sampling.constraint.json_schema) == schema
    assert answer["text"]["format"] == {**form, "description": None}
    await ask("{}", text={"format": {"type": "json_object"}})
    assert model.sampling.constraint.HasField("json_object")
    answer = await ask("x", text={"format": {"type": "text"}, "verbosity": "low"})
    assert answer["text"]["verbosity"] == "low"
    assert not model.sampling.HasField("constraint")


async def test_padding_hides_the_length_of_deltas(ask: Any) -> None:
    events = await ask("Hi there", stream=True, stream_options={"include_obfuscation": True})
    deltas = [event for event in events if event["type"].endswith(".delta")]
    assert len({len(event["delta"]) + len(event["obfuscation"]) for event in deltas}) == 1
    assert not any("obfuscation" in event for event in events if event not in deltas)
    assert not any("obfuscation" in event for event in await ask("Hi there", stream=True))


async def test_effort_reaches_the_template(ask: Any, model: Any) -> None:
    answer = await ask("x", reasoning={"effort": "none", "summary": "auto"})
    assert model.prompt.endswith("</think>\n\n")
    assert answer["reasoning"] == {"effort": "none", "summary": None}
    await ask("x", chat_template_kwargs={"open_think": True})
    assert model.prompt.endswith("<think>\n")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": 1}, "input"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"truncation": "x"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"text": {"format": {"type": "json_object", "pattern": "a"}}}, "text.format.pattern"),
        ({"stream_options": {}}, "stream_options"),
        ({"grammar_lazy": True}, "grammar_lazy"),
        ({"background": True, "store": False}, "background"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"reasoning": {"generate_summary": "long"}}, "reasoning.generate_summary"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"text": {"verbosity": "much"}}, "text.verbosity"),
        ({"text": {"format": {"type": "x"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata[...]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp"}]}, "tools[0].server_label"),
        ({"tools": [{"type": "made_up"}, WEATHER]}, "tools[0].type"),
        ({"tools": [{}, WEATHER]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [WEATHER, WEATHER]}]}, "tools[0].tools[1].name"),
        ({"tools": [{"type": "web_search"}, {**WEATHER, "parameters": 1}]}, "tools[1].parameters"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "f", "format": 1}]}, "tools[0].format"),
        (
            {
                "tools": [
                    {"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "x", "definition": "a"}}
                ]
            },
            "tools[0].format.syntax",
        ),
        (
            {"tools": [{"type": "custom", "name": "f", "format": {**LARK, "definition": "start: start"}}]},
            "tools[0].format.definition",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{**WEATHER, "parameters": 1}]}, "tools[0].parameters"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [WEATHER, SEARCH], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "made_up"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ({"tools": [WEATHER], "tool_choice": {**ALLOWED, "mode": "x", "tools": [WEATHER]}}, "tool_choice.mode"),
        ({"tools": [WEATHER], "tool_choice": {**ALLOWED, "tools": [NOW]}}, "tool_choice.tools[0]"),
        ({"tools": [WEATHER], "tool_choice": {**ALLOWED, "tools": [{"type": "x"}]}}, "tool_choice.tools[0]"),
        (
            {"tools": [WEATHER, SEARCH], "tool_choice": {**ALLOWED, "mode": "required", "tools": [SEARCH]}},
            "tool_choice.tools",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"prompt_cache_key": "k" * 513}, "prompt_cache_key"),
    ],
)
async def test_what_cannot_be_honoured_is_named(refused: Any, fields: Any, param: str) -> None:
    error = await refused(**fields)
    assert error["param"] == param
    assert error["message"]


async def test_a_refusal_of_the_worker_names_the_callers_field(front: Any, model: Any, kit: Any) -> None:
    async def refuse(_: Any, stream: Any, send: Any) -> None:
        problem = "sampling.constraint.json_schema: not is not supported"
        raise kit.StatusError(kit.Reason.UNSUPPORTED, problem, field="sampling.constraint.json_schema")

    model.script = refuse
    form = {"type": "json_schema", "name": "n", "schema": {"not": {}}}
    for stream in (False, True):
        body = {"model": "tiny", "input": "hi", "text": {"format": form}, "stream": stream}
        error = (await front.http.post(RESPONSES, json=body)).json()["error"]
        assert error["param"] == "text.format"
        assert error["message"] == "text.format: not is not supported"


# --- what is stored -------------------------------------------------------------------------------------------------


async def test_a_response_is_retrieved_and_deleted(front: Any, ask: Any) -> None:
    answer = await ask("Paris.")
    one = f"{RESPONSES}/{answer['id']}"
    assert (await front.http.get(one)).json() == answer
    gone = await front.http.delete(one)
    assert gone.json() == {"id": answer["id"], "object": "response", "deleted": True}
    for missing in (
        await front.http.get(one),
        await front.http.delete(one),
        await front.http.get(f"{one}/input_items"),
    ):
        assert missing.status_code == 404
        assert missing.json()["error"]["param"] == "response_id"
    error = (await front.http.post(RESPONSES, json={"input": "x", "previous_response_id": answer["id"]})).json()[
        "error"
    ]
    assert error["code"] == "previous_response_not_found"


async def test_a_response_that_is_not_to_be_stored_is_not(front: Any, ask: Any) -> None:
    answer = await ask("Paris.", store=False)
    assert answer["store"] is False
    assert (await front.http.get(f"{RESPONSES}/{answer['id']}")).status_code == 404


async def test_a_response_that_is_too_large_is_not_stored_and_not_run_in_the_background(
    front: Any, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_store, "MAX_PLAIN_BYTES", 4000)
    answer = await ask("Paris.", input="x" * 4000)
    assert answer["store"] is False
    assert (await front.http.get(f"{RESPONSES}/{answer['id']}")).status_code == 404
    body = {"model": "tiny", "input": "x" * 4000, "background": True}
    refused = await front.http.post(RESPONSES, json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "input"
    assert "set background to false" in refused.json()["error"]["message"]


async def test_the_stream_of_a_response_is_repeated_from_any_event(front: Any, ask: Any) -> None:
    events = await ask("<think>Hm</think>Paris.", stream=True, background=True)
    one = f"{RESPONSES}/{events[-1]['response']['id']}"
    assert (await front.http.get(one)).json() == events[-1]["response"]
    assert events_of((await front.http.get(one, params={"stream": "true"})).text) == events
    for position in (0, 5, len(events) - 2):
        params = {"stream": "true", "starting_after": str(position)}
        assert events_of((await front.http.get(one, params=params)).text) == events[position + 1 :]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"stream": "true"}, "stream"),
        ({"starting_after": "3"}, "starting_after"),
        ({"stream": "true", "include_obfuscation": "true"}, "include_obfuscation"),
        ({"stream": "yes"}, "stream"),
    ],
)
async def test_what_cannot_be_retrieved_is_named(front: Any, ask: Any, params: Any, param: str) -> None:
    answer = await ask("x")
    response = await front.http.get(f"{RESPONSES}/{answer['id']}", params=params)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_reasoning_is_included_when_it_is_read(front: Any, ask: Any) -> None:
    written = "<think>Hm é.</think>Yes."
    include = ["reasoning.encrypted_content"]
    events = await ask(written, stream=True, background=True)
    asked = (await ask(written, include=include))["output"][0]["encrypted_content"]
    one = f"{RESPONSES}/{events[-1]['response']['id']}"
    plain = (await front.http.get(one)).json()
    shown = (await front.http.get(one, params={"include[]": include})).json()
    assert shown["output"][0] == {**plain["output"][0], "encrypted_content": asked}
    assert without({"encrypted_content"}, shown) == plain
    query = {"stream": "true", "starting_after": "1", "include": include}
    again = events_of((await front.http.get(one, params=query)).text)
    assert without({"encrypted_content"}, again) == events[2:]
    (done,) = (event["item"] for event in again if event["type"] == "response.output_item.done" and "Hm" in str(event))
    assert done["encrypted_content"] == asked
    assert again[-1]["response"] == shown
    follower = await ask("x", previous_response_id=plain["id"])
    items = await front.http.get(f"{RESPONSES}/{follower['id']}/input_items", params={"include": include})
    assert asked in [item.get("encrypted_content") for item in items.json()["data"]]


async def test_what_cannot_be_included_later_is_a_hint(front: Any, ask: Any) -> None:
    answer = await ask("x")
    response = await front.http.get(f"{RESPONSES}/{answer['id']}", params={"include": "file_search_call.results"})
    assert response.json() == answer
    assert response.headers[HEADER] == "include.file_search_call.results"


# --- counting -------------------------------------------------------------------------------------------------------


@pytest.fixture
def count(front: Any) -> Any:
    """Count the tokens of an input."""

    async def post(status: int = 200, **fields: Any) -> Any:
        response = await front.http.post(f"{RESPONSES}/input_tokens", json={"model": "tiny", **fields})
        assert response.status_code == status, response.text
        return response.json() if status == 200 else response.json()["error"]

    return post


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "hi"},
        {
            "input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "instructions": "Be brief.",
        },
        {"input": "hi", "tools": [WEATHER, NOW], "tool_choice": "required"},
        {"input": "hi", "reasoning": {"effort": "none"}, "text": {"verbosity": "low"}},
        {"input": "hi", "truncation": "auto"},
    ],
)
async def test_counted_tokens_are_those_of_the_prompt(ask: Any, count: Any, model: Any, fields: Any) -> None:
    counted = await count(**fields)
    assert model.streams == []
    answer = await ask(ONE, **fields)
    assert counted == {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}


async def test_earlier_turns_are_counted(ask: Any, count: Any) -> None:
    first = await ask("<think>Hm</think>one")
    alone = (await count(previous_response_id=first["id"]))["input_tokens"]
    counted = (await count(previous_response_id=first["id"], input="more"))["input_tokens"]
    second = await ask("two", input="more", previous_response_id=first["id"])
    assert counted == second["usage"]["input_tokens"]
    assert alone < counted


async def test_a_truncated_input_counts_as_it_is_kept(count: Any, kit: Any) -> None:
    turns = [{"role": "user", "content": "long " * 500} for _ in range(3)]
    whole = (await count(input=turns))["input_tokens"]
    kept = (await count(input=turns, truncation="auto"))["input_tokens"]
    assert whole > kit.MAX_CONTEXT > kept


async def test_what_cannot_be_counted_is_named(count: Any) -> None:
    assert (await count(400))["param"] == "input"
    assert (await count(400, input=[{"type": "unknown"}]))["param"] == "input[0].type"
    assert (await count(400, input="hi", previous_response_id="resp_none"))["code"] == "previous_response_not_found"


async def test_input_items_are_listed_in_pages(front: Any, ask: Any) -> None:
    first = await ask("one", input=[{"role": "user", "content": "a"}, {"role": "user", "content": "b", "id": "msg_b"}])
    second = await ask("two", input="c", previous_response_id=first["id"])
    path = f"{RESPONSES}/{second['id']}/input_items"
    items = (await front.http.get(path, params={"order": "asc"})).json()
    texts = [item["content"][0]["text"] for item in items["data"]]
    assert texts == ["a", "b", "one", "c"]
    assert items["data"][1] == {
        "id": "msg_b",
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "b"}],
    }
    assert (items["object"], items["has_more"]) == ("list", False)
    newest = (await front.http.get(path, params={"limit": "3"})).json()
    assert newest["data"] == items["data"][:0:-1]
    assert newest["has_more"] is True
    assert (newest["first_id"], newest["last_id"]) == (items["last_id"], "msg_b")
    rest = (await front.http.get(path, params={"after": "msg_b"})).json()
    assert rest["data"] == items["data"][:1]
    for params in (
        {"limit": "0"},
        {"limit": "101"},
        {"limit": "x"},
        {"limit": "--5"},
        {"order": "up"},
        {"after": "msg_none"},
    ):
        assert (await front.http.get(path, params=params)).json()["error"]["param"] == next(iter(params))


# --- background -----------------------------------------------------------------------------------------------------


@pytest.fixture
def gate(model: Any, kit: Any) -> asyncio.Event:
    """Generations write `He`, wait for it, and write the rest of `Hello`."""
    event = asyncio.Event()

    async def script(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("He"), 0, None)
        await event.wait()
        tokens = [*kit.tokens_of("llo"), kit.EOS]
        await send(tokens, 2, kit.inference_pb2.FINISH_REASON_STOP)

    model.script = script
    return event


async def until(front: Any, response_id: str, status: str) -> Any:
    """Wait until the response has this status, and return it."""
    async with asyncio.timeout(patience(10)):
        while True:
            response = (await front.http.get(f"{RESPONSES}/{response_id}")).json()
            if response["status"] == status:
                return response
            await asyncio.sleep(0.02)


async def test_a_response_runs_in_the_background(front: Any, gate: asyncio.Event) -> None:
    body = {"model": "tiny", "input": "hi", "background": True}
    begun = (await front.http.post(RESPONSES, json=body)).json()
    assert (begun["status"], begun["background"], begun["output"]) == ("in_progress", True, [])
    assert (await front.http.get(f"{RESPONSES}/{begun['id']}")).json()["status"] == "in_progress"
    error = (await front.http.post(RESPONSES, json={**body, "previous_response_id": begun["id"]})).json()["error"]
    assert error["param"] == "previous_response_id"
    gate.set()
    ended = await until(front, begun["id"], "completed")
    assert text_of(ended) == "Hello"
    assert ended["usage"]["output_tokens"] == 6


async def test_a_background_stream_outlives_its_client(front: Any, model: Any, gate: asyncio.Event) -> None:
    body = {"model": "tiny", "input": "hi", "background": True, "stream": True}
    async with front.http.stream("POST", RESPONSES, json=body) as response:
        seen = ""
        async for chunk in response.aiter_text():
            seen += chunk
            if '"delta":"He"' in seen:
                break
    seen_events = events_of(seen)
    response_id = seen_events[0]["response"]["id"]
    position = seen_events[-1]["sequence_number"]
    params = {"stream": "true", "starting_after": str(position)}
    following = asyncio.create_task(front.http.get(f"{RESPONSES}/{response_id}", params=params))
    gate.set()
    rest = events_of((await following).text)
    assert [event["sequence_number"] for event in seen_events + rest] == list(range(len(seen_events + rest)))
    assert [item["content"][0]["text"] for item in added_up(seen_events + rest)] == ["Hello"]
    assert rest[-1]["type"] == "response.completed"
    again = events_of((await front.http.get(f"{RESPONSES}/{response_id}", params={"stream": "true"})).text)
    assert again[position + 1 :] == rest
    assert not model.streams[0].cancelled.is_set()


async def test_a_background_response_is_cancelled(front: Any, model: Any, gate: asyncio.Event) -> None:
    body = {"model": "tiny", "input": "hi", "background": True}
    begun = (await front.http.post(RESPONSES, json=body)).json()
    path = f"{RESPONSES}/{begun['id']}"
    async with asyncio.timeout(patience(10)):
        while not model.streams:
            await asyncio.sleep(0.01)
    assert (await front.http.post(f"{path}/cancel")).json()["status"] == "cancelled"
    async with asyncio.timeout(patience(10)):
        await model.streams[0].cancelled.wait()
    assert (await front.http.post(f"{path}/cancel")).json()["status"] == "cancelled"
    assert (await front.http.get(path)).json()["status"] == "cancelled"


async def test_a_running_response_is_deleted(front: Any, model: Any, gate: asyncio.Event) -> None:
    begun = (await front.http.post(RESPONSES, json={"model": "tiny", "input": "hi", "background": True})).json()
    assert (await front.http.delete(f"{RESPONSES}/{begun['id']}")).json()["deleted"] is True
    assert (await front.http.get(f"{RESPONSES}/{begun['id']}")).status_code == 404


async def test_a_background_response_that_fails_says_why(front: Any, model: Any, kit: Any) -> None:
    async def fail(_: Any, stream: Any, send: Any) -> None:
        raise kit.StatusError(kit.Reason.TOO_LARGE_FOR_CACHE, "no room")

    model.script = fail
    begun = (await front.http.post(RESPONSES, json={"model": "tiny", "input": "hi", "background": True})).json()
    failed = await until(front, begun["id"], "failed")
    assert failed["error"] == {"code": "invalid_prompt", "message": "no room"}


async def test_only_background_responses_are_cancelled(front: Any, ask: Any) -> None:
    answer = await ask("x")
    response = await front.http.post(f"{RESPONSES}/{answer['id']}/cancel")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_id")


async def test_runs_that_do_not_end_in_time_fail_when_the_gateway_stops(front: Any, gate: asyncio.Event) -> None:
    begun = (await front.http.post(RESPONSES, json={"model": "tiny", "input": "hi", "background": True})).json()
    await front.protocols["responses"].drain(0.01)
    failed = (await front.http.get(f"{RESPONSES}/{begun['id']}")).json()
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")


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
    assert problem in (await refused(cache_eviction=rule))["message"]


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
