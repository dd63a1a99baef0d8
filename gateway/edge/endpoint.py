"""An endpoint: the handler of a method on a path, and its description."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.failures import OPENAI_ERRORS, ErrorShape

EVENTS = "text/event-stream"
API = ("/v1", "/v3")
"""Prefixes of the API: its own, and the one that clients of OpenVINO Model Server use."""
BARE_API = (*API, "")
"""The same for paths that llama.cpp's server has without a prefix, too."""
_PROBES = frozenset({"health", "metrics"})

Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Operation:
    """What the OpenAPI document says about an endpoint, in addition to its method, path and errors."""

    summary: str
    answer: Any = None
    """The type of its answer. None: a stream if there is one, else plain text."""
    requests: Sequence[Any] = ()
    """The types that its body is decoded into."""
    generates: bool = False
    """A model answers, within the time that the request gives it."""
    stream_type: str = ""
    """Content type of the answer as a stream; empty if it has none."""
    is_refused: bool = False
    """There are only errors."""
    unavailable: Any = None
    """Type of a 503 that reports a state rather than an error."""
    query: Mapping[str, Any] = field(default_factory=dict)
    """Schemas of the parameters in the query, by name."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The handler of a method on a path. Paths have Starlette's syntax. A GET endpoint also handles HEAD."""

    method: str
    path: str
    name: str
    """In metrics and logs."""
    handler: Handler
    operation: Operation | None = None
    """None for what only people and browsers use."""
    errors: ErrorShape = OPENAI_ERRORS
    """The format of its errors, including those before the handler."""
    is_open: bool = False
    """Whether it is answered without a key, where others are not."""
    admits: Callable[[Exchange], bool] = field(default=lambda exchange: False)
    """Whether it is answered for this caller without an API key, such as an operator."""
    makes_work: bool = True
    """Whether a POST to it counts against the limits of its key."""
    request_id_header: bytes = b""
    """The header in which the protocol's own clients look for the request's id, if it is not x-request-id."""

    @property
    def is_probe(self) -> bool:
        """Whether machines poll the endpoint. Such requests are neither in the access log nor counted as in flight."""
        return self.name in _PROBES


def under(prefixes: Sequence[str], *endpoints: Endpoint) -> Sequence[Endpoint]:
    """Each endpoint under each prefix."""
    return [replace(endpoint, path=prefix + endpoint.path) for endpoint in endpoints for prefix in prefixes]
