"""An endpoint: the handler of a method on a path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from headrace.gateway.edge.description import API
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.failures import OPENAI_ERRORS, ErrorShape

_PROBES = frozenset({"health", "metrics"})

Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The handler of a method on a path. Paths have Starlette's syntax. A GET endpoint also handles HEAD."""

    method: str
    path: str
    name: str
    """In metrics and logs."""
    handler: Handler
    errors: ErrorShape = OPENAI_ERRORS
    """The format of its errors, including those before the handler."""
    is_open: bool = False
    """Whether it is answered without a key, where others are not."""
    makes_work: bool = True
    """Whether a POST to it counts against the limits of its key."""
    request_id_header: bytes = b""
    """The header in which the protocol's own clients look for the request's id, if it is not x-request-id."""

    @property
    def is_probe(self) -> bool:
        """Whether it is polled by machines: then it is not in the access log or among requests in flight."""
        return self.name in _PROBES


def at_api(
    method: str,
    path: str,
    name: str,
    handler: Handler,
    errors: ErrorShape = OPENAI_ERRORS,
    *,
    request_id_header: bytes = b"",
    prefixes: Sequence[str] = API,
) -> Sequence[Endpoint]:
    """An endpoint at `path` under each prefix."""
    return [
        Endpoint(method, prefix + path, name, handler, errors, request_id_header=request_id_header)
        for prefix in prefixes
    ]
