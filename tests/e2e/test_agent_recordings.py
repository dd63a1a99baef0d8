"""What agents asked when they were run (`agent_recordings`) is answered, without the agents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.agent_recordings import _folded, _unfolded, names, of_exchanges, recorded
from tests.e2e.recorder import Exchange
from tests.e2e.scripted_model import scripted_system
from tests.e2e.serving import HTTP, Serve

NAME = "scripted"
DONE = "The number is 42."
LEAST_CACHED = 0.9


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with scripted_system(tmp_path_factory.mktemp("model"), NAME, [DONE]) as serve:
        yield serve


def names_of(ignored: str) -> set[str]:
    """What was left out but for limits, which depend on the lengths of texts in tokens."""
    return {name for name in ignored.split(", ") if name and ">" not in name}


def usage_of(path: str, answer: bytes) -> tuple[int, int] | None:
    """Cached tokens of the prompt and all of them, by an API's answer, streamed or not; None if it says nothing."""
    lines = [line.removeprefix(b"data: ") for line in answer.splitlines() if line.startswith(b"data: {")]
    for told in map(json.loads, lines or [answer]):
        # In a stream of Responses, and of Messages, the usage is inside of the answer so far.
        usage = (told.get("response") or told.get("message") or told).get("usage")
        if not usage:
            continue
        if path.startswith("/v1/messages"):
            cached = usage["cache_read_input_tokens"]
            return cached, cached + usage["input_tokens"]
        prompt = "prompt" if "prompt_tokens" in usage else "input"
        return usage[f"{prompt}_tokens_details"]["cached_tokens"], usage[f"{prompt}_tokens"]
    return None


@pytest.mark.e2e
@pytest.mark.parametrize("agent", names())
def test_what_an_agent_asked_is_answered_and_its_turns_are_in_the_cache(system: Serve, agent: str) -> None:
    """Its first turn is that of the whole agent, with its tools. Later ones have the same beginning."""
    num_turns = 0
    tools: Any = None
    for one in recorded(agent):
        headers = {"authorization": "Bearer unused", "content-type": "application/json", **one.headers}
        content = None if one.body is None else json.dumps(one.filled(NAME)).encode()
        answer = HTTP.request(one.method, system.base_url + one.path, content=content, headers=headers)
        assert answer.status_code == 200, f"{one.path}: {answer.text}"
        assert names_of(answer.headers.get("x-headrace-ignored", "")) == names_of(one.ignored)
        if one.body is None or not (given := one.body.get("tools")):
            continue
        assert DONE.encode() in answer.content
        usage = usage_of(one.path, answer.content)
        assert usage is not None
        if tools == given:
            assert usage[0] >= LEAST_CACHED * usage[1]
        tools = given
        num_turns += 1
    assert num_turns >= 3 or agent == "aider"


# --- recordings -------------------------------------------------------------------------------------------------------


def exchange(body: Any, *, ignored: str = "") -> Exchange:
    headers = {"authorization": "Bearer secret", "anthropic-version": "2023-06-01"}
    return Exchange("POST", "/v1/messages", headers, json.dumps(body).encode(), 200, ignored, b"{}")


def test_a_recording_has_fields_order_and_sizes_and_no_texts() -> None:
    schema = {
        "type": "object",
        "required": ["path"],
        "properties": {"path": {"type": "string", "description": "Where it is", "enum": ["a", "not plain"]}},
    }
    call = {"id": "toolu_8f", "type": "tool_use", "name": "read", "input": {"path": "/home/me/secret.txt"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_8f", "content": "secret words"}
    body = {
        "model": "mine",
        "system": "You are an agent.",
        "messages": [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}],
        "tools": [{"name": "read", "input_schema": schema, "description": "Reads."}],
        "arguments": '{"path": "/home/me"}',
        "max_tokens": 7,
    }
    (asked,) = of_exchanges([exchange(body, ignored="max_tokens>65536")], "mine")
    assert (asked.headers, asked.ignored) == ({"anthropic-version": "2023-06-01"}, "max_tokens>")
    written = json.dumps(asked.body)
    for text in ("You are", "/home", "secret", "Reads", "Where", "not plain", "8f", "mine"):
        assert text not in written
    assert list(asked.body) == list(body)
    filled = asked.filled("scripted")
    assert len(filled["system"]) == len("You are an agent.")
    assert filled["model"] == "scripted"
    assert filled["max_tokens"] == 7
    one, other = (message["content"][0] for message in filled["messages"])
    assert one["id"] == other["tool_use_id"] == "id-1"
    assert filled["tools"][0]["input_schema"]["properties"]["path"]["enum"][0] == "a"
    assert json.loads(filled["arguments"]).keys() == {"path"}


def test_what_an_earlier_request_has_is_kept_once() -> None:
    bodies = [
        {"tools": [{"name": "a"}], "messages": [1]},
        {"tools": [{"name": "b"}], "messages": [1, 2]},
        {"tools": [{"name": "a"}], "messages": [1, 2, 3], "n": 1},
    ]
    folded = [_folded(body, bodies[:position]) for position, body in enumerate(bodies)]
    assert folded[2] == {"tools": {"<as>": 0}, "messages": {"<as>": 1, "<and>": [3]}, "n": 1}
    unfolded: list[Any] = []
    for body in folded:
        unfolded.append(_unfolded(body, unfolded))
    assert unfolded == bodies
