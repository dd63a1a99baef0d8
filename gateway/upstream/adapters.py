"""Adapters of routers and workers: lists them as models for clients, and loads and unloads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256

from headrace.gateway.upstream.address import Address
from headrace.protos.router_pb2 import (
    ListModelsRequest,
    RouterLoadAdapterRequest,
    RouterUnloadAdapterRequest,
    ServedAdapter,
)
from headrace.protos.worker_pb2 import (
    GetModelCardRequest,
    GetModelCardResponse,
    LoadAdapterRequest,
    ModelCard,
    UnloadAdapterRequest,
)

_LIST_TIMEOUT_S = 5.0
_LOAD_TIMEOUT_S = 150.0


def adapter_cards(models: Iterable[ModelCard], adapters: Iterable[ServedAdapter]) -> list[ModelCard]:
    """A card for each adapter of these models: that of its model, with its own name, fingerprint and time."""
    of_model = {card.name: card for card in models}
    found = []
    for served in adapters:
        if served.model not in of_model or served.adapter.name in of_model:
            continue
        card = ModelCard()
        card.CopyFrom(of_model[served.model])
        card.parent = card.name
        card.name = served.adapter.name
        card.fingerprint = sha256(f"{card.fingerprint}\n{served.adapter.sha256}".encode()).hexdigest()
        card.created_s = served.adapter.created_s
        found.append(card)
    return found


def served_by_worker(answer: GetModelCardResponse) -> Sequence[ServedAdapter]:
    """The adapters of a single worker."""
    return [
        ServedAdapter(model=answer.card.name, adapter=adapter, num_workers=1, num_in_memory=int(adapter.is_in_memory))
        for adapter in answer.adapters.adapters
    ]


async def list_adapters(endpoint: Address) -> list[ServedAdapter]:
    """The adapters that a router, or a worker, knows. Raises grpc.aio.AioRpcError, as the functions below."""

    async def by_router() -> list[ServedAdapter]:
        answer = await endpoint.router.ListModels(ListModelsRequest(), timeout=_LIST_TIMEOUT_S)
        return list(answer.adapters)

    async def by_worker() -> list[ServedAdapter]:
        card = await endpoint.worker.GetModelCard(GetModelCardRequest(), timeout=_LIST_TIMEOUT_S)
        return list(served_by_worker(card))

    return await endpoint.call(by_router, by_worker)


async def load_adapter(endpoint: Address, request: RouterLoadAdapterRequest) -> None:
    """Load an adapter through a router, or at a worker."""
    direct = LoadAdapterRequest(name=request.name, path=request.path, in_place=request.in_place)
    await endpoint.call(
        lambda: endpoint.router.LoadAdapter(request, timeout=_LOAD_TIMEOUT_S),
        lambda: endpoint.worker.LoadAdapter(direct, timeout=_LOAD_TIMEOUT_S),
        may_be_unsupported=True,
    )


async def unload_adapter(endpoint: Address, name: str) -> None:
    """Unload an adapter through a router, or at a worker."""
    await endpoint.call(
        lambda: endpoint.router.UnloadAdapter(RouterUnloadAdapterRequest(name=name), timeout=_LOAD_TIMEOUT_S),
        lambda: endpoint.worker.UnloadAdapter(UnloadAdapterRequest(name=name), timeout=_LOAD_TIMEOUT_S),
        may_be_unsupported=True,
    )
