"""What other servers offer and no model here does: a 404 that says what the model is good for instead."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.endpoint import Endpoint, Handler, Services, at_api
from headrace.gateway.exchange import Exchange
from headrace.gateway.models import Model
from headrace.gateway.openai_types import ModelRequest, decode_body
from headrace.protos.status import Reason, StatusError


def endpoints(services: Services) -> Sequence[Endpoint]:
    """POST embeddings and rerank."""

    def refusing(ability: str) -> Handler:
        async def refuse(exchange: Exchange) -> None:
            request = decode_body(await exchange.body(), ModelRequest)
            model = await services.models.find(request.model or "")
            message = f"the model '{model.name}' offers {_abilities(model)}, not {ability}"
            raise StatusError(Reason.NOT_FOUND, message, field="model")

        return refuse

    return [
        *at_api("POST", "/embeddings", "embeddings", refusing("embeddings")),
        *at_api("POST", "/rerank", "rerank", refusing("rerank")),
    ]


def _abilities(model: Model) -> str:
    return "completions" if model.text.template is None else "chat/completions and completions"
