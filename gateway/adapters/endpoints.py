"""The endpoints for adapters. They are for operators: each call needs the admin key."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.adapters.admin_key import AdminKey, for_operators
from headrace.gateway.adapters.types import AdapterInfo, AdapterInfos, LoadRequest, UnloadRequest
from headrace.gateway.edge.endpoint import Endpoint, Operation
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import decode_body, encode
from headrace.gateway.services import Services
from headrace.protos.router_pb2 import RouterLoadAdapterRequest, ServedAdapter


def endpoints(services: Services, admin_key: AdminKey) -> Sequence[Endpoint]:
    """POST load_lora_adapter and unload_lora_adapter, GET lora_adapters."""
    own = _Adapters(services, admin_key)
    load = Operation("Load a LoRA adapter", requests=(LoadRequest,))
    unload = Operation("Unload a LoRA adapter", requests=(UnloadRequest,))
    listed = Operation("The LoRA adapters and where they are", AdapterInfos)
    return for_operators(
        Endpoint("POST", "/load_lora_adapter", "adapters", own.load, load),
        Endpoint("POST", "/unload_lora_adapter", "adapters", own.unload, unload),
        Endpoint("GET", "/lora_adapters", "adapters", own.list, listed),
    )


class _Adapters:
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
