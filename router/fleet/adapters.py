"""The LoRA adapters of a fleet: which workers can serve a request's adapter, and loading them at all workers.

An adapter that callers load here is also loaded at workers that join later, or again after a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import grpc
import numpy as np

from headrace.protos import router_pb2, worker_pb2
from headrace.protos.model_identity import model_identity
from headrace.protos.status import Reason, StatusError, error_of
from headrace.router.fleet.links import LinkState, WorkerLink
from headrace.router.fleet.pools import Members
from headrace.router.fleet.routed_request import RoutedRequest
from headrace.router.placement.candidates import Values

log = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 120.0
_RETRY_S = 1.0
# What reading an adapter into memory is assumed to take: a fixed part, and its bytes at this rate.
_LOAD_MS = 20.0
_BYTES_PER_MS = 250_000.0


def _choose(request: RoutedRequest, card: worker_pb2.ModelCard, links: Iterable[WorkerLink]) -> None:
    """Decide which files the request's adapter name means: those that the begun answer has, else the newest that a
    worker of the model knows. StatusError (MODEL_NOT_FOUND) if no worker that was reached knows the name."""
    of_model = [link for link in links if link.card is not None and link.card.name == card.name]
    known = [adapter for link in of_model if (adapter := link.adapters.find(request.adapter)) is not None]
    if request.model_identity:
        known = [adapter for adapter in known if model_identity(card, adapter.sha256) == request.model_identity]
    if known:
        request.adapter_sha256 = max(known, key=lambda adapter: (adapter.created_s, adapter.sha256)).sha256
    elif not request.model_identity and any(link.is_ready for link in of_model):
        names = sorted({adapter.name for link in of_model for adapter in link.adapters.all()})[:20]
        raise StatusError(
            Reason.MODEL_NOT_FOUND,
            f"model {card.name!r} has no adapter {request.adapter[:100]!r}; there is {', '.join(names) or 'none'}",
            field="adapter",
        )


def members_with(request: RoutedRequest, members: Members) -> Members:
    """The workers that know the request's adapter; all of them if it has none. StatusError (NO_CAPACITY) if others take
    requests, but these do not, and no answer has begun."""
    if not request.adapter:
        return members
    found = members.where(
        lambda link, _: bool(request.adapter_sha256) and link.adapters.sha256(request.adapter) == request.adapter_sha256
    )
    if members and not found and not request.model_identity:
        problem = f"no worker with adapter {request.adapter[:100]!r} takes requests; try again in a moment"
        raise StatusError(Reason.NO_CAPACITY, problem, retry_after_s=_RETRY_S)
    return found


def adapter_ms(request: RoutedRequest, members: Members) -> Values | None:
    """What reading the request's adapter into memory is expected to take at each worker; None without an adapter."""
    if not request.adapter:
        return None
    adapters = [link.adapters.find(request.adapter) for link, _ in members.links]
    return np.array(
        [0.0 if each is None or each.is_in_memory else _LOAD_MS + each.num_bytes / _BYTES_PER_MS for each in adapters]
    )


def served_adapters(links: Iterable[WorkerLink]) -> list[router_pb2.ServedAdapter]:
    """The adapters of live workers, by name."""
    found: dict[str, router_pb2.ServedAdapter] = {}
    for link in links:
        if link.card is None or link.state is LinkState.UNREACHABLE:
            continue
        for adapter in link.adapters.all():
            served = found.get(adapter.name)
            if served is None:
                served = found[adapter.name] = router_pb2.ServedAdapter(model=link.card.name, adapter=adapter)
            served.num_workers += 1
            served.num_in_memory += adapter.is_in_memory
            served.adapter.is_in_memory |= adapter.is_in_memory
    return [served for _, served in sorted(found.items())]


class _Wanted(NamedTuple):
    model: str
    path: str


class FleetAdapters:
    """Chooses the files that adapters' names mean, and loads and unloads adapters at all workers. `links` gives the
    links of all members, `resolve` the card of a model's name."""

    def __init__(
        self,
        links: Callable[[], Sequence[WorkerLink]],
        resolve: Callable[[str], worker_pb2.ModelCard | None],
    ) -> None:
        self._links = links
        self._resolve = resolve
        self._wanted: dict[str, _Wanted] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def choose(self, request: RoutedRequest, card: worker_pb2.ModelCard) -> None:
        """Choose the files of the request's adapter, if it has one and they are not chosen yet. StatusError
        (MODEL_NOT_FOUND)."""
        if request.adapter and not request.adapter_sha256:
            _choose(request, card, self._links())

    async def load(self, message: router_pb2.RouterLoadAdapterRequest) -> router_pb2.ServedAdapter:
        """Load an adapter at all workers of a model that can be reached. Raises StatusError, the first one's."""
        card = self._resolve(message.model)
        model = message.model if card is None else card.name
        links = [link for link in self._reachable() if link.card is not None and link.card.name == model]
        if not links:
            raise StatusError(Reason.NO_CAPACITY, f"no worker of {model!r} can be reached", retry_after_s=_RETRY_S)
        if any(link.card is not None and link.card.name == message.name for link in self._links()):
            problem = f"lora_name must not be {message.name!r}, which is the name of a model"
            raise StatusError(Reason.INVALID_FIELD, problem, field="lora_name")
        request = worker_pb2.LoadAdapterRequest(name=message.name, path=message.path, in_place=message.in_place)
        answers = [await _asked(link, link.load_adapter(request, timeout=_LOAD_TIMEOUT_S)) for link in links]
        self._wanted[message.name] = _Wanted(model, message.path)
        return router_pb2.ServedAdapter(
            model=model,
            adapter=answers[0].adapter,
            num_workers=len(answers),
            num_in_memory=sum(answer.adapter.is_in_memory for answer in answers),
        )

    async def unload(self, name: str) -> None:
        """Unload an adapter at all workers that can be reached. StatusError; MODEL_NOT_FOUND if none knows it."""
        was_wanted = self._wanted.pop(name, None) is not None
        links = [link for link in self._reachable() if link.adapters.find(name) is not None]
        for link in links:
            request = worker_pb2.UnloadAdapterRequest(name=name)
            try:
                await _asked(link, link.unload_adapter(request, timeout=_LOAD_TIMEOUT_S))
            except StatusError as error:
                if error.reason is not Reason.MODEL_NOT_FOUND:
                    raise
        if not links and not was_wanted:
            raise StatusError(Reason.MODEL_NOT_FOUND, f"no worker has an adapter {name[:100]!r}", field="lora_name")

    def joined(self, link: WorkerLink) -> None:
        """A worker takes requests now: load what it lacks of the adapters that were loaded here."""
        for name, wanted in self._wanted.items():
            if link.card is not None and link.card.name == wanted.model and link.adapters.find(name) is None:
                task = asyncio.create_task(self._bring(link, name, wanted.path))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _bring(self, link: WorkerLink, name: str, path: str) -> None:
        request = worker_pb2.LoadAdapterRequest(name=name, path=path)
        try:
            await _asked(link, link.load_adapter(request, timeout=_LOAD_TIMEOUT_S))
        except StatusError as error:
            log.warning("adapter %s could not be loaded again: %s", name, error.message)

    def _reachable(self) -> list[WorkerLink]:
        return [link for link in self._links() if link.state is not LinkState.UNREACHABLE]


async def _asked(link: WorkerLink, call: grpc.aio.UnaryUnaryCall) -> worker_pb2.LoadAdapterResponse:  # type: ignore[type-arg]
    """The answer of a worker. Raises StatusError, which names the worker."""
    try:
        answer: worker_pb2.LoadAdapterResponse = await call
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED and "Method not found" in (error.details() or ""):
            raise StatusError(Reason.UNSUPPORTED, f"worker {link.worker_id} is too old for adapters") from None
        found = error_of(error)
        raise StatusError(found.reason, f"worker {link.worker_id}: {found.message}", field=found.field) from None
    return answer
