"""Endpoints for abilities that no model here has: a 404 that names the abilities of the model."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.edge.endpoint import Endpoint, Handler, at_api
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import decode_body
from headrace.gateway.openai.types import ModelRequest
from headrace.gateway.services import Services
from headrace.gateway.text.models import Model
from headrace.protos.status import Reason, StatusError


def endpoints(services: Services) -> Sequence[Endpoint]:
    """POST rerank."""

    def refusing(ability: str) -> Handler:
        async def refuse(exchange: Exchange) -> None:
            request = decode_body(await exchange.body(), ModelRequest)
            model = await services.models.find(request.model or "")
            message = f"the model '{model.name}' offers {_abilities(model)}, not {ability}"
            raise StatusError(Reason.NOT_FOUND, message, field="model")

        return refuse

    return [
        *at_api("POST", "/rerank", "rerank", refusing("rerank")),
    ]


def _abilities(model: Model) -> str:
    if model.card.task:
        return "embeddings"
    return "completions" if model.text.template is None else "chat/completions and completions"
