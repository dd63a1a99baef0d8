"""What the modules of endpoints share: what they give to the HTTP surface, and what they get to work with.

A module of endpoints has a function `endpoints(services)`; `http` lists these functions.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from headrace.gateway.answering import Answering
from headrace.gateway.exchange import Exchange
from headrace.gateway.failures import ErrorShape
from headrace.gateway.metrics import Metrics
from headrace.gateway.models import Models
from headrace.gateway.openai_answers import OPENAI_ERRORS
from headrace.gateway.planning import Chats
from headrace.gateway.prompts import Prompts
from headrace.gateway.response_runs import ResponseRuns
from headrace.gateway.response_store import Store
from headrace.gateway.upstream import Upstream

API_PREFIXES = ("/v1", "/v3")
"""Where the API is: at its own place, and where clients of OpenVINO Model Server look for it."""

Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What a method does on a path. Paths are Starlette's; a GET answers HEAD too."""

    method: str
    path: str
    name: str
    """In metrics and logs."""
    handler: Handler
    errors: ErrorShape = OPENAI_ERRORS
    """How its failures look, including those that come before the handler."""
    is_open: bool = False
    """Whether it is answered without a key, where others are not."""
    makes_work: bool = True
    """Whether a POST to it counts against the limits of its key."""


@dataclass(frozen=True, slots=True)
class Services:
    """What endpoints work with."""

    models: Models
    prompts: Prompts
    chats: Chats
    answering: Answering
    upstream: Upstream
    metrics: Metrics
    responses: Store
    """Where responses are kept."""
    runs: ResponseRuns
    """Responses that are generated in the background."""


def at_api(
    method: str, path: str, name: str, handler: Handler, errors: ErrorShape = OPENAI_ERRORS
) -> Sequence[Endpoint]:
    """An endpoint at `path` under each of `API_PREFIXES`."""
    return [Endpoint(method, prefix + path, name, handler, errors) for prefix in API_PREFIXES]
