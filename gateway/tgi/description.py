"""The description of these endpoints for the OpenAPI document. Pure."""

from __future__ import annotations

from typing import Any

from headrace.gateway.edge.description import Operation
from headrace.gateway.tgi import types
from headrace.gateway.tgi.answers import TgiAnswer, TgiError, TgiInfo


def _generating(path: str, summary: str, answer: Any, is_streamed: bool) -> Operation:
    return Operation(
        "POST",
        path,
        f"{summary}, for TGI's clients",
        answer,
        (types.TgiRequest,),
        is_streamed=is_streamed,
        is_generated=True,
        error=TgiError,
    )


OPERATIONS: tuple[Operation, ...] = (
    _generating("/generate", "Continue a prompt", TgiAnswer, is_streamed=False),
    _generating("/generate_stream", "Stream the continuation of a prompt", None, is_streamed=True),
    _generating("/", "Continue a prompt, whole or as a stream", list[TgiAnswer], is_streamed=True),
    Operation("GET", "/info", "What is served", TgiInfo, error=TgiError, query={"model": {"type": "string"}}),
)
"""All operations."""
