"""Connects the host's models to gRPC: its own service, and the calls to its router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace.cli.hosting.fleet import HostFleet
from headrace.cli.hosting.planner import State
from headrace.cli.hosting.service import start_service
from headrace.cli.serving.host import CannotLoadError, HostedModel, ModelHost, NoSuchModelError
from headrace.common.model_files.task import task_of
from headrace.common.transport.channels import Transport
from headrace.protos import host_pb2
from headrace.protos.status import Reason, StatusError

_STATES = {
    State.UNLOADED: host_pb2.HOSTED_MODEL_STATE_UNLOADED,
    State.LOADING: host_pb2.HOSTED_MODEL_STATE_LOADING,
    State.LOADED: host_pb2.HOSTED_MODEL_STATE_LOADED,
    State.UNLOADING: host_pb2.HOSTED_MODEL_STATE_UNLOADING,
    State.FAILED: host_pb2.HOSTED_MODEL_STATE_FAILED,
}


@asynccontextmanager
async def answering(host: ModelHost, address: str, router_address: str, transport: Transport) -> AsyncIterator[None]:
    """Context manager: while it is open, ModelHost is served at `address`, and the host asks its router."""
    fleet = HostFleet(router_address, transport)
    server = await start_service(_Calls(host), address, transport)
    host.fleet = fleet
    host.wake()
    try:
        yield
    finally:
        host.fleet = None
        await server.stop(0.0)
        await fleet.close()


class _Calls:
    """The host in the terms of its service."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    async def changes(self) -> AsyncIterator[list[host_pb2.HostedModel]]:
        """All models, now and after each change."""
        async for models in self._host.changes():
            yield [message_of(model) for _, model in sorted(models.items())]

    async def load(self, name: str) -> host_pb2.HostedModel:
        """Load a model, and return when it accepts requests. Raises StatusError."""
        try:
            return message_of(await self._host.load(name))
        except NoSuchModelError:
            raise no_such_model(name, self._host) from None
        except CannotLoadError as error:
            raise StatusError(Reason.MODEL_NOT_LOADED, f"model {name!r} cannot be loaded: {error}") from None


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
    )
