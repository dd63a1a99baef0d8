"""The door of the gRPC edge: keys and limits for the Text service, as HTTP has them. Health and reflection are open."""

from __future__ import annotations

import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

from headrace.common.stores.api_keys import ApiKey
from headrace.common.transport.channels import refusing
from headrace.gateway.access.admission import Door, Visit
from headrace.protos.status import StatusError, abort

visit_var: contextvars.ContextVar[Visit | None] = contextvars.ContextVar("visit", default=None)
"""The visit of the call that the running task answers; None without keys."""

_GUARDED = "/headrace.v1.Text/"
# Reads what is known anyway; like a GET, it does not count.
_UNCOUNTED = frozenset({"/headrace.v1.Text/ListModels"})

_Method: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
_Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[_Method]]
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class DoorInterceptor(grpc.aio.ServerInterceptor):
    """Lets calls of the Text service in at the door, and refuses the others with the status of the reason."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Method:
        """See grpc.aio."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_GUARDED):
            return handler
        found = dict(handler_call_details.invocation_metadata or ())

        def header(name: str) -> str:
            value = found.get(name, "")
            return value if isinstance(value, str) else ""

        try:
            key = self._door.identify(header)
        except StatusError as error:
            return refusing(error)
        return self._guarded(handler, key, method not in _UNCOUNTED)

    def _guarded(self, handler: Any, key: ApiKey | None, counted: bool) -> _Method:
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
                visit = self._door.visit(key)
                async with self._door.admitted(visit, counted=counted):
                    visit_var.set(visit)
                    async with aclosing(behaviour(request, context)) as responses:
                        async for response in responses:
                            yield response
            except StatusError as error:
                await abort(context, error)

        return guarded

    def _unary(self, behaviour: Callable[..., Any], key: ApiKey | None, counted: bool) -> Callable[..., Any]:
        async def guarded(request: Any, context: _Context) -> Any:
            try:
                visit = self._door.visit(key)
                async with self._door.admitted(visit, counted=counted):
                    visit_var.set(visit)
                    return await behaviour(request, context)
            except StatusError as error:
                await abort(context, error)

        return guarded
