"""The model of the fixture `model`, with tools and reasoning: its output, and helpers that read its streams."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from hypothesis import strategies as st

from headrace.protos.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from tests.gateway.conftest import EOS, Script, tokens_of

ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", ONE, TWO, "\n", " ", "é😀", "<tool_call>", '{"name": "now"', "text", "}"]),
    max_size=6,
).map("".join)


def in_pieces(text: str, data: st.DataObject) -> Script:
    """A script that writes the text in messages that end anywhere, and stops by itself or for the length."""
    tokens = tokens_of(text)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(tokens)))), label="cuts") | {len(tokens)})
    stopped = data.draw(st.booleans(), label="stopped")

    async def cut(_: Any, stream: Any, send: Any) -> None:
        for start, end in zip([0, *cuts], cuts, strict=False):
            await send(tokens[start:end], start, None)
        await send([EOS], len(tokens), FINISH_REASON_STOP if stopped else FINISH_REASON_LENGTH)

    return cut


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, without its comments; each is named as its type."""
    events = []
    for block in text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def without(names: Collection[str], value: Any) -> Any:
    """The value without members of these names, at any depth."""
    if isinstance(value, dict):
        return {name: without(names, one) for name, one in value.items() if name not in names}
    return [without(names, one) for one in value] if isinstance(value, list) else value
