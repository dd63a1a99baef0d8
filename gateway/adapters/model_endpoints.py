"""The endpoints that load and unload models of a host. They are for operators: each call needs the admin key."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.adapters.admin_key import AdminKey, for_operators
from headrace.gateway.adapters.types import LoadModelRequest, ModelState, UnloadModelRequest
from headrace.gateway.edge.endpoint import Endpoint, Operation
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import decode_body, encode
from headrace.gateway.services import Services
from headrace.protos.host_pb2 import HostedModel, HostedModelState


def endpoints(services: Services, admin_key: AdminKey) -> Sequence[Endpoint]:
    """POST load_model and unload_model."""
    own = _Models(services, admin_key)
    load = Operation("Load a model of the host", ModelState, (LoadModelRequest,))
    unload = Operation("Unload a model of the host", ModelState, (UnloadModelRequest,))
    return for_operators(
        Endpoint("POST", "/load_model", "model_host", own.load, load),
        Endpoint("POST", "/unload_model", "model_host", own.unload, unload),
    )


class _Models:
    def __init__(self, services: Services, admin_key: AdminKey) -> None:
        self._services = services
        self._admin_key = admin_key

    async def load(self, exchange: Exchange) -> None:
        self._admin_key.check(exchange)
        request = decode_body(await exchange.body(), LoadModelRequest)
        hosted = await self._services.host.load_by_operator(request.model, request.path or "")
        await self._services.models.refresh()
        await exchange.respond(encode(_state_of(hosted)))

    async def unload(self, exchange: Exchange) -> None:
        self._admin_key.check(exchange)
        request = decode_body(await exchange.body(), UnloadModelRequest)
        await exchange.respond(encode(_state_of(await self._services.host.unload(request.model))))


def _state_of(model: HostedModel) -> ModelState:
    state = HostedModelState.Name(model.state).removeprefix("HOSTED_MODEL_STATE_").lower()
    return ModelState(id=model.name, state=state)
