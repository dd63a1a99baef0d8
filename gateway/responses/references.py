"""References to items of stored responses: `{"type": "item_reference", "id": ...}`.

The id of an item names its response, so a store of responses finds it: `msg_` and 32 digits of the response, 16 of its
own.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from headrace.gateway.checks import invalid
from headrace.gateway.edge.wire import encode
from headrace.gateway.responses.store import MAX_RESPONSE_BYTES, StoredResponse

MAX_REFERENCES = 1024
REFERENCE = "item_reference"
_ITEM_ID = re.compile(r"(?:msg|rs|fc|ctc|cmp|mcp|mcpl|mcpr)_([0-9a-f]{32})[0-9a-f]{16}")


def new_output_id(kind: str, response_id: str) -> str:
    """A fresh id of an item in the output of this response, such as `msg_…` for the kind `msg`."""
    return f"{kind}_{response_id.removeprefix('resp_')}{secrets.token_hex(8)}"


async def resolved(
    value: str | list[dict[str, Any]],
    stored: Callable[[str], Awaitable[StoredResponse | None]],
    field: str = "input",
) -> str | list[dict[str, Any]]:
    """The input, or the items of another field, with items of stored responses in place of the references to them.
    `stored` gives a response by its id, None if there is none. Raises `StatusError` for an item that does not exist."""
    if isinstance(value, str):
        return value
    places = {position: item for position, item in enumerate(value) if item.get("type") == REFERENCE}
    if not places:
        return value
    if len(places) > MAX_REFERENCES:
        raise invalid(field, f"{field} takes at most {MAX_REFERENCES} items of type {REFERENCE}")
    items = await _items(places, stored, field)
    return [items.get(position, item) for position, item in enumerate(value)]


async def _items(
    places: Mapping[int, Mapping[str, Any]], stored: Callable[[str], Awaitable[StoredResponse | None]], where: str
) -> dict[int, dict[str, Any]]:
    """The items that are referred to, by position. Each may be referred to once, and all of them are at most as large
    as a stored response, so that a short request cannot have a huge conversation."""
    items: dict[int, dict[str, Any]] = {}
    output: Sequence[dict[str, Any]] = ()
    num_bytes = 0
    response_id = ""
    used = set()
    for position, reference in places.items():
        field = f"{where}[{position}].id"
        item_id = reference.get("id")
        matched = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
        if matched is None:
            raise invalid(field, f"{field} must be the id of an item in the output of a stored response")
        if item_id in used:
            raise invalid(field, f"{field}: the item is in the {where} already")
        used.add(item_id)
        # The items of one response usually follow one another.
        if response_id != f"resp_{matched[1]}":
            response_id = f"resp_{matched[1]}"
            found = await stored(response_id)
            output = found.response.output_values() if found is not None else ()
        item = next((one for one in output if one["id"] == item_id), None)
        if item is None:
            raise invalid(field, f"{field}: there is no such item; was its response stored? Send the item itself")
        items[position] = item
        num_bytes += len(encode(item))
        if num_bytes > MAX_RESPONSE_BYTES:
            raise invalid(where, f"{where} refers to items of more than {MAX_RESPONSE_BYTES} bytes")
    return items
