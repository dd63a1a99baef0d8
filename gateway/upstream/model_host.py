"""The gateway's client of `headrace serve`, which loads and unloads the models of its host.

Each call has its own channel. Calls are rare, and a new channel uses the certificates of that moment.

Without a host, as in fleets whose workers are started one by one, the models are those that the routers list.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from headrace.common.aliases import Aliases, parse_aliases
from headrace.common.observers import Observers
from headrace.common.tasks import end_tasks
from headrace.common.transport.channels import PLAIN, Transport
from headrace.protos.host_pb2 import (
    HOSTED_MODEL_STATE_FAILED,
    HOSTED_MODEL_STATE_UNLOADED,
    HostedModel,
    LoadModelRequest,
    ReloadConfigurationRequest,
    ReloadConfigurationResponse,
    RemoveModelRequest,
    SetAliasRequest,
    UnloadModelRequest,
    WatchModelsRequest,
    WatchModelsResponse,
)
from headrace.protos.host_pb2_grpc import ModelHostStub
from headrace.protos.status import Reason, StatusError, error_of, is_peer_lost

_RETRY_S = 0.5
# How often to check whether running requests still need a model that is loaded for them.
_IN_USE_POLL_S = 0.5
# How long to wait until the host tells of an alias that it has taken.
_ALIAS_S = 5.0
_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Loading:
    """A call that loads a model, and the number of callers that wait for it."""

    task: asyncio.Task[None]
    num_callers: int = 0


class ModelHost:
    """The models of a host, kept up to date by `run`. Used in one event loop."""

    def __init__(
        self,
        address: str | None = None,
        transport: Transport = PLAIN,
        *,
        in_use: Collection[str] = (),
        is_awaited: bool = False,
    ) -> None:
        """Without an address, there are no models. `in_use` has, at any time, the names of models that running requests
        need. If the host is awaited, requests wait until its models are known, because it has rules for them."""
        self._address = address
        self._transport = transport
        self._loading: dict[str, _Loading] = {}
        self._again: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._gone: set[str] = set()
        """The models that the host has had."""
        self.models: dict[str, HostedModel] = {}
        """The latest models by name. They stay while the host does not answer."""
        self.is_known = address is None
        """Whether the models are known."""
        self.aliases: Aliases | None = None
        """The host's aliases; None while they are not known."""
        self.changes: Observers[Mapping[str, HostedModel]] = Observers()
        """Told of `models` when it has changed."""
        self._told = asyncio.Event()
        self._in_use = in_use
        self.is_missing = is_awaited and not self.is_known
        """Whether requests have to wait for the host."""

    async def run(self) -> None:
        """Follow the host's models until cancelled."""
        while self._address is not None:
            try:
                async with self._host() as host:
                    async for answer in host.WatchModels(WatchModelsRequest()):
                        self._note(answer.models)
                        self.is_known = True
                        self.is_missing = False
                        self._take_aliases(answer)
                        told, self._told = self._told, asyncio.Event()
                        told.set()
                        self.changes.tell(self.models)
                        self._load_again()
            except grpc.aio.AioRpcError as error:
                _LOG.debug("the models of the host are unknown: %s", error.details())
            await asyncio.sleep(_RETRY_S)
        await asyncio.Event().wait()

    def _note(self, models: Iterable[HostedModel]) -> None:
        before, self.models = self.models, {model.name: model for model in models}
        self._gone = (self._gone | before.keys()) - self.models.keys()

    @asynccontextmanager
    async def _host(self) -> AsyncIterator[Any]:
        """Context manager: the host, for one call."""
        assert self._address is not None, "there is no host"
        async with self._transport.channel(self._address) as channel:
            yield ModelHostStub(channel)

    def _take_aliases(self, answer: WatchModelsResponse) -> None:
        try:
            self.aliases = parse_aliases(answer.aliases, answer.shadows)
        except ValueError as error:  # of a host of another version
            _LOG.warning("the aliases of the host cannot be used: %s", error)

    def _load_again(self) -> None:
        """Load models that running requests need. A request may have been placed when its model was about to be
        unloaded."""
        for name in list(self._in_use):
            model = self.models.get(name)
            if model is not None and model.state == HOSTED_MODEL_STATE_UNLOADED and name not in self._again:
                task = self._again[name] = asyncio.create_task(self._load_while_in_use(name))
                task.add_done_callback(partial(self._forget_again, name))

    async def _load_while_in_use(self, name: str) -> None:
        loading = asyncio.create_task(self.load(name))
        try:
            while not loading.done() and name in self._in_use:
                await asyncio.wait([loading], timeout=_IN_USE_POLL_S)
        finally:
            await end_tasks(loading)

    def _forget_again(self, name: str, _: asyncio.Task[None]) -> None:
        del self._again[name]

    def problem_of(self, name: str) -> StatusError | None:
        """The reason why a running request can never get a worker of this model; None if it may get one."""
        model = self.models.get(name)
        if model is None:
            gone = StatusError(
                Reason.MODEL_NOT_FOUND, f"model {name!r} was removed while the request ran", field="model"
            )
            return gone if name in self._gone else None
        if model.state == HOSTED_MODEL_STATE_UNLOADED and not model.is_on_demand:
            return StatusError(
                Reason.MODEL_NOT_LOADED, f"model {name!r} cannot be loaded: its operator has unloaded it"
            )
        if model.state == HOSTED_MODEL_STATE_FAILED:
            return StatusError(Reason.MODEL_NOT_LOADED, f"model {name!r} cannot be loaded: {model.problem}")
        return None

    @property
    def has_address(self) -> bool:
        """Whether there is a host."""
        return self._address is not None

    async def latest(self, name: str) -> HostedModel | None:
        """The current state of a model, including its last use, which `models` has only as of the last change. None if
        the host does not have the model. Raises `StatusError`."""
        self.check_address()
        try:
            async with self._host() as host:
                async for answer in host.WatchModels(WatchModelsRequest()):
                    return next((model for model in answer.models if model.name == name), None)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None
        return None

    async def unload(self, name: str) -> HostedModel:
        """Unload a model, and return when its memory is free. Raises `StatusError`."""
        answer = await self._call("UnloadModel", UnloadModelRequest(name=name))
        return cast("HostedModel", answer.model)

    async def load_by_operator(self, name: str, model: str) -> HostedModel:
        """Load a model at an operator's request. `model` is its location, if the host may not know it. Raises
        `StatusError`."""
        return await self._loaded(LoadModelRequest(name=name, model=model, by_operator=True))

    async def create(self, name: str, gguf: str) -> HostedModel:
        """Make and load a model for a client, of a GGUF file. If it cannot be loaded, the host does not keep it. Raises
        `StatusError`."""
        return await self._loaded(LoadModelRequest(name=name, model=gguf, by_operator=True, is_created=True))

    async def _loaded(self, request: LoadModelRequest) -> HostedModel:
        answer = await self._call("LoadModel", request)
        self.models = {**self.models, request.name: answer.model}
        self.changes.tell(self.models)
        return cast("HostedModel", answer.model)

    async def remove(self, name: str) -> None:
        """Unload a model that a client has created, once its requests have ended, and remove its files. Raises
        `StatusError`."""
        await self._call("RemoveModel", RemoveModelRequest(name=name))
        self._note(model for model in self.models.values() if model.name != name)
        self.changes.tell(self.models)

    async def set_alias(self, alias: str, models: str) -> None:
        """Add or change another name of a model for a client, or remove one that a client has added if `models` is
        empty. Returns when this gateway knows it. Raises `StatusError`."""
        await self._call("SetAlias", SetAliasRequest(alias=alias, models=models, by_client=True))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ALIAS_S):
                while dict((self.aliases or Aliases()).items()).get(alias, "") != models:
                    await self._told.wait()

    async def reload(self) -> ReloadConfigurationResponse:
        """Let the host read its configuration again, and return when it has the models. Raises `StatusError`."""
        answer = cast(
            "ReloadConfigurationResponse", await self._call("ReloadConfiguration", ReloadConfigurationRequest())
        )
        self._note(answer.models)
        self.changes.tell(self.models)
        return answer

    def check_address(self) -> None:
        """Raise `StatusError` if there is no host."""
        if self._address is None:
            problem = "this gateway has no host that loads models: start it with `headrace serve`, or with --model-host"
            raise StatusError(Reason.UNSUPPORTED, problem)

    async def _call(self, method: str, request: Message) -> Any:
        self.check_address()
        try:
            async with self._host() as host:
                return await getattr(host, method)(request)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None

    async def close(self) -> None:
        """End all calls that load models."""
        loads = [loading.task for loading in self._loading.values()]
        await end_tasks(*self._again.values(), *loads, *self._ending)

    async def load(self, name: str) -> None:
        """Load a model, and return when it accepts requests, or if the host does not answer. All requests for a model
        share one call, which is cancelled when the last of them is. Raises `StatusError` if the model cannot be
        loaded."""
        loading = self._loading.get(name)
        if loading is None or loading.task.done():
            loading = self._loading[name] = _Loading(asyncio.create_task(self._load(name)))
        loading.num_callers += 1
        try:
            await asyncio.shield(loading.task)
        finally:
            loading.num_callers -= 1
            if loading.num_callers == 0:
                self._end(name, loading)

    @asynccontextmanager
    async def using(self, models: Iterable[str]) -> AsyncIterator[None]:
        """Context manager: those of these models that the host loads on demand count as used."""

        async def use(name: str) -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async with self._host() as host:
                    await host.LoadModel(LoadModelRequest(name=name, keeps=True))

        names = {name for name in models if name in self.models and self.models[name].is_on_demand}
        calls = [asyncio.create_task(use(name)) for name in names]
        try:
            yield
        finally:
            await end_tasks(*calls)

    def _end(self, name: str, loading: _Loading) -> None:
        """End the call that loads a model, because no caller wants it any more. The host then makes no room for it."""
        if self._loading.get(name) is loading:
            del self._loading[name]
        if loading.task.cancel():
            self._ending.add(loading.task)
            loading.task.add_done_callback(self._ending.discard)

    async def _load(self, name: str) -> None:
        try:
            async with self._host() as host:
                answer = await host.LoadModel(LoadModelRequest(name=name))
        except grpc.aio.AioRpcError as error:
            if is_peer_lost(error):
                return
            raise error_of(error) from None
        self.models = {**self.models, name: answer.model}
        self.changes.tell(self.models)
