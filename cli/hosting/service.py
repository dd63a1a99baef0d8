"""The ModelHost service of `headrace serve`, for its gateway and for commands."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol, TypeAlias

import grpc

from headrace.common.transport.channels import SERVER_OPTIONS, Transport
from headrace.common.transport.introspection import add_introspection, set_serving
from headrace.protos import host_pb2, host_pb2_grpc
from headrace.protos.status import StatusError, abort

SERVICE = "headrace.v1.ModelHost"
_MAX_CALLS = 8192

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Host(Protocol):
    """The host as the service uses it. The methods raise StatusError."""

    def changes(self) -> AsyncIterator[host_pb2.WatchModelsResponse]:
        """All models and aliases, now and after each change."""

    async def load(self, request: host_pb2.LoadModelRequest) -> host_pb2.HostedModel:
        """Load a model, and return when it accepts requests."""

    async def unload(self, name: str) -> host_pb2.HostedModel:
        """Unload a model, and return when its memory is free."""

    def set_alias(self, request: host_pb2.SetAliasRequest) -> None:
        """Add, change or remove another name of models."""

    async def reload(self) -> host_pb2.ReloadConfigurationResponse:
        """Read the configuration again, and return when the models are those that it names."""


class ModelHostService(host_pb2_grpc.ModelHostServicer):
    """Serves ModelHost."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def WatchModels(
        self, request: host_pb2.WatchModelsRequest, context: _Context
    ) -> AsyncIterator[host_pb2.WatchModelsResponse]:
        """See host.proto."""
        async for answer in self._host.changes():
            yield answer

    async def LoadModel(self, request: host_pb2.LoadModelRequest, context: _Context) -> host_pb2.LoadModelResponse:
        """See host.proto."""
        try:
            return host_pb2.LoadModelResponse(model=await self._host.load(request))
        except StatusError as error:
            await abort(context, error)

    async def UnloadModel(
        self, request: host_pb2.UnloadModelRequest, context: _Context
    ) -> host_pb2.UnloadModelResponse:
        """See host.proto."""
        try:
            return host_pb2.UnloadModelResponse(model=await self._host.unload(request.name))
        except StatusError as error:
            await abort(context, error)

    async def SetAlias(self, request: host_pb2.SetAliasRequest, context: _Context) -> host_pb2.SetAliasResponse:
        """See host.proto."""
        try:
            self._host.set_alias(request)
        except StatusError as error:
            await abort(context, error)
        return host_pb2.SetAliasResponse()

    async def ReloadConfiguration(
        self, request: host_pb2.ReloadConfigurationRequest, context: _Context
    ) -> host_pb2.ReloadConfigurationResponse:
        """See host.proto."""
        try:
            return await self._host.reload()
        except StatusError as error:
            await abort(context, error)


async def start_service(host: Host, address: str, transport: Transport) -> grpc.aio.Server:
    """Serve at a gRPC target. The caller stops the server."""
    server = grpc.aio.server(
        interceptors=transport.interceptors(), options=SERVER_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS
    )
    host_pb2_grpc.add_ModelHostServicer_to_server(ModelHostService(host), server)
    health = add_introspection(server, [SERVICE])
    transport.bind(server, address)
    await server.start()
    await set_serving(health, [SERVICE], True)
    return server
