"""Tools for a model whose chat template takes none: listed in a block of text, read back, and held by a grammar."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from headrace.gateway.chat.formats import Formats
from headrace.gateway.chat.plain_tools import as_text, takes_tools, with_block
from headrace.gateway.text.chat_template import ChatTemplate
from tests.gateway.tool_model import ONE, TWO

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(tiny_files: Any, kit_of_module: Any) -> AsyncIterator[Any]:
    """A fake router with a model whose template knows roles and nothing else."""
    async with kit_of_module.serving_model(tiny_files, kit_of_module.CHATML) as fake:
        yield fake


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def before(plain: Any, kit_of_module: Any) -> AsyncIterator[Any]:
    """The gateway before it."""
    async with kit_of_module.serving_gateway(plain.address) as running:
        yield running


@pytest.fixture
def ask(before: Any, plain: Any) -> Any:
    """Post a chat to the model, which answers in this text; the first choice, or the deltas of a stream."""

    async def post(text: str, **fields: Any) -> Any:
        plain.reset()
        plain.answer = text
        response = await before.http.post(CHAT, json={"model": "tiny", "messages": HI, "tools": [WEATHER], **fields})
        assert response.status_code == 200, response.text
        if not fields.get("stream"):
            return response.json()["choices"][0]
        events = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
        assert events.pop() == "[DONE]"
        return [json.loads(event)["choices"][0]["delta"] for event in events]

    return post


async def test_the_tools_and_the_way_to_call_stand_in_the_system_message(ask: Any, plain: Any) -> None:
    await ask("x", messages=[{"role": "system", "content": "Be brief."}, *HI])
    system, user = plain.prompt.split("<|im_end|>\n")[:2]
    assert system.startswith("<|im_start|>system\nBe brief.\n\nYou can call these functions:")
    assert json.dumps(WEATHER["function"]) in system
    assert "<tool_call>" in system
    assert user == "<|im_start|>user\nhi"
    await ask("x")
    assert plain.prompt.startswith("<|im_start|>system\nYou can call these functions:")
    await ask("x", tool_choice="none")
    assert "weather" not in plain.prompt


async def test_calls_are_read_and_text_is_text(ask: Any, plain: Any) -> None:
    choice = await ask(f"Look: {ONE}\n{TWO}", tools=[WEATHER, NOW])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Look:"
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == [{"name": "weather", "arguments": '{"city": "Köln"}'}, {"name": "now", "arguments": "{}"}]
    assert not plain.sampling.HasField("constraint")
    assert (await ask("Just text."))["message"]["content"] == "Just text."


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_forced_call_is_held_by_a_grammar(ask: Any, plain: Any, choice: Any) -> None:
    answer = await ask(ONE, tool_choice=choice)
    assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["weather"]
    assert "weather" in plain.sampling.constraint.grammar


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_forced_call_that_is_cut_off_leaks_no_markup(ask: Any, choice: Any) -> None:
    for length in range(1, len(ONE.encode())):
        answer = await ask(ONE, tool_choice=choice, max_tokens=length)
        assert (answer["message"]["content"] or "", answer["finish_reason"]) == ("", "length")
    deltas = await ask(ONE, tool_choice=choice, max_tokens=20, stream=True)
    assert "".join(delta.get("content") or "" for delta in deltas) == ""
    assert (await ask(ONE, tool_choice=choice, stop=["weather"]))["message"]["content"] == ""


async def test_other_protocols_leak_no_markup_either(before: Any, plain: Any) -> None:
    plain.reset()
    plain.answer = ONE
    tool = {"name": "weather", "input_schema": PARAMETERS}
    body = {"model": "tiny", "messages": HI, "max_tokens": 20, "tools": [tool], "tool_choice": {"type": "any"}}
    answer = (await before.http.post("/v1/messages", json=body)).json()
    assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")
    flat = {"type": "function", "name": "weather", "parameters": PARAMETERS}
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 20, "tools": [flat], "tool_choice": "required"}
    answer = (await before.http.post("/v1/responses", json=body)).json()
    assert answer["status"] == "incomplete"
    assert [part["text"] for item in answer["output"] for part in item.get("content", ())] == [""]


async def test_calls_and_results_go_back_as_text(ask: Any, plain: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Köln"}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": "Look:", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c1", "content": "wind"},
        {"role": "user", "content": "So?"},
    ]
    for fields in ({}, {"tools": None}):
        await ask("x", messages=messages, **fields)
        turns = plain.prompt.split("<|im_start|>")[-3:]
        assert turns[0] == f"assistant\nLook:\n{ONE}<|im_end|>\n"
        results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nwind\n</tool_response>"
        assert turns[1] == f"user\n{results}\nSo?<|im_end|>\n"


async def test_tools_are_tokenized_as_they_are_sent(before: Any, plain: Any, ask: Any) -> None:
    await ask("x")
    body = {"model": "tiny", "messages": HI, "tools": [WEATHER]}
    assert (await before.http.post("/tokenize", json=body)).json()["tokens"] == list(plain.streams[0].request.token_ids)


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {})


EACH = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + EACH
SKIPS_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }};{% endfor %}"


@pytest.mark.parametrize("source", [NO_SYSTEM, SKIPS_SYSTEM])
async def test_the_block_stands_before_the_first_turn_where_the_template_shows_no_system(source: str) -> None:
    compiled = template(source)
    text = compiled.render(with_block(HI, [WEATHER], compiled)).text
    assert text.startswith("user:You can call these functions:")
    assert text.endswith("\n\nhi;")


async def test_templates_that_take_tools_are_told(kit: Any) -> None:
    assert not takes_tools(template(kit.CHATML))
    assert takes_tools(template(kit.TOOL_TEMPLATE))
    assert takes_tools(template("{% for m in messages %}{% if 'tools' in m %}{{ m.tools }}{% endif %}{% endfor %}"))


async def test_turns_without_calls_stay_as_they_are() -> None:
    talk = [{"role": "system", "content": "s"}, *HI, {"role": "assistant", "content": "a", "name": "n"}, *HI]
    assert as_text(talk) == talk


def model_of(source: str) -> Any:
    from types import SimpleNamespace

    from headrace.protos.host_pb2 import ServingRules

    tokenizer = SimpleNamespace(token_bytes=[b"<tool_call>"], special_ids=frozenset({0}))
    text = SimpleNamespace(template=template(source), tokenizer=tokenizer)
    card = SimpleNamespace(tokenizer_sha256="0")
    return SimpleNamespace(name="m", text=text, card=card, rules=ServingRules())


async def test_the_operator_may_want_no_tools() -> None:
    form = Formats().of(model_of(EACH))
    assert form.output.tools is not None
    assert (form.output.tools.name, form.marker_ids) == ("hermes", {"<tool_call>": 0})
    silent = Formats({"": "none"})
    assert silent.of(model_of(EACH)).output.tools is None
    assert silent.plain(model_of(EACH)) is None


async def test_families_without_a_grammar_are_held_in_the_plain_format() -> None:
    pythonic = model_of("{{ tools }}[func_name1(params_name1=params_value1), func_name2()]")
    told, held = Formats().of(pythonic), Formats().plain(pythonic)
    assert told.output.tools is not None
    assert held is not None
    assert held.output.tools is not None
    assert (told.output.tools.name, held.output.tools.name) == ("pythonic", "hermes")
