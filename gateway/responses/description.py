"""The operations of this protocol, for the OpenAPI document (pure)."""

from __future__ import annotations

from headrace.gateway.edge.description import API, Operation
from headrace.gateway.responses import response
from headrace.gateway.responses.types import ResponsesRequest

_RESPONSE = "/responses/{response_id}"

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/responses",
        "Answer in the manner of the Responses API",
        response.Response,
        (ResponsesRequest,),
        is_streamed=True,
        prefixes=API,
    ),
    Operation(
        "GET",
        _RESPONSE,
        "Retrieve a response, or follow it",
        response.Response,
        is_streamed=True,
        prefixes=API,
        query={"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}},
    ),
    Operation("DELETE", _RESPONSE, "Forget a response", response.DeletedResponse, prefixes=API),
    Operation("POST", f"{_RESPONSE}/cancel", "Cancel a response", response.Response, prefixes=API),
    Operation(
        "GET",
        f"{_RESPONSE}/input_items",
        "List what a response answers",
        response.InputItems,
        prefixes=API,
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": 100},
            "order": {"enum": ["asc", "desc"]},
            "after": {"type": "string"},
        },
    ),
)
"""All operations."""
