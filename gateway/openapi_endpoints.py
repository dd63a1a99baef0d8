"""The description of what is served, for tools that read one."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.endpoint import Endpoint, Services
from headrace.gateway.exchange import Exchange
from headrace.gateway.openai_answers import encode
from headrace.gateway.openapi import document


def endpoints(services: Services) -> Sequence[Endpoint]:
    """GET /openapi.json."""
    cached: list[bytes] = []

    async def show(exchange: Exchange) -> None:
        if not cached:
            cached.append(encode(document()))
        await exchange.respond(cached[0])

    return [Endpoint("GET", "/openapi.json", "openapi", show, is_open=True)]
