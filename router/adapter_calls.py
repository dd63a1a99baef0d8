"""The methods of the Router service that load and unload LoRA adapters."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc

from headrace.protos import router_pb2
from headrace.protos.status import StatusError, abort
from headrace.router.fleet.adapters import FleetAdapters

_T = TypeVar("_T")


class AdapterCalls:
    """Serves LoadAdapter and UnloadAdapter."""

    def __init__(self, adapters: FleetAdapters) -> None:
        self._adapters = adapters

    async def load(
        self,
        request: router_pb2.RouterLoadAdapterRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> router_pb2.RouterLoadAdapterResponse:
        """Load an adapter at all workers of its model."""
        adapter = await _answered(context, self._adapters.load(request))
        return router_pb2.RouterLoadAdapterResponse(adapter=adapter)

    async def unload(
        self,
        request: router_pb2.RouterUnloadAdapterRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> router_pb2.RouterUnloadAdapterResponse:
        """Unload an adapter at all workers."""
        await _answered(context, self._adapters.unload(request.name))
        return router_pb2.RouterUnloadAdapterResponse()


async def _answered(context: grpc.aio.ServicerContext[Any, Any], work: Awaitable[_T]) -> _T:
    """Return the result of `work`. A StatusError ends the call."""
    try:
        return await work
    except StatusError as error:
        await abort(context, error)
