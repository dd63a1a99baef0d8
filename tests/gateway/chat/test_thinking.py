"""Budgets of reasoning: their names in each API, and the tokens that a worker needs to keep them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from headrace.gateway.chat.output import Reading
from headrace.gateway.chat.output_parsers.families import detect
from headrace.gateway.chat.thinking import budget_of
from headrace.gateway.chat.tools import ToolUse
from tests.gateway.conftest import TOOL_TEMPLATE, VOCAB, serving_gateway, serving_model, tiny_graphs

pytestmark = pytest.mark.asyncio(loop_scope="module")
OPENING, CLOSING = len(VOCAB), len(VOCAB) + 1
HI = [{"role": "user", "content": "hi"}]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinker() -> AsyncIterator[Any]:
    """A fake router whose model has tokens for the tags of reasoning."""
    files = tiny_graphs(add_bos=True, more_special=["<think>", "</think>"])
    async with serving_model(files, TOOL_TEMPLATE) as fake:
        yield fake


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinking(thinker: Any) -> AsyncIterator[Any]:
    """The gateway in front of it."""
    async with serving_gateway(thinker.address) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "fields", "wanted"),
    [
        (CHAT, {"thinking_token_budget": 7}, 7),
        (CHAT, {"reasoning_budget": 0}, 0),
        (CHAT, {"thinking_budget": 7, "thinking_token_budget": 7}, 7),
        (CHAT, {"thinking_budget_tokens": 7}, 7),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
        (CHAT, {"reasoning": {"max_tokens": 7}}, 7),
        (CHAT, {"thinking_token_budget": -1}, None),
        (CHAT, {}, None),
        (CHAT, {"reasoning_effort": "low"}, 1024),
        (CHAT, {"reasoning_effort": "low", "thinking_token_budget": -1}, None),
        (CHAT, {"reasoning_effort": "high"}, None),
        (MESSAGES, {"max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1500}}, 1500),
        (RESPONSES, {"reasoning": {"effort": "minimal"}}, 256),
        (RESPONSES, {"reasoning": {"effort": "medium"}}, 8192),
        (RESPONSES, {"reasoning": {"effort": "medium", "max_tokens": 9}}, 9),
        (RESPONSES, {"thinking_token_budget": 9}, 9),
        ("/api/chat", {"think": "low", "stream": False}, 1024),
    ],
)
async def test_a_budget_reaches_the_worker(thinking: Any, thinker: Any, path: str, fields: Any, wanted: Any) -> None:
    thinker.reset()
    body = {"model": "tiny", **({"input": "hi"} if path == RESPONSES else {"messages": HI}), **fields}
    response = await thinking.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert "x-headrace-ignored" not in response.headers
    sampling = thinker.sampling
    assert sampling.HasField("thinking_budget") == (wanted is not None)
    if wanted is not None:
        budget = sampling.thinking_budget
        assert (budget.max_tokens, list(budget.opening), budget.closing) == (wanted, [OPENING], CLOSING)
        assert [list(end.token_ids) for end in budget.ends] == [[CLOSING]]
        assert not budget.is_open


async def test_a_prompt_that_begins_the_reasoning_is_said(thinking: Any, thinker: Any) -> None:
    thinker.reset()
    body = {"messages": HI, "thinking_token_budget": 7, "chat_template_kwargs": {"open_think": True}}
    assert (await thinking.http.post(CHAT, json=body)).status_code == 200
    assert thinker.sampling.thinking_budget.is_open


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (CHAT, {"thinking_token_budget": -2}, "thinking_token_budget"),
        (CHAT, {"thinking_token_budget": 1, "reasoning_budget": 2}, "reasoning_budget"),
        (CHAT, {"reasoning_budget": 1, "reasoning": {"max_tokens": 2}}, "reasoning.max_tokens"),
        (RESPONSES, {"thinking_token_budget": 2**31}, "thinking_token_budget"),
    ],
)
async def test_what_contradicts_itself_is_refused_by_name(thinking: Any, path: str, fields: Any, name: str) -> None:
    body = {"messages": HI} if path == CHAT else {"input": "hi"}
    response = await thinking.http.post(path, json={**body, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name


async def test_it_is_a_hint_for_models_that_cannot_keep_it(gateway: Any, router: Any, front: Any, model: Any) -> None:
    """One that does not reason, and one whose tags are no tokens."""
    for running, fake in ((gateway, router), (front, model)):
        fake.reset()
        response = await running.http.post(CHAT, json={"messages": HI, "thinking_token_budget": 7})
        assert response.status_code == 200
        assert response.headers["x-headrace-ignored"] == "thinking_token_budget"
        assert not fake.sampling.HasField("thinking_budget")


async def test_messages_on_channels_end_as_their_tools_need() -> None:
    """Without tools, the final message follows; with tools, a call may. A grammar that requires one goes on by
    itself."""
    tokens: list[str] = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "analysis", "assistant", "final"]

    def encode(text: str) -> list[int]:
        found = []
        while text:
            (token,) = [token for token in tokens if text.startswith(token)]
            found.append(tokens.index(token))
            text = text[len(token) :]
        return found

    output = detect("<|channel|>")
    final, choosing = [2, 3, 5, 0, 6, 1], [2, 3, 5]
    for use, ends in (
        (ToolUse(), [final]),
        (ToolUse(schemas={"now": {}}), [choosing, final]),
        (ToolUse(schemas={"now": {}}, required=True), [[2]]),
    ):
        budget = budget_of(9, Reading(output, use, inside_reasoning=False, shown_ids=frozenset()), encode)
        assert budget is not None
        assert (list(budget.opening), budget.closing, budget.max_tokens) == ([0, 4, 1], 2, 9)
        assert [list(end.token_ids) for end in budget.ends] == ends
