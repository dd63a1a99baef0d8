"""The LoRA adapters of a fleet: finds the workers that can serve a request's adapter, and loads adapters everywhere.

An adapter that a caller loads through this router is also loaded at workers that join or restart later. Callers may
unload or replace it through another router. This router notices that from the reports of running workers.
"""

from __future__ import annotations

import asyncio
import logging
import time
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
from headrace.router.fleet.worker_adapters import WorkerAdapters
from headrace.router.placement.candidates import Values

log = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 120.0
# A worker's report follows its answer within milliseconds. Without it, requests find the adapter later.
_REPORT_TIMEOUT_S = 2.0
_LOOK_S = 0.005
_RETRY_S = 1.0
# The assumed time to read an adapter into memory: a fixed part, plus its bytes at this rate.
_LOAD_MS = 20.0
_BYTES_PER_MS = 250_000.0


def _choose(request: RoutedRequest, card: worker_pb2.ModelCard, links: Iterable[WorkerLink]) -> None:
    """Resolve the request's adapter name to files. An answer that has begun keeps its files; otherwise the newest files
    at any worker of the model are used. Raises StatusError (MODEL_NOT_FOUND) if no reachable worker knows the name."""
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
    """The workers that know the request's adapter, or all workers if it names none. Raises StatusError (NO_CAPACITY) if
    none of the workers that take requests knows it. Once the answer has begun, the result is empty instead."""
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
    """Expected milliseconds to read the request's adapter into memory, f64 `[members]`: 0 where it is there already.
    None without an adapter."""
    if not request.adapter:
        return None
    adapters = [link.adapters.find(request.adapter) for link, _ in members.links]
    return np.array(
        [0.0 if each is None or each.is_in_memory else _LOAD_MS + each.num_bytes / _BYTES_PER_MS for each in adapters]
    )


def served_adapters(links: Iterable[WorkerLink]) -> list[router_pb2.ServedAdapter]:
    """The adapters of live workers, sorted by name."""
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


class ServedList:
    """The adapters of live workers. The list is rebuilt only after a change, because gateways request it often."""

    def __init__(self) -> None:
        self._basis: list[tuple[str, WorkerAdapters, int]] = []
        self._served: list[router_pb2.ServedAdapter] = []

    def of(self, links: Sequence[WorkerLink]) -> Sequence[router_pb2.ServedAdapter]:
        """See `served_adapters`."""
        basis = [
            (link.card.name, link.adapters, link.adapters.num_changes)
            for link in links
            if link.card is not None and link.state is not LinkState.UNREACHABLE and link.adapters.num_changes
        ]
        if basis != self._basis:
            self._basis = basis
            self._served = served_adapters(links)
        return self._served


class _Wanted(NamedTuple):
    model: str
    path: str


class FleetAdapters:
    """Resolves adapter names to files, and loads and unloads adapters at all workers. `links` returns the links of all
    members, `resolve` the card for a model name."""

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
        """Choose the files of the request's adapter, unless it has none or they are already chosen. Raises StatusError
        (MODEL_NOT_FOUND)."""
        if request.adapter and not request.adapter_sha256:
            _choose(request, card, self._links())

    def changed(self, link: WorkerLink, name: str, adapter: worker_pb2.Adapter | None) -> None:
        """A running worker has unloaded or replaced an adapter. So workers that join later do not get the old one."""
        wanted = self._wanted.get(name)
        if wanted is None or link.card is None or link.card.name != wanted.model:
            return
        if adapter is None:
            del self._wanted[name]
        else:
            self._wanted[name] = _Wanted(wanted.model, adapter.path)

    async def load(self, message: router_pb2.RouterLoadAdapterRequest) -> router_pb2.ServedAdapter:
        """Load an adapter at all reachable workers of a model, so that requests can name it. Raises the first worker's
        StatusError."""
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
        for link, answer in zip(links, answers, strict=True):
            await _until_reported(link, answer.adapter)
        return router_pb2.ServedAdapter(
            model=model,
            adapter=answers[0].adapter,
            num_workers=len(answers),
            num_in_memory=sum(answer.adapter.is_in_memory for answer in answers),
        )

    async def unload(self, name: str) -> None:
        """Unload an adapter at all reachable workers. Raises StatusError (MODEL_NOT_FOUND) if no worker knows it."""
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

    @property
    def is_loading(self) -> bool:
        """Whether a worker that has joined is being given the adapters of the others."""
        return bool(self._tasks)

    def joined(self, link: WorkerLink) -> None:
        """Load the adapters that a worker lacks. Called when the worker begins to take requests."""
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


async def _until_reported(link: WorkerLink, adapter: worker_pb2.Adapter) -> None:
    """Wait until a report of the worker has the adapter that it has loaded, because requests are placed by reports."""
    until_s = time.monotonic() + _REPORT_TIMEOUT_S
    while link.state is not LinkState.UNREACHABLE and time.monotonic() < until_s:
        known = link.adapters.find(adapter.name)
        if known is not None and (known.path, known.sha256) == (adapter.path, adapter.sha256):
            return
        await asyncio.sleep(_LOOK_S)


async def _asked(link: WorkerLink, call: grpc.aio.UnaryUnaryCall) -> worker_pb2.LoadAdapterResponse:  # type: ignore[type-arg]
    """Wait for a worker's response. Raises a StatusError that names the worker."""
    try:
        answer: worker_pb2.LoadAdapterResponse = await call
    except grpc.aio.AioRpcError as error:
        found = error_of(error)
        raise StatusError(found.reason, f"worker {link.worker_id}: {found.message}", field=found.field) from None
    return answer
