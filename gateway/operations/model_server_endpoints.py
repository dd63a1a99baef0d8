"""The status of the models, for clients of OpenVINO Model Server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.gateway.edge.endpoint import Endpoint
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import encode
from headrace.gateway.services import Services
from headrace.gateway.text.listing import ListedModel

_STATES = {
    "unloaded": "END",
    "loading": "LOADING",
    "loaded": "AVAILABLE",
    "unloading": "UNLOADING",
    "failed": "LOADING",
}


def endpoints(services: Services) -> Sequence[Endpoint]:
    """GET /v1/config."""

    async def config(exchange: Exchange) -> None:
        models = await services.models.overview()
        await exchange.respond(encode({model.name: {"model_version_status": [_version(model)]} for model in models}))

    return [Endpoint("GET", "/v1/config", "config", config)]


def _version(model: ListedModel) -> dict[str, Any]:
    problem = {"error_code": "UNKNOWN", "error_message": model.problem}
    status = problem if model.problem else {"error_code": "OK", "error_message": "OK"}
    return {"version": "1", "state": _STATES[model.state], "status": status}
