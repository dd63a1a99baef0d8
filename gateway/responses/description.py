"""The operations of this protocol, for the OpenAPI document (pure)."""

from __future__ import annotations

from headrace.gateway.edge.description import API, Operation
from headrace.gateway.responses import answer_types
from headrace.gateway.responses.types import ResponsesRequest

_RESPONSE = "/responses/{response_id}"

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/responses",
        "Answer in the manner of the Responses API",
        answer_types.Response,
        (ResponsesRequest,),
        is_streamed=True,
        prefixes=API,
    ),
    Operation(
        "GET",
        _RESPONSE,
        "Retrieve a response, or follow it",
        answer_types.Response,
        is_streamed=True,
        prefixes=API,
        query={"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}},
    ),
    Operation("DELETE", _RESPONSE, "Forget a response", answer_types.DeletedResponse, prefixes=API),
    Operation("POST", f"{_RESPONSE}/cancel", "Cancel a response", answer_types.Response, prefixes=API),
    Operation(
        "GET",
        f"{_RESPONSE}/input_items",
        "List what a response answers",
        answer_types.InputItems,
        prefixes=API,
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": 100},
            "order": {"enum": ["asc", "desc"]},
            "after": {"type": "string"},
        },
    ),
)
"""All operations."""
