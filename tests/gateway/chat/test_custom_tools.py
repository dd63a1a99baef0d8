"""Tools of type `custom` in chats: the model calls a function with one argument, and the caller gets its text."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Apply a patch"}}
NOW = {"type": "function", "function": {"name": "now"}}
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "+" /[a-z"]+/ LF\n%import common.LF'}}
TEXT = '*** Begin\n+ "é😀"\\\n'


def call_of(arguments: str, name: str = "patch") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(autouse=True)
def _fresh(model: Any) -> None:
    model.reset()


@pytest.fixture
def post(front: Any, model: Any) -> Any:
    async def send(text: str, status: int = 200, **fields: Any) -> Any:
        model.answer = text
        response = await front.http.post(CHAT, json={"model": "tiny", "messages": HI, **fields})
        assert response.status_code == status, response.text
        if not fields.get("stream"):
            return response.json()
        events = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    return send


async def test_the_model_knows_a_function_and_the_caller_gets_a_text(post: Any, model: Any) -> None:
    answer = await post(call_of(json.dumps({"input": TEXT})) + call_of("{}", "now"), tools=[PATCH, NOW])
    choice = answer["choices"][0]
    patch, now = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert (patch["type"], patch["custom"]) == ("custom", {"name": "patch", "input": TEXT})
    assert (now["type"], now["function"]["name"]) == ("function", "now")
    schema = {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    }
    function = {"name": "patch", "description": "Apply a patch", "parameters": schema}
    assert json.dumps({"type": "function", "function": function}) in model.prompt
    messages = [*HI, {"role": "assistant", "tool_calls": [patch]}]
    await post("x", messages=messages, tools=[PATCH])
    assert "patch" + json.dumps({"input": TEXT}, ensure_ascii=False) in model.prompt


async def test_a_text_without_an_object_around_it_is_the_input(post: Any) -> None:
    for arguments, text in ((json.dumps(TEXT), TEXT), (json.dumps('{"input": "a"}'), '{"input": "a"}')):
        (call,) = (await post(call_of(arguments), tools=[PATCH]))["choices"][0]["message"]["tool_calls"]
        assert call["custom"] == {"name": "patch", "input": text}
    message = (await post(call_of('"a"', "now"), tools=[PATCH, NOW]))["choices"][0]["message"]
    assert "tool_calls" not in message


async def test_a_stream_adds_up_to_the_text(post: Any) -> None:
    chunks = await post(call_of("{}", "now") + call_of(json.dumps({"input": TEXT})), tools=[PATCH, NOW], stream=True)
    deltas = [one for chunk in chunks for one in chunk["choices"][0]["delta"].get("tool_calls", [])]
    begun = [one for one in deltas if "id" in one]
    assert [(one["index"], one["type"]) for one in begun] == [(0, "function"), (1, "custom")]
    assert begun[1]["custom"] == {"name": "patch", "input": ""}
    assert "".join(one["custom"]["input"] for one in deltas if one["index"] == 1) == TEXT


async def test_a_named_and_a_required_custom_tool_are_held_by_a_grammar(post: Any, model: Any) -> None:
    for choice in ("required", {"type": "custom", "custom": {"name": "patch"}}):
        answer = await post(call_of('{"input": "a"}'), tools=[PATCH], tool_choice=choice)
        assert answer["choices"][0]["message"]["tool_calls"][0]["custom"]["input"] == "a"
        assert "patch" in model.sampling.constraint.grammar


@pytest.mark.parametrize(
    "form",
    [GRAMMAR, {"type": "grammar", "grammar": {"syntax": "regex", "definition": r'\+[a-z"]+\n'}}],
)
async def test_a_grammar_is_held_as_the_pattern_of_the_input(post: Any, model: Any, form: Any) -> None:
    tool = {"type": "custom", "custom": {"name": "patch", "format": form}}
    await post("x", tools=[tool])
    grammar = model.sampling.constraint.grammar
    schema = json.loads(grammar.partition("args_0: %json ")[2].partition("\n")[0])
    pattern = schema["properties"]["input"]["pattern"]
    assert pattern in (r'^(?:\+(?:[a-z"]+)\n)$', r'^(?:\+[a-z"]+\n)$')
    await post("x", tools=[{"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}])
    assert not model.sampling.HasField("constraint")


@pytest.mark.parametrize(
    ("custom", "param"),
    [
        ({}, "tools[0].custom.name"),
        ({"name": "f", "description": 1}, "tools[0].custom.description"),
        ({"name": "f", "format": {"type": "x"}}, "tools[0].custom.format.type"),
        ({"name": "f", "format": {"type": "grammar"}}, "tools[0].custom.format.grammar"),
        (
            {"name": "f", "format": {"type": "grammar", "grammar": {"syntax": "x", "definition": "a"}}},
            "tools[0].custom.format.grammar.syntax",
        ),
        (
            {"name": "f", "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "a: b"}}},
            "tools[0].custom.format.grammar.definition",
        ),
    ],
)
async def test_what_is_wrong_with_a_custom_tool_is_named(post: Any, custom: Any, param: str) -> None:
    answer = await post("x", 400, tools=[{"type": "custom", "custom": custom}])
    assert answer["error"]["param"] == param
