"""Tools of the Responses API that chats do not have: custom ones, namespaces, those that the provider hosts."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from headrace.gateway.hints import HEADER
from tests.gateway.tool_model import events_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
RESPONSES = "/v1/responses"
NOW = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
PATCH = {"type": "custom", "name": "patch", "description": "Apply a patch"}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Agents that work for you.",
    "tools": [{**NOW, "name": "start", "description": "Start one"}, {**PATCH, "name": "say"}],
}
HOSTED = [
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "local_shell",
    "shell",
    "apply_patch",
    "tool_search",
    "image_generation",
    "code_interpreter",
    "file_search",
    "computer",
    "computer_use_preview",
    "programmatic_tool_calling",
]
TEXT = '*** Begin\n+ "é😀"\\\n'


@pytest.fixture(autouse=True)
def _fresh(model: Any) -> None:
    model.reset()


@pytest.fixture
def post(front: Any, model: Any) -> Any:
    """The HTTP response of a model that writes this text."""

    async def send(written: str, **fields: Any) -> Any:
        model.answer = written
        response = await front.http.post(RESPONSES, json={"model": "tiny", "input": "hi", **fields})
        assert response.status_code == 200, response.text
        return response

    return send


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


# --- custom ---------------------------------------------------------------------------------------------------------


async def test_a_custom_tool_is_called_with_a_text(post: Any, model: Any) -> None:
    answer = (await post(called("patch", input=TEXT) + called("now"), tools=[PATCH, NOW])).json()
    patch, now = answer["output"]
    assert patch["id"].startswith("ctc_")
    assert patch == {
        "id": patch["id"],
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": patch["call_id"],
        "name": "patch",
        "input": TEXT,
    }
    assert (now["type"], now["name"]) == ("function_call", "now")
    assert answer["tools"][0] == PATCH
    assert '"description": "Apply a patch", "parameters": {"type": "object", "properties": {"input"' in model.prompt


async def test_a_stream_of_a_custom_call_has_its_events(post: Any) -> None:
    events = events_of((await post(called("patch", input=TEXT), tools=[PATCH], stream=True)).text)
    kinds = [kind for kind, _ in itertools.groupby(event["type"].removeprefix("response.") for event in events)]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    assert events[2]["item"]["input"] == ""
    deltas = [event for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(event["delta"] for event in deltas) == TEXT
    done = events[-3]
    assert (done["input"], done["item_id"], done["output_index"]) == (TEXT, events[2]["item"]["id"], 0)
    assert events[-1]["response"]["output"] == [events[-2]["item"]]


@pytest.mark.parametrize("output", ["done", [{"type": "input_text", "text": "done"}]])
async def test_a_custom_call_and_its_output_go_on(post: Any, model: Any, output: Any) -> None:
    first = (await post(called("patch", input=TEXT), tools=[PATCH])).json()
    (call,) = first["output"]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": output}
    await post("x", input=[result], previous_response_id=first["id"], tools=[PATCH])
    prompt = model.prompt
    shown = json.dumps({"input": TEXT}, ensure_ascii=False)
    assert f"<tool_call>patch{shown}</tool_call><|im_end|>\n<|im_start|>tool\ndone<|im_end|>" in prompt
    reference = {"type": "item_reference", "id": call["id"]}
    await post("x", input=[{"role": "user", "content": "hi"}, reference, result], tools=[PATCH])
    assert model.prompt == prompt


async def test_a_custom_tool_with_a_grammar_is_held_by_it(post: Any, model: Any) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "+" /[a-z]+/ LF\n%import common.LF'}
    await post("x", tools=[{**PATCH, "format": form}])
    assert json.dumps(r"^(?:\+(?:[a-z]+)\n)$") in model.sampling.constraint.grammar
    await post("x", tools=[{**PATCH, "format": {"type": "text"}}])
    assert not model.sampling.HasField("constraint")
    await post(called("patch", input="a"), tools=[PATCH, NOW], tool_choice={"type": "custom", "name": "patch"})
    assert "now" not in model.sampling.constraint.grammar


# --- namespaces -----------------------------------------------------------------------------------------------------


async def test_the_tools_of_a_namespace_are_called_by_both_names(post: Any, model: Any) -> None:
    written = called("agents__start") + called("agents__say", input="Go!") + called("start") + called("now")
    response = await post(written, tools=[AGENTS, NOW])
    start, say, again, now = response.json()["output"]
    assert [(one["type"], one.get("namespace"), one["name"]) for one in (start, say, again, now)] == [
        ("function_call", "agents", "start"),
        ("custom_tool_call", "agents", "say"),
        ("function_call", "agents", "start"),
        ("function_call", None, "now"),
    ]
    assert "namespace" not in now
    assert say["input"] == "Go!"
    assert '"name": "agents__start"' in model.prompt
    assert "agents: Agents that work for you.\\n\\nStart one" in model.prompt
    assert response.json()["tools"][0] == AGENTS
    outputs = [
        {"type": "function_call_output", "call_id": start["call_id"], "output": "1"},
        {"type": "custom_tool_call_output", "call_id": say["call_id"], "output": "2"},
    ]
    await post("x", input=["hi" and {"role": "user", "content": "hi"}, start, say, *outputs], tools=[AGENTS, NOW])
    assert '<tool_call>agents__start{}</tool_call><tool_call>agents__say{"input": "Go!"}</tool_call>' in model.prompt


async def test_a_tool_of_a_namespace_is_chosen_by_its_names(post: Any, model: Any) -> None:
    for choice in ({"name": "start", "namespace": "agents"}, {"name": "start"}, {"name": "agents__start"}):
        await post(called("agents__start"), tools=[AGENTS, NOW], tool_choice={"type": "function", **choice})
        grammar = model.sampling.constraint.grammar
        assert "agents__start" in grammar
        assert "agents__say" not in grammar


# --- hosted ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HOSTED)
async def test_a_hosted_tool_beside_others_is_left_out_and_named(post: Any, model: Any, kind: str) -> None:
    response = await post(called("now"), tools=[{"type": kind, "vector_store_ids": ["v"]}, NOW])
    assert response.headers[HEADER] == f"tools.{kind}"
    assert response.json()["output"][0]["name"] == "now"
    assert f'"{kind}' not in model.prompt
    response = await post("x", tools=[{"type": kind}], tool_choice="none")
    assert response.headers[HEADER] == f"tools.{kind}"


@pytest.mark.parametrize("kind", HOSTED)
async def test_a_hosted_tool_alone_or_chosen_is_refused_by_name(front: Any, model: Any, kind: str) -> None:
    search = {"type": kind}
    for fields, param in (
        ({"tools": [search]}, "tools[0].type"),
        ({"tools": [search], "tool_choice": "required"}, "tools[0].type"),
        ({"tools": [search, NOW], "tool_choice": search}, "tool_choice"),
    ):
        response = await front.http.post(RESPONSES, json={"model": "tiny", "input": "hi", **fields})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param)
        assert f"there is no built-in '{kind}' here; offer a function for it" in error["message"]
    assert model.streams == []


async def test_tools_that_are_loaded_on_demand_are_there_at_once(post: Any, model: Any) -> None:
    response = await post("x", tools=[{**NOW, "defer_loading": True}, {"type": "tool_search"}])
    assert response.headers[HEADER] == "tools.defer_loading, tools.tool_search"
    assert '"name": "now"' in model.prompt
    assert "defer_loading" not in model.prompt


async def test_the_conversation_brings_tools(post: Any, model: Any) -> None:
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [PATCH, NOW]},
        {"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {"query": "agents"}},
        {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": [AGENTS]},
        {"role": "user", "content": "hi"},
    ]
    answer = (await post(called("agents__start"), input=items, tools=[NOW])).json()
    assert answer["output"][0]["namespace"] == "agents"
    names = [name for name in ("now", "patch", "agents__start", "agents__say") if f'"name": "{name}"' in model.prompt]
    assert names == ["now", "patch", "agents__start", "agents__say"]
    assert model.prompt.count('"name": "now"') == 1
    assert (
        '<tool_call>tool_search{"query": "agents"}</tool_call><|im_end|>\n<|im_start|>tool\ntools: agents'
        in model.prompt
    )


# --- allowed tools --------------------------------------------------------------------------------------------------


async def test_allowed_tools_are_all_that_the_model_knows(post: Any, model: Any) -> None:
    search = {"type": "web_search"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}, search]}
    response = await post(called("now"), tools=[NOW, PATCH, search], tool_choice=choice)
    assert response.json()["tool_choice"] == choice
    assert '"patch"' not in model.prompt
    assert not model.sampling.HasField("constraint")
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "agents"}]}
    await post(called("agents__start"), tools=[NOW, AGENTS], tool_choice=choice)
    grammar = model.sampling.constraint.grammar
    assert ("agents__start" in grammar, "agents__say" in grammar, "now" in grammar) == (True, True, False)
