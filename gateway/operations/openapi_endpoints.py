"""The OpenAPI document, for tools."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.edge.description import Operation
from headrace.gateway.edge.endpoint import Endpoint
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import encode
from headrace.gateway.operations.openapi import document


def endpoints(operations: Sequence[Operation]) -> Sequence[Endpoint]:
    """GET /openapi.json, which describes these operations."""
    cached: list[bytes] = []

    async def show(exchange: Exchange) -> None:
        if not cached:
            cached.append(encode(document(operations)))
        await exchange.respond(cached[0])

    return [Endpoint("GET", "/openapi.json", "openapi", show, is_open=True)]
