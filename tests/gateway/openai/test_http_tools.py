"""Tools and reasoning over real HTTP, with a fake router that plays the model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gateway.tool_model import ONE, TEXTS, TWO, in_pieces

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


WEATHER, NOW = tool("weather", city={"type": "string"}), tool("now")


@pytest.fixture(autouse=True)
def _fresh(model: Any) -> None:
    model.reset()


@pytest.fixture
def ask(front: Any, model: Any) -> Any:
    """Post a chat to a model that answers in this text."""

    async def post(text: str, **fields: Any) -> Any:
        model.answer = text
        body = {"model": "tiny", "messages": HI, **fields}
        response = await front.http.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        if not fields.get("stream"):
            return response.json()
        events = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    return post


@pytest.fixture
def refused(front: Any) -> Any:
    """Post a chat that is refused; the error."""

    async def post(**fields: Any) -> Any:
        response = await front.http.post(CHAT, json={"model": "tiny", "messages": HI, **fields})
        assert response.status_code == 400, response.text
        return response.json()["error"]

    return post


async def test_a_call_is_a_tool_call_and_no_content(ask: Any) -> None:
    choice = (await ask(ONE, tools=[WEATHER]))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}


async def test_calls_have_ids_of_their_own_and_text_in_front_is_content(ask: Any) -> None:
    message = (await ask(f"Let me see.\n{ONE}\n{TWO}", tools=[WEATHER, NOW]))["choices"][0]["message"]
    assert message["content"] == "Let me see."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "now"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


async def test_a_stream_begins_each_call_with_its_name_and_goes_on_with_its_arguments(ask: Any) -> None:
    chunks = await ask(f"Well.\n{ONE}{TWO}", tools=[WEATHER, NOW], stream=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == "Well."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    heads = [call for call in calls if "id" in call]
    assert [(call["index"], call["type"], call["function"]) for call in heads] == [
        (0, "function", {"name": "weather", "arguments": ""}),
        (1, "function", {"name": "now", "arguments": ""}),
    ]
    fragments = [call for call in calls if "id" not in call]
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in fragments)
    first = [call["function"]["arguments"] for call in fragments if call["index"] == 0]
    assert "".join(first) == '{"city": "Köln"}'
    assert len(first) > 5
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "tool_calls"


async def test_text_without_a_call_is_an_ordinary_answer(ask: Any) -> None:
    choice = (await ask("Just <tool_call> text. ", tools=[WEATHER]))["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "Just <tool_call> text. "
    assert "tool_calls" not in choice["message"]


async def test_a_call_that_is_cut_off_finishes_for_length(ask: Any) -> None:
    choice = (await ask(ONE, tools=[WEATHER], max_tokens=len(ONE.encode()) - 20))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert '{"city": "Köln"}'.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


async def test_the_template_sees_the_tools_as_the_caller_wrote_them(ask: Any, model: Any) -> None:
    await ask("x", tools=[WEATHER])
    assert json.dumps(WEATHER) in model.prompt
    await ask("x")
    assert "weather" not in model.prompt


async def test_calls_and_their_results_go_back_to_the_template(ask: Any, model: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Köln"}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    await ask("x", messages=messages, tools=[WEATHER])
    text = model.prompt
    assert 'assistant\n<think>Hm.</think><tool_call>weather{"city": "Köln"}</tool_call><|im_end|>' in text
    assert "<|im_start|>tool\nrain<|im_end|>" in text


async def test_with_tool_choice_none_the_model_knows_no_tools(ask: Any, model: Any) -> None:
    message = (await ask(ONE, tools=[WEATHER], tool_choice="none"))["choices"][0]["message"]
    assert message["content"] == ONE
    assert "tool_calls" not in message
    assert "weather" not in model.prompt


async def test_a_required_call_is_held_by_a_grammar(ask: Any, model: Any) -> None:
    answer = await ask(ONE, tools=[WEATHER, NOW], tool_choice="required")
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    grammar = model.sampling.constraint.grammar
    assert "weather" in grammar
    assert "now" in grammar
    await ask(ONE, tools=[WEATHER, NOW])
    assert not model.sampling.HasField("constraint")


async def test_a_named_call_is_the_only_one_and_finishes_as_a_stop(ask: Any, model: Any) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = await ask(ONE, tools=[WEATHER, NOW], tool_choice=choice)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1
    grammar = model.sampling.constraint.grammar
    assert "weather" in grammar
    assert "now" not in grammar


async def test_without_parallel_calls_the_first_one_counts(ask: Any) -> None:
    for stream in (False, True):
        answer = await ask(ONE + TWO, tools=[WEATHER, NOW], parallel_tool_calls=False, stream=stream)
        if stream:
            deltas = [chunk["choices"][0]["delta"] for chunk in answer]
            assert {call["index"] for delta in deltas for call in delta.get("tool_calls", [])} == {0}
        else:
            assert len(answer["choices"][0]["message"]["tool_calls"]) == 1


async def test_every_choice_has_calls_of_its_own(ask: Any) -> None:
    answer = await ask(ONE, tools=[WEATHER], n=2)
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]]
    assert len(set(ids)) == 2
    chunks = await ask(ONE, tools=[WEATHER], n=2, stream=True)
    for index in (0, 1):
        own = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"][0]["index"] == index]
        calls = [call for delta in own for call in delta.get("tool_calls", [])]
        assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Köln"}'


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    """Fields with one tool, and the choice of these."""
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}
    return {"tools": [WEATHER], "tool_choice": choice}


async def test_allowed_tools_are_all_that_the_model_knows(ask: Any, model: Any) -> None:
    fields = {**allowed("auto", WEATHER), "tools": [NOW, WEATHER]}
    answer = await ask(ONE, **fields)
    assert answer["choices"][0]["message"]["tool_calls"]
    assert '"weather"' in model.prompt
    assert '"now"' not in model.prompt
    assert not model.sampling.HasField("constraint")
    fields["tool_choice"]["allowed_tools"]["mode"] = "required"
    await ask(ONE, **fields)
    assert "weather" in model.sampling.constraint.grammar
    assert "now" not in model.sampling.constraint.grammar
    message = (await ask(ONE, **allowed("auto")))["choices"][0]["message"]
    assert message["content"] == ONE


async def test_an_empty_list_of_tools_is_none(ask: Any) -> None:
    answer = await ask("x", tools=[], tool_choice="auto", parallel_tool_calls=False)
    assert answer["choices"][0]["message"]["content"] == "x"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (allowed("x", WEATHER), "tool_choice.allowed_tools.mode"),
        (allowed("auto", NOW), "tool_choice.allowed_tools.tools[0]"),
        (allowed("required"), "tool_choice.allowed_tools.tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ],
)
async def test_what_is_wrong_with_tools_is_named(refused: Any, model: Any, fields: Any, param: str) -> None:
    error = await refused(**fields)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert model.streams == []


# --- reasoning ------------------------------------------------------------------------------------------------------


async def test_reasoning_is_apart_and_counted(ask: Any) -> None:
    answer = await ask("<think>\nHm, é.\n</think>\n\nParis.")
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Paris.", "Hm, é.")
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == len("\nHm, é.\n".encode())
    chunks = await ask("<think>\nHm, é.\n</think>\n\nParis.", stream=True, stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, é."
    assert "".join(delta.get("content", "") for delta in deltas) == "Paris."
    assert chunks[-1]["usage"] == answer["usage"]


async def test_reasoning_that_the_prompt_opened_is_known(ask: Any) -> None:
    answer = await ask("Hm.</think>Paris.", chat_template_kwargs={"open_think": True})
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Paris.", "Hm.")
    answer = await ask("Hm", chat_template_kwargs={"open_think": True})
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


async def test_a_message_that_goes_on_goes_on_in_its_reasoning(ask: Any) -> None:
    messages = [*HI, {"role": "assistant", "content": "<think>So"}]
    message = (await ask(" what?</think>Yes.", messages=messages, continue_final_message=True))["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "what?")


async def test_effort_none_switches_reasoning_off(ask: Any, model: Any) -> None:
    for effort, closed in (("none", True), ("low", False)):
        await ask("x", reasoning_effort=effort)
        assert model.prompt.endswith("</think>\n\n") is closed
    await ask("x", chat_template_kwargs={"enable_thinking": False})
    assert model.prompt.endswith("</think>\n\n")


async def test_reasoning_is_an_object_of_the_same_fields(ask: Any, model: Any, refused: Any) -> None:
    for reasoning, closed in (({"effort": "none"}, True), ({"enabled": False}, True), ({"effort": "low"}, False)):
        await ask("x", reasoning=reasoning)
        assert model.prompt.endswith("</think>\n\n") is closed
    message = (await ask("<think>Hm.</think>x", reasoning={"exclude": True}))["choices"][0]["message"]
    assert "reasoning_content" not in message
    message = (await ask("<think>Hm.</think>x", reasoning={"enabled": True}))["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm."
    assert (await refused(reasoning={"effort": "huge"}))["param"] == "reasoning.effort"
    assert (await refused(reasoning={"effort": "low"}, reasoning_effort="high"))["param"] == "reasoning"
    assert (await refused(reasoning={"max_tokens": -2}))["param"] == "reasoning.max_tokens"


@pytest.mark.parametrize("switch", [True, False])
async def test_thinking_is_switched_by_a_field_of_its_own(ask: Any, model: Any, switch: bool) -> None:
    await ask("x", enable_thinking=switch)
    assert model.prompt.endswith("</think>\n\n") is not switch
    await ask("x", enable_thinking=switch, chat_template_kwargs={"enable_thinking": not switch})
    assert model.prompt.endswith("</think>\n\n") is switch


async def test_reasoning_is_left_out_on_request(ask: Any) -> None:
    text = f"<think>Hm, é.</think>Paris.{ONE}"
    shown = await ask(text, tools=[WEATHER], logprobs=True)
    fields: dict[str, Any] = {"tools": [WEATHER], "logprobs": True, "include_reasoning": False}
    hidden = await ask(text, **fields)
    message = hidden["choices"][0]["message"]
    assert "reasoning_content" not in message
    assert message["content"] == shown["choices"][0]["message"]["content"] == "Paris."
    assert message["tool_calls"][0]["function"] == shown["choices"][0]["message"]["tool_calls"][0]["function"]
    assert hidden["choices"][0]["logprobs"] == shown["choices"][0]["logprobs"]
    assert hidden["usage"] == shown["usage"]
    parts = [chunk["choices"][0] for chunk in await ask(text, stream=True, **fields)]
    assert all("reasoning_content" not in part["delta"] for part in parts)
    assert "".join(part["delta"].get("content", "") for part in parts) == "Paris."
    streamed = [one for part in parts if part["logprobs"] for one in part["logprobs"]["content"]]
    assert streamed == hidden["choices"][0]["logprobs"]["content"]


async def test_reasoning_then_a_call(ask: Any) -> None:
    choice = (await ask(f"<think>Hm.</think>\n\n{ONE}", tools=[WEATHER]))["choices"][0]
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


async def test_an_answer_in_json_is_never_taken_for_reasoning(ask: Any) -> None:
    fields = {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"open_think": True}}
    message = (await ask('{"a": 1}', **fields))["choices"][0]["message"]
    assert message["content"] == '{"a": 1}'


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS, data=st.data())
async def test_a_stream_adds_up_to_the_whole_answer(front: Any, model: Any, text: str, data: st.DataObject) -> None:
    model.script = in_pieces(text, data)
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": HI,
        "tools": [WEATHER, NOW],
        "logprobs": data.draw(st.booleans(), label="logprobs"),
        "parallel_tool_calls": data.draw(st.booleans(), label="parallel"),
        "stop": data.draw(st.sampled_from([None, "é", "text"]), label="stop"),
    }
    whole = (await front.http.post(CHAT, json=fields)).json()
    fields |= {"stream": True, "stream_options": {"include_usage": True}}
    raw = (await front.http.post(CHAT, json=fields)).text
    *events, usage, done = [event.removeprefix("data: ") for event in raw.rstrip("\n").split("\n\n")]
    assert done == "[DONE]"
    assert json.loads(usage)["usage"] == whole["usage"]
    chunks = [json.loads(event)["choices"][0] for event in events]
    (choice,) = whole["choices"]
    message = choice["message"]
    for name in ("content", "reasoning_content"):
        assert "".join(chunk["delta"].get(name, "") for chunk in chunks) == (message.get(name) or "")
    calls: list[tuple[str, str]] = []
    for chunk in chunks:
        for call in chunk["delta"].get("tool_calls", []):
            if "id" in call:
                calls.append((call["function"]["name"], ""))
            name, arguments = calls[call["index"]]
            calls[call["index"]] = name, arguments + call["function"]["arguments"]
    assert calls == [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == [choice["finish_reason"]]
    streamed = [one for chunk in chunks if chunk["logprobs"] for one in chunk["logprobs"]["content"]]
    assert streamed == (choice["logprobs"]["content"] if choice["logprobs"] else [])


async def test_tools_go_together_with_a_response_format(ask: Any, model: Any) -> None:
    def constraint() -> Any:
        return model.sampling.constraint

    fields = {"tools": [WEATHER], "response_format": {"type": "json_object"}}
    answer = await ask('{"city":"Köln"}', **fields)
    assert answer["choices"][0]["message"]["content"] == '{"city":"Köln"}'
    assert "content: %json" in constraint().grammar
    answer = await ask(ONE, **fields)
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    await ask("{}", **fields, tool_choice="none")
    assert constraint().HasField("json_object")
    await ask(ONE, **fields, tool_choice="required")
    assert "content" not in constraint().grammar
