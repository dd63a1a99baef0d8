"""Pages of items, as the query of a request asks for them (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.gateway.checks import invalid
from headrace.gateway.edge.requests import number_of
from headrace.gateway.responses.response import ItemPage

MAX_PAGE = 100
DEFAULT_PAGE = 20
QUERY: Mapping[str, Any] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}
"""The schemas of the parameters."""


def page_of(items: Sequence[dict[str, Any]], query: Mapping[str, str]) -> ItemPage:
    """The page of these items, which are in the order of the conversation. Raises `StatusError`."""
    limit = number_of(query, "limit", DEFAULT_PAGE, 1, MAX_PAGE)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", "order must be asc or desc")
    if order == "desc":
        items = items[::-1]
    after = query.get("after")
    if after is not None:
        position = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if position is None:
            raise invalid("after", "after: there is no item of this id")
        items = items[position + 1 :]
    return page(items[:limit], has_more=len(items) > limit)


def page(items: Sequence[dict[str, Any]], *, has_more: bool) -> ItemPage:
    """These items as a page."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return ItemPage(data=[*items], first_id=first, last_id=last, has_more=has_more)
