"""Conversations of very many parts take time in proportion, because they are read in the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace.gateway.anthropic import turns as anthropic_turns
from headrace.gateway.anthropic import types as anthropic
from headrace.gateway.chat.plain_tools import as_text
from headrace.gateway.checks import invalid
from headrace.gateway.edge.wire import decode_body, encode
from headrace.gateway.openai.types import EmbeddingRequest
from headrace.gateway.responses import types as responses
from headrace.gateway.responses.items import input_items, turns_of
from headrace.gateway.responses.tools import Offer
from headrace.protos.status import StatusError

NUMBER = 40_000
TEXT = "x" * 200
# What takes time in proportion takes a tenth of this; what grows with the square takes ten times as long.
MAX_CPU_S = 3.0


def read_anthropic(role: str, block: dict[str, Any]) -> Any:
    return anthropic_turns.turns_of([{"role": role, "content": [block] * NUMBER}])[0].message


def read_responses(item: dict[str, Any], number: int) -> Any:
    return turns_of((), input_items([item] * number))[0].message


def read_plain(messages: list[dict[str, Any]]) -> Any:
    return as_text(messages)[-1]["content"]


CALL = {"function": {"name": "f", "arguments": {}}}
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], int]]] = {
    "blocks of text": (lambda: read_anthropic("user", {"type": "text", "text": TEXT}), lambda m: len(m.content)),
    "blocks of thinking": (
        lambda: read_anthropic("assistant", {"type": "thinking", "thinking": TEXT}),
        lambda m: len(m.reasoning_content),
    ),
    "calls": (
        lambda: read_anthropic("assistant", {"type": "tool_use", "id": "a", "name": "f", "input": {}}),
        lambda m: 200 * len(m.tool_calls),
    ),
    "items of reasoning": (
        lambda: read_responses(
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": 10 * TEXT}]}, NUMBER // 10
        ),
        lambda m: len(m.reasoning_content),
    ),
    "turns behind a result": (
        lambda: read_plain([{"role": "tool", "content": "r"}, *[{"role": "user", "content": TEXT}] * NUMBER]),
        len,
    ),
    "calls as text": (
        lambda: read_plain([{"role": "assistant", "content": TEXT, "tool_calls": [CALL] * 4 * NUMBER}]),
        len,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_that_become_one_turn_are_joined_once(case: str) -> None:
    read, size = CASES[case]
    began_s = time.process_time()
    assert size(read()) >= NUMBER * len(TEXT)
    assert time.process_time() - began_s < MAX_CPU_S


def test_the_error_for_a_very_long_value_costs_no_more_than_reading_it() -> None:
    body = encode({"input": "a", "encoding_format": "x" * (15 << 20)})
    began_s = time.process_time()
    with pytest.raises(StatusError, match="^encoding_format: invalid enum value 'xxx"):
        decode_body(body, EmbeddingRequest)
    assert time.process_time() - began_s < MAX_CPU_S / 10


def test_names_of_fields_do_not_cost_more_with_every_turn() -> None:
    messages = [{"role": role, "content": "hi"} for _ in range(NUMBER // 4) for role in ("user", "assistant")]
    began_s = time.process_time()
    request = decode_body(encode({"model": "m", "max_tokens": 1, "messages": messages}), anthropic.MessagesRequest)
    _, names = anthropic.chat_of(request, None)
    body = {"input": [{"role": "user", "content": "hi"}] * 9_000, "instructions": "be kind"}
    asked = decode_body(encode(body), responses.ResponsesRequest)
    chat = responses.chat_of(asked, turns_of((), input_items(asked.input)), Offer())
    assert time.process_time() - began_s < MAX_CPU_S
    for one, named, expected in (
        (names, "messages[7].content", "messages[7].content"),
        (names, "messages[99999].role", "messages[99999].role"),
        (chat.names, "messages[7].content", "input[6].content"),
        (chat.names, "messages[0].content", "instructions.content"),
        (chat.names, "messages[99999].role", "messages[99999].role"),
    ):
        renamed = one.renamed(invalid(named, f"{named} is wrong"))
        assert (renamed.field, renamed.message) == (expected, f"{expected} is wrong")
