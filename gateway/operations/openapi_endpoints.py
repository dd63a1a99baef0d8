"""The OpenAPI document, for tools."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.edge.endpoint import Endpoint, Operation
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import encode
from headrace.gateway.operations.answers import Document
from headrace.gateway.operations.openapi import document


def endpoints(others: Sequence[Endpoint]) -> Sequence[Endpoint]:
    """GET /openapi.json, which describes itself and these."""
    cached: list[bytes] = []

    async def show(exchange: Exchange) -> None:
        if not cached:
            cached.append(encode(document([*others, own])))
        await exchange.respond(cached[0])

    own = Endpoint("GET", "/openapi.json", "openapi", show, Operation("This document", Document), is_open=True)
    return [own]
