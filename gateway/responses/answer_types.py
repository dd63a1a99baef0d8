"""The types of answers of the Responses API, for the OpenAPI document.

Real answers are written from prepared bytes; tests compare them with these types.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.gateway.edge.wire import Shape


class Response(msgspec.Struct, kw_only=True):
    """A response of the Responses API, with the other fields of OpenAI's."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    usage: dict[str, Any] | None


class DeletedResponse(Shape):
    """The answer to a deletion."""

    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(Shape):
    """A page of the input items of a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
