"""The gRPC edge: a server for the protocols' services, with the same keys and limits as HTTP.

Health and reflection need no key.
"""

from __future__ import annotations

import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import grpc

from headrace.common.stores.api_keys import ApiKey
from headrace.common.transport.channels import SERVER_OPTIONS, refusing
from headrace.common.transport.introspection import add_introspection, set_serving
from headrace.gateway.access.admission import AdmissionControl
from headrace.gateway.access.caller import authorization_var
from headrace.gateway.edge.grpc_call import GrpcCalls
from headrace.gateway.edge.tls import EdgeTls
from headrace.protos.status import StatusError, abort

Admission: TypeAlias = Callable[[], AbstractAsyncContextManager[None]]
admission_var: contextvars.ContextVar[Admission] = contextvars.ContextVar("admission")
"""In a call that receives a stream: admits one of its requests inside the context, and sets `authorization_var`. Raises
the errors of admission."""

# Concurrent gRPC calls beyond the admitted requests, such as health and reflection.
OTHER_CALLS = 256

_Method: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
_Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[_Method]]
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class HasCalls(Protocol):
    """A servicer whose calls can be refused because the gateway stops."""

    calls: GrpcCalls


@dataclass(frozen=True, slots=True)
class GrpcService:
    """A service that a protocol has."""

    name: str
    """With its package, such as headrace.v1.Text."""
    servicer: HasCalls
    add: Callable[[Any, grpc.aio.Server], None]
    """Adds the servicer to a server; generated from the protos."""
    uncounted: frozenset[str] = frozenset()
    """Methods that only read. Like a GET, they do not count against the limits of a key."""
    is_open: frozenset[str] = frozenset()
    """Methods that are answered without a key, where others are not."""


async def start_grpc_server(
    services: Sequence[GrpcService], address: str, admission: AdmissionControl, tls: EdgeTls | None = None
) -> tuple[grpc.aio.Server, int]:
    """Serve the services on an address; returns server and port. Raises RuntimeError if the address is in use."""
    server = grpc.aio.server(
        interceptors=[AuthInterceptor(admission, services)],
        options=SERVER_OPTIONS,
        maximum_concurrent_rpcs=admission.bounds.max_requests + OTHER_CALLS,
    )
    for service in services:
        service.add(service.servicer, server)
    names = [service.name for service in services]
    health = add_introspection(server, names)
    if tls is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, tls.grpc_credentials())
    await server.start()
    await set_serving(health, names, True)
    return server, port


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Checks key and limits of each call to a protocol's service, and refuses it with the status of the reason."""

    def __init__(self, admission: AdmissionControl, services: Sequence[GrpcService]) -> None:
        self._admission = admission
        self._guarded_prefixes = tuple(f"/{service.name}/" for service in services)
        self._uncounted = {f"/{service.name}/{method}" for service in services for method in service.uncounted}
        self._open = {f"/{service.name}/{method}" for service in services for method in service.is_open}

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Method:
        """See grpc.aio."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(self._guarded_prefixes):
            return handler
        found = dict(handler_call_details.invocation_metadata or ())

        def header(name: str) -> str:
            value = found.get(name, "")
            return value if isinstance(value, str) else ""

        try:
            key = None if method in self._open else self._admission.identify(header)
        except StatusError as error:
            return refusing(error)
        return self._guarded(handler, key, method not in self._uncounted)

    def _guarded(self, handler: Any, key: ApiKey | None, counted: bool) -> _Method:
        if handler.request_streaming and handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._streams(handler.stream_stream, key, counted),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(handler.unary_stream, key, counted),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(handler.unary_unary, key, counted), handler.request_deserializer, handler.response_serializer
        )

    def _stream(self, behaviour: Callable[..., Any], key: ApiKey | None, counted: bool) -> Callable[..., Any]:
        async def guarded(request: Any, context: _Context) -> AsyncIterator[Any]:
            try:
                authorization = self._admission.authorize(key)
                async with self._admission.admitted(authorization, counted=counted):
                    authorization_var.set(authorization)
                    async with aclosing(behaviour(request, context)) as responses:
                        async for response in responses:
                            yield response
            except StatusError as error:
                await abort(context, error)

        return guarded

    def _streams(self, behaviour: Callable[..., Any], key: ApiKey | None, counted: bool) -> Callable[..., Any]:
        """Wrap a streaming handler: it admits each request of the stream itself, through `admission_var`."""

        @asynccontextmanager
        async def admitted() -> AsyncIterator[None]:
            authorization = self._admission.authorize(key)
            async with self._admission.admitted(authorization, counted=counted):
                authorization_var.set(authorization)
                yield

        async def guarded(requests: AsyncIterator[Any], context: _Context) -> AsyncIterator[Any]:
            admission_var.set(admitted)
            async with aclosing(behaviour(requests, context)) as responses:
                async for response in responses:
                    yield response

        return guarded

    def _unary(self, behaviour: Callable[..., Any], key: ApiKey | None, counted: bool) -> Callable[..., Any]:
        async def guarded(request: Any, context: _Context) -> Any:
            try:
                authorization = self._admission.authorize(key)
                async with self._admission.admitted(authorization, counted=counted):
                    authorization_var.set(authorization)
                    return await behaviour(request, context)
            except StatusError as error:
                await abort(context, error)

        return guarded
