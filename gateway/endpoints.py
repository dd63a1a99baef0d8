"""What the gateway serves over HTTP. docs/protocol.md has every field.

To leave a protocol out, delete its folder and the lines that name it here.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.anthropic import description as anthropic_description
from headrace.gateway.anthropic import endpoints as anthropic
from headrace.gateway.console import endpoints as console
from headrace.gateway.edge.description import Operation
from headrace.gateway.edge.endpoint import Endpoint
from headrace.gateway.openai import absent_endpoints, model_endpoints
from headrace.gateway.openai import description as openai_description
from headrace.gateway.openai import endpoints as openai
from headrace.gateway.operations import description as operations_description
from headrace.gateway.operations import model_server_endpoints, openapi_endpoints, state_endpoints
from headrace.gateway.responses import description as responses_description
from headrace.gateway.responses import endpoints as responses
from headrace.gateway.responses.background import ResponseRuns
from headrace.gateway.services import Services

OPERATIONS: Sequence[Operation] = (
    *openai_description.OPERATIONS,
    *responses_description.OPERATIONS,
    *anthropic_description.OPERATIONS,
    *operations_description.OPERATIONS,
)
"""What the OpenAPI document describes."""


def endpoints(services: Services, runs: ResponseRuns, *, with_console: bool = True) -> Sequence[Endpoint]:
    """All endpoints, with or without the web console."""
    return [
        *openai.endpoints(services),
        *responses.endpoints(services, runs),
        *anthropic.endpoints(services),
        *model_endpoints.endpoints(services),
        *state_endpoints.endpoints(services, lambda: runs.store.redis),
        *model_server_endpoints.endpoints(services),
        *absent_endpoints.endpoints(services),
        *openapi_endpoints.endpoints(OPERATIONS),
        *(console.endpoints(services) if with_console else ()),
    ]
