"""Connects the host's models to gRPC: the ModelHost service, for the gateway and for commands, and the calls to the
host's router and workers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, TypeAlias

import grpc

from headrace.cli.hosting.planner import State, WorkerView
from headrace.cli.serving.configured import ConfiguredModels, Reloaded
from headrace.cli.serving.host import CannotLoadError, HostedModel, ModelHost, NoSuchModelError, OperatorsOwnError
from headrace.common.commands import CommandError
from headrace.common.model_files.task import task_of
from headrace.common.transport.channels import SERVER_OPTIONS, Transport
from headrace.common.transport.introspection import add_introspection, set_serving
from headrace.protos import host_pb2, host_pb2_grpc, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from headrace.protos.status import Reason, StatusError, abort

SERVICE = "headrace.v1.ModelHost"
_MAX_CALLS = 8192
_TIMEOUT_S = 2.0
_LONGEST_DRAIN_S = 24 * 3600.0
_MAX_NAME_CHARS = 200
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_STATES = {
    State.UNLOADED: host_pb2.HOSTED_MODEL_STATE_UNLOADED,
    State.LOADING: host_pb2.HOSTED_MODEL_STATE_LOADING,
    State.LOADED: host_pb2.HOSTED_MODEL_STATE_LOADED,
    State.UNLOADING: host_pb2.HOSTED_MODEL_STATE_UNLOADING,
    State.FAILED: host_pb2.HOSTED_MODEL_STATE_FAILED,
}


@asynccontextmanager
async def answering(
    host: ModelHost,
    address: str,
    router_address: str,
    transport: Transport,
    configured: ConfiguredModels | None = None,
) -> AsyncIterator[None]:
    """Context manager: while it is open, ModelHost is served at `address`, and the host asks its router. `configured`
    are the models of a file that can be read again."""
    fleet = HostFleet(router_address, transport)
    server = await _started(ModelHostService(host, configured), address, transport)
    try:
        with host.asking(fleet):
            yield
    finally:
        await server.stop(0.0)
        await fleet.close()


class ModelHostService(host_pb2_grpc.ModelHostServicer):
    """Serves ModelHost. See host.proto for its methods."""

    def __init__(self, host: ModelHost, configured: ConfiguredModels | None) -> None:
        self._host = host
        self._configured = configured

    async def WatchModels(
        self, request: host_pb2.WatchModelsRequest, context: _Context
    ) -> AsyncIterator[host_pb2.WatchModelsResponse]:
        """All models and aliases, now and after each change."""
        host = self._host
        async for models in host.changes():
            yield host_pb2.WatchModelsResponse(
                models=[message_of(model) for _, model in sorted(models.items())],
                aliases=[f"{alias}={value}" for alias, value in sorted(host.aliases.items())],
                shadows=[f"{alias}={value}" for alias, value in sorted(host.shadows.items())],
            )

    async def LoadModel(self, request: host_pb2.LoadModelRequest, context: _Context) -> host_pb2.LoadModelResponse:
        """Load a model, and return when it accepts requests; or keep it loaded until the call is cancelled."""
        name = request.name
        try:
            if request.keeps:
                with self._host.using(name):
                    await asyncio.Event().wait()  # until the call is cancelled
            if request.is_created:
                await self._add(name, request.model, self._host.create)
            elif request.model and name not in self._host.models:
                await self._add(name, request.model, self._host.add_named)
            model = await self._host.load(name, by_operator=request.by_operator)
            return host_pb2.LoadModelResponse(model=message_of(model))
        except StatusError as error:
            await abort(context, error)
        except NoSuchModelError:
            await abort(context, no_such_model(name, self._host))
        except CannotLoadError as error:
            if request.is_created:
                with contextlib.suppress(NoSuchModelError, ValueError, OSError):
                    await self._host.remove_created(name)
            problem = f"model {name!r} cannot be loaded: {error}"
            await abort(context, StatusError(Reason.MODEL_NOT_LOADED, problem, retry_after_s=error.retry_after_s))

    async def _add(self, name: str, model: str, add: Callable[[str, str], Awaitable[None]]) -> None:
        """Add a model to the host. Raises StatusError if there is no such model, or if it does not fit."""
        if not name or len(name) > _MAX_NAME_CHARS:
            raise StatusError(Reason.INVALID_FIELD, f"name must have 1 to {_MAX_NAME_CHARS} characters", field="name")
        try:
            await add(name, model)
        except CommandError as error:
            raise StatusError(Reason.INVALID_FIELD, f"model: {error.message}", field="model") from None

    async def UnloadModel(
        self, request: host_pb2.UnloadModelRequest, context: _Context
    ) -> host_pb2.UnloadModelResponse:
        """Unload a model, and return when its memory is free."""
        try:
            return host_pb2.UnloadModelResponse(model=message_of(await self._host.unload(request.name)))
        except NoSuchModelError:
            await abort(context, no_such_model(request.name, self._host))

    async def RemoveModel(
        self, request: host_pb2.RemoveModelRequest, context: _Context
    ) -> host_pb2.RemoveModelResponse:
        """Remove a model that a client has created, and return when its files are gone."""
        name = request.name
        try:
            await self._host.remove_created(name)
        except NoSuchModelError:
            await abort(context, no_such_model(name, self._host))
        except OperatorsOwnError as error:
            await abort(
                context, StatusError(Reason.PERMISSION_DENIED, f"{error} (headrace models unload)", field="name")
            )
        except ValueError as error:
            await abort(context, StatusError(Reason.INVALID_FIELD, str(error), field="name"))
        except OSError as error:
            problem = f"the model is unloaded, but its files cannot be removed: {error.strerror}"
            await abort(context, StatusError(Reason.INTERNAL, problem))
        return host_pb2.RemoveModelResponse()

    async def SetAlias(self, request: host_pb2.SetAliasRequest, context: _Context) -> host_pb2.SetAliasResponse:
        """Add, change or remove another name of models."""
        try:
            self._host.set_alias(request.alias, request.models, request.shadow, by_client=request.by_client)
        except OperatorsOwnError as error:
            await abort(
                context, StatusError(Reason.PERMISSION_DENIED, f"{error} (headrace models alias)", field="alias")
            )
        except ValueError as error:
            await abort(context, StatusError(Reason.INVALID_FIELD, str(error), field="alias"))
        return host_pb2.SetAliasResponse()

    async def ReloadConfiguration(
        self, request: host_pb2.ReloadConfigurationRequest, context: _Context
    ) -> host_pb2.ReloadConfigurationResponse:
        """Read the configuration again, and return when the models are those that it names. Without a configuration,
        there is nothing to change."""
        done = Reloaded(has_changed=False)
        if self._configured is not None:
            try:
                done = await self._configured.reload()
            except CommandError as error:
                await abort(context, StatusError(Reason.INVALID_FIELD, error.message, field="config"))
        models = [message_of(model) for _, model in sorted(self._host.models.items())]
        return host_pb2.ReloadConfigurationResponse(has_changed=done.has_changed, problems=done.problems, models=models)


async def _started(service: ModelHostService, address: str, transport: Transport) -> grpc.aio.Server:
    """Serve at a gRPC target. The caller stops the server."""
    server = grpc.aio.server(
        interceptors=transport.interceptors(), options=SERVER_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS
    )
    host_pb2_grpc.add_ModelHostServicer_to_server(service, server)
    health = add_introspection(server, [SERVICE])
    transport.bind(server, address)
    await server.start()
    await set_serving(health, [SERVICE], True)
    return server


def no_such_model(name: str, host: ModelHost) -> StatusError:
    """The error for a name that the host does not know."""
    known = ", ".join(sorted(host.models))
    return StatusError(Reason.MODEL_NOT_FOUND, f"this host has no model {name!r}; there is {known}", field="name")


def message_of(model: HostedModel) -> host_pb2.HostedModel:
    """A model as a message."""
    return host_pb2.HostedModel(
        name=model.name,
        state=_STATES[model.state],
        problem=model.problem,
        directory=str(model.plan.directory),
        num_workers=len(model.plan.places),
        task=task_of(model.plan.directory),
        is_on_demand=not model.plan.is_pinned,
        num_bytes=model.num_bytes,
        idle_ms=round(1000 * (model.plan.idle_s or 0.0)),
        adapters=[adapter.partition("=")[0] for adapter in model.plan.options.worker.get("adapters", ())],
        rules=host_pb2.ServingRules(**asdict(model.plan.rules)),
        is_created=model.created is not None,
        **_times(model),
    )


def _times(model: HostedModel) -> dict[str, int]:
    """When the model was loaded and last used, as Unix times."""
    if model.state is not State.LOADED:
        return {}
    offset_s = time.time() - time.monotonic()
    return {
        "loaded_ms": round(1000 * (model.loaded_s + offset_s)),
        "last_used_ms": round(1000 * (model.last_used_s + offset_s)),
    }


class HostFleet:
    """The router and the workers of this host. Made and used in one event loop."""

    def __init__(self, router_address: str, transport: Transport) -> None:
        self._router_address = router_address
        self._transport = transport
        self._connect()

    def _connect(self) -> None:
        self._version = self._transport.version
        self._channel = self._transport.channel(self._router_address)
        self._router = router_pb2_grpc.RouterStub(self._channel)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def workers(self) -> Mapping[str, WorkerView] | None:
        """The workers by name; None if the router does not answer. Do not call it again before it has returned."""
        if self._transport.version != self._version:  # the certificates are new
            await self._channel.close()
            self._connect()
        try:
            answer = await self._router.ListWorkers(router_pb2.ListWorkersRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
        return {info.worker_id: _view(info) for info in answer.workers}

    async def drain(self, addresses: Sequence[str]) -> None:
        """Let workers end their requests and take no new ones. Returns when they have ended, or when a worker is
        gone."""
        await asyncio.gather(*map(self._drain, addresses))

    async def _drain(self, address: str) -> None:
        async with self._transport.channel(address) as channel:
            try:
                await worker_pb2_grpc.WorkerStub(channel).Drain(worker_pb2.DrainRequest(), timeout=_LONGEST_DRAIN_S)
            except grpc.aio.AioRpcError:
                return  # the worker is gone, and so are its requests


def _view(info: router_pb2.WorkerInfo) -> WorkerView:
    load = info.load
    num_here = load.num_running + load.num_waiting + load.num_arrived + info.num_in_flight
    is_ready = info.state == router_pb2.WORKER_STATE_READY
    return WorkerView(is_ready, num_here > 0, load.counters.requests_admitted)
