"""A host of models that a test directs, as `headrace serve` is one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from headrace.common.transport.channels import PLAIN, Transport
from headrace.protos import host_pb2, host_pb2_grpc
from headrace.protos.status import Reason, StatusError, abort


class FakeHost(host_pb2_grpc.ModelHostServicer):
    """Tells the models that a test sets. Loading succeeds when the test sets their state."""

    def __init__(self) -> None:
        self.address = ""
        self.models: dict[str, host_pb2.HostedModel] = {}
        self.loads: list[str] = []
        self.kept: set[str] = set()
        """The models that a gateway keeps loaded now, because it loads their tokenizers."""
        self.wanted: Counter[str] = Counter()
        """The calls that wait for a model now."""
        self.aliases: list[str] = []
        self.shadows: list[str] = []
        self.operators: list[tuple[str, str]] = []
        self.removed: list[str] = []
        """The created models that were removed."""
        self.operators_aliases: set[str] = set()
        """Those that clients may not remove."""
        self.reloaded: host_pb2.ReloadConfigurationResponse | StatusError = host_pb2.ReloadConfigurationResponse()
        """The answer to a reload."""
        self.add: Callable[[str, str], None] = lambda name, model: None
        """Called for each load of a model that it does not have, with its location. May raise `StatusError`."""
        self.is_silent = False
        """Whether watchers are told nothing."""
        self._changed = asyncio.Event()

    def set(self, name: str, state: str, **fields: Any) -> None:
        """Set a model's state."""
        value = host_pb2.HostedModelState.Value(f"HOSTED_MODEL_STATE_{state}")
        self.models[name] = host_pb2.HostedModel(name=name, state=value, **fields)
        self.tell()

    def tell(self) -> None:
        """Let watchers see what was set."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def WatchModels(self, request: Any, context: Any) -> AsyncIterator[Any]:
        while True:
            changed = self._changed
            if self.is_silent:
                await changed.wait()
                continue
            yield host_pb2.WatchModelsResponse(models=self.models.values(), aliases=self.aliases, shadows=self.shadows)
            await changed.wait()

    async def ReloadConfiguration(self, request: Any, context: Any) -> Any:
        if isinstance(self.reloaded, StatusError):
            await abort(context, self.reloaded)
        answer = host_pb2.ReloadConfigurationResponse(models=self.models.values())
        answer.MergeFrom(self.reloaded)
        return answer

    async def LoadModel(self, request: Any, context: Any) -> Any:
        if request.keeps:
            self.kept.add(request.name)
            try:
                await asyncio.Event().wait()
            finally:
                self.kept.remove(request.name)
        self.loads.append(request.name)
        if request.by_operator:
            self.operators.append((request.name, request.model))
        self.wanted[request.name] += 1
        try:
            if request.model and request.name not in self.models:
                self.add(request.name, request.model)
                if request.is_created:
                    self.models[request.name].is_created = True
                    self.tell()
            return await self._loaded(request, context)
        except StatusError as error:
            await abort(context, error)
        finally:
            self.wanted[request.name] -= 1

    async def _loaded(self, request: Any, context: Any) -> Any:
        while True:
            changed = self._changed
            model = self.models.get(request.name)
            if model is None:
                problem = f"this host has no model {request.name!r}"
                await abort(context, StatusError(Reason.MODEL_NOT_FOUND, problem, field="name"))
            if model.state == host_pb2.HOSTED_MODEL_STATE_LOADED:
                return host_pb2.LoadModelResponse(model=model)
            if model.state == host_pb2.HOSTED_MODEL_STATE_FAILED:
                problem = f"model {model.name!r} cannot be loaded: {model.problem}"
                await abort(context, StatusError(Reason.MODEL_NOT_LOADED, problem))
            await changed.wait()

    async def RemoveModel(self, request: Any, context: Any) -> Any:
        name = request.name
        if not self.models[name].is_created:
            await abort(context, StatusError(Reason.PERMISSION_DENIED, f"{name!r} is the operator's", field="name"))
        if any(one.endswith(f"={name}") for one in self.aliases):
            await abort(context, StatusError(Reason.INVALID_FIELD, f"{name!r} has other names", field="name"))
        self.removed.append(name)
        del self.models[name]
        self.tell()
        return host_pb2.RemoveModelResponse()

    async def SetAlias(self, request: Any, context: Any) -> Any:
        if request.by_client and request.alias in self.operators_aliases:
            problem = f"the name {request.alias!r} was given by an operator"
            await abort(context, StatusError(Reason.PERMISSION_DENIED, problem, field="alias"))
        if request.models and request.models not in self.models:
            problem = f"this host has no model {request.models!r}"
            await abort(context, StatusError(Reason.INVALID_FIELD, problem, field="alias"))
        self.aliases = [one for one in self.aliases if not one.startswith(f"{request.alias}=")]
        if request.models:
            self.aliases.append(f"{request.alias}={request.models}")
        self.tell()
        return host_pb2.SetAliasResponse()

    def alias(self, name: str, model: str) -> None:
        """Give a model another name, as a client of another gateway does."""
        self.aliases = [*self.aliases, f"{name}={model}"]
        self.tell()

    async def UnloadModel(self, request: Any, context: Any) -> Any:
        self.set(request.name, "UNLOADED")
        return host_pb2.UnloadModelResponse(model=self.models[request.name])


@asynccontextmanager
async def serving_host(port: int = 0, transport: Transport = PLAIN) -> AsyncIterator[FakeHost]:
    """The host on a port."""
    host, server = FakeHost(), grpc.aio.server()
    host_pb2_grpc.add_ModelHostServicer_to_server(host, server)
    host.address = f"127.0.0.1:{transport.bind(server, f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield host
    finally:
        await server.stop(None)
