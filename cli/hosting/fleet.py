"""Calls the router and the workers of a host."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import grpc

from headrace.cli.hosting.planner import WorkerView
from headrace.common.transport.channels import Transport
from headrace.protos import router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 2.0
_LONGEST_DRAIN_S = 24 * 3600.0


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
