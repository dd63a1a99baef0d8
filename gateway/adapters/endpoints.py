"""The endpoints for adapters and for the models of a host. They are for operators: each call needs the admin key."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.adapters.admin_key import AdminKey
from headrace.gateway.adapters.types import (
    AdapterInfo,
    AdapterInfos,
    LoadModelRequest,
    LoadRequest,
    ModelState,
    UnloadModelRequest,
    UnloadRequest,
)
from headrace.gateway.edge.endpoint import API, Endpoint, Handler, Operation, under
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import decode_body, encode
from headrace.gateway.services import Services
from headrace.protos.host_pb2 import HostedModel, HostedModelState
from headrace.protos.router_pb2 import RouterLoadAdapterRequest, ServedAdapter


def endpoints(services: Services, admin_key: AdminKey) -> Sequence[Endpoint]:
    """All endpoints. They need no API key, because none replaces the operators' key."""
    own = _Operating(services, admin_key)

    def for_operators(method: str, path: str, name: str, handler: Handler, operation: Operation) -> Endpoint:
        return Endpoint(method, path, name, handler, operation, is_open=True, makes_work=False)

    load = Operation("Load a LoRA adapter", requests=(LoadRequest,))
    unload = Operation("Unload a LoRA adapter", requests=(UnloadRequest,))
    listed = Operation("The LoRA adapters and where they are", AdapterInfos)
    load_model = Operation("Load a model of the host", ModelState, (LoadModelRequest,))
    unload_model = Operation("Unload a model of the host", ModelState, (UnloadModelRequest,))
    return under(
        API,
        for_operators("POST", "/load_lora_adapter", "adapters", own.load, load),
        for_operators("POST", "/unload_lora_adapter", "adapters", own.unload, unload),
        for_operators("GET", "/lora_adapters", "adapters", own.list, listed),
        for_operators("POST", "/load_model", "model_host", own.load_model, load_model),
        for_operators("POST", "/unload_model", "model_host", own.unload_model, unload_model),
    )


class _Operating:
    def __init__(self, services: Services, admin_key: AdminKey) -> None:
        self._services = services
        self._admin_key = admin_key

    async def load(self, exchange: Exchange) -> None:
        self._admin_key.check(exchange)
        request = decode_body(await exchange.body(), LoadRequest)
        message = RouterLoadAdapterRequest(
            name=request.lora_name,
            path=request.lora_path,
            in_place=request.load_inplace,
            model=request.base_model_name or "",
        )
        await self._services.upstream.load_adapter(message)
        await self._services.models.refresh()
        await _told(exchange, f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    async def unload(self, exchange: Exchange) -> None:
        self._admin_key.check(exchange)
        request = decode_body(await exchange.body(), UnloadRequest)
        await self._services.upstream.unload_adapter(request.lora_name)
        await self._services.models.forget(request.lora_name)
        await _told(exchange, f"Success: LoRA adapter '{request.lora_name}' removed successfully.")

    async def list(self, exchange: Exchange) -> None:
        self._admin_key.check(exchange)
        adapters = await self._services.upstream.list_adapters()
        await exchange.respond(encode(AdapterInfos(object="list", data=[_info(adapter) for adapter in adapters])))

    async def load_model(self, exchange: Exchange) -> None:
        self._admin_key.check(exchange)
        request = decode_body(await exchange.body(), LoadModelRequest)
        hosted = await self._services.host.load_by_operator(request.model, request.path or "")
        await self._services.models.refresh()
        await exchange.respond(encode(_state_of(hosted)))

    async def unload_model(self, exchange: Exchange) -> None:
        self._admin_key.check(exchange)
        request = decode_body(await exchange.body(), UnloadModelRequest)
        await exchange.respond(encode(_state_of(await self._services.host.unload(request.model))))


async def _told(exchange: Exchange, text: str) -> None:
    await exchange.respond(text.encode(), content_type=b"text/plain; charset=utf-8")


def _info(served: ServedAdapter) -> AdapterInfo:
    adapter = served.adapter
    return AdapterInfo(
        id=adapter.name,
        parent=served.model,
        path=adapter.path,
        sha256=adapter.sha256,
        rank=adapter.rank,
        bytes=adapter.num_bytes,
        created=adapter.created_s,
        workers=served.num_workers,
        in_memory=served.num_in_memory,
    )


def _state_of(model: HostedModel) -> ModelState:
    state = HostedModelState.Name(model.state).removeprefix("HOSTED_MODEL_STATE_").lower()
    return ModelState(id=model.name, state=state)
