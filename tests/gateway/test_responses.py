"""The Responses API over real HTTP, in front of a fake router that says what a model would write."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.asyncio(loop_scope="module")
RESPONSES = "/v1/responses"
MAX_CONTEXT = 4096
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
NOW = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
# In the manner of Qwen 3: tools, calls, reasoning that can be switched off.
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- '<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- if open_think is defined %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(kit_of_module: Any, tiny_files: dict[str, bytes]) -> AsyncIterator[Any]:
    """A fake router with a model that has tools and reasoning."""
    fake = kit_of_module.FakeRouter(kit_of_module.tar_of({**tiny_files, "chat_template.jinja": TEMPLATE.encode()}))
    fake.cards = [fake.card(max_context_tokens=MAX_CONTEXT)]
    async with kit_of_module.serving_router(fake) as (address, _):
        fake.address = address
        yield fake


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(kit_of_module: Any, model: Any) -> AsyncIterator[Any]:
    """The gateway before it."""
    async with kit_of_module.serving_gateway(model.address) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(model: Any) -> None:
    model.reset()
    model.cards = [model.card(max_context_tokens=MAX_CONTEXT)]


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each is named as its type."""
    events = []
    for block in text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


@pytest.fixture
def ask(front: Any, model: Any) -> Any:
    """Create a response of a model that writes this text; give it, or the events of its stream."""

    async def post(text: str, **fields: Any) -> Any:
        model.answer = text
        response = await front.http.post(RESPONSES, json={"model": "tiny", "input": "hi", **fields})
        assert response.status_code == 200, response.text
        return events_of(response.text) if fields.get("stream") else response.json()

    return post


@pytest.fixture
def refused(front: Any, model: Any) -> Any:
    """Ask for a response that is refused; the error."""

    async def post(status: int = 400, **fields: Any) -> Any:
        response = await front.http.post(RESPONSES, json={"model": "tiny", "input": "hi", **fields})
        assert response.status_code == status, response.text
        assert model.streams == []
        return response.json()["error"]

    return post


def prompt_of(model: Any, kit: Any) -> str:
    """The text of the last prompt."""
    table = [text.encode() for text in kit.SPECIAL] + [bytes([i]) for i in range(256)] + [a + b for a, b in kit.MERGES]
    return b"".join(table[token] for token in model.streams[-1].request.token_ids).decode()


def sampling_of(model: Any) -> Any:
    """The sampling of the last request."""
    return model.streams[-1].request.sampling


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
        "input_tokens_details": {"cached_tokens": 7},
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


TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", ONE, TWO, "\n", " ", "é😀", "<tool_call>", '{"name": "now"', "text", "}"]),
    max_size=6,
).map("".join)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS, data=st.data())
async def test_a_stream_adds_up_to_the_whole_answer(
    front: Any, model: Any, kit: Any, text: str, data: st.DataObject
) -> None:
    tokens = kit.tokens_of(text)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(tokens)))), label="cuts") | {len(tokens)})
    stopped = data.draw(st.booleans(), label="stopped")

    async def cut(_: Any, stream: Any, send: Any) -> None:
        for start, end in zip([0, *cuts], cuts, strict=False):
            await send(tokens[start:end], start, None)
        reason = kit.inference_pb2.FINISH_REASON_STOP if stopped else kit.inference_pb2.FINISH_REASON_LENGTH
        await send([kit.EOS], len(tokens), reason)

    model.script = cut
    fields: dict[str, Any] = {"model": "tiny", "input": "hi", "store": False}
    if data.draw(st.booleans(), label="tools"):
        fields |= {"tools": [WEATHER, NOW], "parallel_tool_calls": data.draw(st.booleans(), label="parallel")}
    if data.draw(st.booleans(), label="logprobs"):
        fields |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = (await front.http.post(RESPONSES, json=fields)).json()
    events = events_of((await front.http.post(RESPONSES, json={**fields, "stream": True})).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert anonymous(events[-1]["response"]) == anonymous(whole)
    assert [anonymous(item) for item in added_up(events)] == anonymous(whole)["output"]


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
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == items[event["output_index"]]["content"][event["content_index"]]["text"]
            case "content_part.done":
                assert event["part"] == items[event["output_index"]]["content"][event["content_index"]]
            case "output_item.done":
                items[event["output_index"]]["status"] = event["item"]["status"]
                assert event["item"] == items[event["output_index"]]
    return items


def anonymous(value: Any) -> Any:
    """The value without ids and times."""
    if isinstance(value, dict):
        hidden = ("id", "call_id", "created_at", "completed_at")
        return {name: anonymous(one) for name, one in value.items() if name not in hidden}
    return [anonymous(one) for one in value] if isinstance(value, list) else value
