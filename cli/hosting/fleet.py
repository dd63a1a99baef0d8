"""Asks the router of a host about its workers."""

from __future__ import annotations

import grpc

from headrace.common.transport.channels import Transport
from headrace.protos import router_pb2, router_pb2_grpc

_TIMEOUT_S = 2.0


class HostFleet:
    """The router of this host. Made and used in one event loop."""

    def __init__(self, router_address: str, transport: Transport) -> None:
        self._channel = transport.channel(router_address)
        self._router = router_pb2_grpc.RouterStub(self._channel)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def ready_workers(self) -> frozenset[str] | None:
        """Names of the workers that accept requests; None if the router does not answer."""
        workers = await self._workers()
        if workers is None:
            return None
        return frozenset(info.worker_id for info in workers if info.state == router_pb2.WORKER_STATE_READY)

    async def _workers(self) -> list[router_pb2.WorkerInfo] | None:
        try:
            answer = await self._router.ListWorkers(router_pb2.ListWorkersRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
        return list(answer.workers)
