"""The status of the models, for clients of OpenVINO Model Server."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.edge.endpoint import Endpoint
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import encode
from headrace.gateway.services import Services

_AVAILABLE = {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": "OK"}}


def endpoints(services: Services) -> Sequence[Endpoint]:
    """GET /v1/config."""

    async def config(exchange: Exchange) -> None:
        models = await services.models.listed()
        await exchange.respond(encode({model.name: {"model_version_status": [_AVAILABLE]} for model in models}))

    return [Endpoint("GET", "/v1/config", "config", config)]
