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


class AdapterCards:
    """Cards of adapters as separate models. The list is polled, so cards are made only for changed adapters."""

    def __init__(self) -> None:
        self._models: dict[str, ModelCard] = {}
        self._cards: dict[str, tuple[str, int, ModelCard]] = {}
        """Name of an adapter -> the hash and the time that its card was made for, and the card."""

    def of(self, models: Iterable[ModelCard], adapters: Iterable[ServedAdapter]) -> list[ModelCard]:
        """A card for each adapter of these models: that of its model, with its own name, fingerprint and time. The
        caller must not change them."""
        of_model = {card.name: card for card in models}
        known = self._cards if of_model == self._models else {}
        found = {}
        for served in adapters:
            adapter = served.adapter
            parent = of_model.get(served.model)
            name = adapter.name
            if parent is None or name in of_model:
                continue
            digest, created_s, card = known.get(name, ("", 0, None))
            if card is None or (digest, created_s, card.parent) != (adapter.sha256, adapter.created_s, parent.name):
                digest = adapter.sha256
                created_s = adapter.created_s
                card = _card_of(parent, name, digest, created_s)
            found[name] = digest, created_s, card
        self._models = of_model
        self._cards = found
        return [card for _, _, card in found.values()]


def _card_of(parent: ModelCard, name: str, adapter_sha256: str, created_s: int) -> ModelCard:
    card = ModelCard()
    card.CopyFrom(parent)
    card.parent = parent.name
    card.name = name
    card.fingerprint = sha256(f"{parent.fingerprint}\n{adapter_sha256}".encode()).hexdigest()
    card.created_s = created_s
    return card


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
