"""Connects the host's models to gRPC: its own service, and the calls to its router."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

from headrace.cli.errors import CommandError
from headrace.cli.hosting.fleet import HostFleet
from headrace.cli.hosting.planner import State
from headrace.cli.hosting.service import start_service
from headrace.cli.serving.configured import ConfiguredModels, Reloaded
from headrace.cli.serving.host import CannotLoadError, HostedModel, ModelHost, NoSuchModelError
from headrace.common.model_files.task import task_of
from headrace.common.transport.channels import Transport
from headrace.protos import host_pb2
from headrace.protos.status import Reason, StatusError

_MAX_NAME_CHARS = 200
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
    server = await start_service(_Calls(host, configured), address, transport)
    host.fleet = fleet
    host.wake()
    try:
        yield
    finally:
        host.fleet = None
        await server.stop(0.0)
        await fleet.close()


class _Calls:
    """The host with the interface of its service."""

    def __init__(self, host: ModelHost, configured: ConfiguredModels | None) -> None:
        self._host = host
        self._configured = configured

    async def changes(self) -> AsyncIterator[host_pb2.WatchModelsResponse]:
        """All models and aliases, now and after each change."""
        host = self._host
        async for models in host.changes():
            yield host_pb2.WatchModelsResponse(
                models=[message_of(model) for _, model in sorted(models.items())],
                aliases=[f"{alias}={value}" for alias, value in sorted(host.aliases.items())],
                shadows=[f"{alias}={value}" for alias, value in sorted(host.shadows.items())],
            )

    def set_alias(self, request: host_pb2.SetAliasRequest) -> None:
        """Add, change or remove another name of models. Raises StatusError."""
        try:
            self._host.set_alias(request.alias, request.models, request.shadow)
        except ValueError as error:
            raise StatusError(Reason.INVALID_FIELD, str(error), field="alias") from None

    async def reload(self) -> host_pb2.ReloadConfigurationResponse:
        """Read the configuration again, and return when the models are those that it names. Without a configuration,
        there is nothing to change. Raises StatusError."""
        done = Reloaded(has_changed=False)
        if self._configured is not None:
            try:
                done = await self._configured.reload()
            except CommandError as error:
                raise StatusError(Reason.INVALID_FIELD, error.message, field="config") from None
        models = [message_of(model) for _, model in sorted(self._host.models.items())]
        return host_pb2.ReloadConfigurationResponse(has_changed=done.has_changed, problems=done.problems, models=models)

    async def load(self, request: host_pb2.LoadModelRequest) -> host_pb2.HostedModel:
        """Load a model, and return when it accepts requests. Raises StatusError."""
        try:
            if request.model and request.name not in self._host.models:
                await self._add(request.name, request.model)
            return message_of(await self._host.load(request.name, by_operator=request.by_operator))
        except NoSuchModelError:
            raise no_such_model(request.name, self._host) from None
        except CannotLoadError as error:
            problem = f"model {request.name!r} cannot be loaded: {error}"
            raise StatusError(Reason.MODEL_NOT_LOADED, problem, retry_after_s=error.retry_after_s) from None

    async def _add(self, name: str, model: str) -> None:
        """Add a model to the host. Raises StatusError if there is no such model, or if it does not fit."""
        if not name or len(name) > _MAX_NAME_CHARS:
            raise StatusError(Reason.INVALID_FIELD, f"name must have 1 to {_MAX_NAME_CHARS} characters", field="name")
        try:
            await self._host.add_named(name, model)
        except CommandError as error:
            raise StatusError(Reason.INVALID_FIELD, f"model: {error.message}", field="model") from None

    async def unload(self, name: str) -> host_pb2.HostedModel:
        """Unload a model, and return when its memory is free. Raises StatusError."""
        try:
            return message_of(await self._host.unload(name))
        except NoSuchModelError:
            raise no_such_model(name, self._host) from None


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
