"""Parts that callers may include when they read stored data: reasoning, in the form in which clients send it back.

Log-probabilities are there if the response was created with them. All other parts that can be included are always
there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.requests import texts_of
from headrace.gateway.responses.answers import encoded_event
from headrace.gateway.responses.response import Item, ReasoningItem, Response, ResponseEvent
from headrace.gateway.responses.types import ENCRYPTED_REASONING, check_include
from headrace.gateway.text.seals import REASONING

INCLUDE: Mapping[str, Any] = {"type": "array", "items": {"type": "string"}}
"""The schema of the parameter."""
_DATA = b"\ndata: "
_MAYBE_REASONING = b'"reasoning"'


def included(exchange: Exchange) -> list[str]:
    """The values of `include` in the query. Those that have no effect are hints."""
    include = texts_of(exchange, "include")
    check_include(include)
    return include


def shown_item(item: dict[str, Any], include: Sequence[str]) -> dict[str, Any]:
    """A stored item as it is shown."""
    if item["type"] == "reasoning" and ENCRYPTED_REASONING in include:
        return {**item, "encrypted_content": _sealed([part["text"] for part in item["content"]])}
    return item


def with_included(response: Response, include: Sequence[str]) -> Response:
    """A response as it is shown."""
    if ENCRYPTED_REASONING not in include:
        return response
    return msgspec.structs.replace(response, output=[_with_seal(item) for item in response.output])


def events_with_included(events: bytes, include: Sequence[str]) -> bytes:
    """Whole events of a stream as they are shown."""
    if ENCRYPTED_REASONING not in include or _MAYBE_REASONING not in events:
        return events
    return b"".join(_event(event, include) for event in events.split(b"\n\n") if event)


def _event(encoded: bytes, include: Sequence[str]) -> bytes:
    if _MAYBE_REASONING not in encoded:
        return encoded + b"\n\n"
    event = msgspec.json.decode(encoded.split(_DATA, 1)[1], type=ResponseEvent)
    if event.response is not UNSET:
        event.response = with_included(event.response, include)
    if event.item is not UNSET:
        event.item = _with_seal(event.item)
    return encoded_event(event)


def _with_seal(item: Item) -> Item:
    """The item; a reasoning item also gets its text in the opaque form that clients send back."""
    if not isinstance(item, ReasoningItem):
        return item
    return msgspec.structs.replace(item, encrypted_content=_sealed([part.text for part in item.content]))


def _sealed(texts: Sequence[str]) -> str:
    return REASONING.sealed("\n".join(texts))
