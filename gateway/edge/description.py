"""Descriptions of endpoints for the OpenAPI document. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.gateway.edge.failures import Error

TEXT = "text/plain"
EVENTS = "text/event-stream"
API = ("/v1", "/v3")
"""Prefixes of the API: its own, and the one that clients of OpenVINO Model Server use."""
BARE_API = (*API, "")
"""The same for paths that llama.cpp's server has without a prefix, too."""


@dataclass(frozen=True, slots=True)
class Operation:
    """The operation of a method on a path. Its response has a type or is plain text."""

    method: str
    path: str
    summary: str
    answer: Any = None
    requests: Sequence[Any] = ()
    """The types that its body is decoded into."""
    is_streamed: bool = False
    """The answer may be a stream of what a model generates."""
    stream_type: str = EVENTS
    """Content type of the stream: server-sent events, or lines of JSON."""
    prefixes: Sequence[str] = ("",)
    error: Any = Error
    status: int | None = 200
    """Type of an answer; None if there are only errors."""
    content_type: str = TEXT
    """Content type of an answer without a type."""
    unavailable: Any = None
    """Type of a 503 that reports a state rather than an error."""
    query: Mapping[str, Any] = field(default_factory=dict)
    """Schemas of the parameters in the query, by name."""

    is_generated: bool = False
    """A model answers, although never as a stream."""

    @property
    def generates(self) -> bool:
        """Whether a model answers, within the time that the request gives it."""
        return self.method == "POST" and (self.is_streamed or self.is_generated)
