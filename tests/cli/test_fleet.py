"""The host's calls to its router."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from headrace.cli.serving.host_calls import HostFleet
from headrace.common.transport.channels import Transport
from headrace.protos import router_pb2, router_pb2_grpc
from tests.certificates import make_certificates, replace_certificates


class FakeRouter(router_pb2_grpc.RouterServicer):
    """Has one worker."""

    async def ListWorkers(self, request: Any, context: Any) -> Any:
        return router_pb2.ListWorkersResponse(workers=[router_pb2.WorkerInfo(worker_id="worker-0")])


@asynccontextmanager
async def serving(address: str, transport: Transport) -> AsyncIterator[None]:
    server = grpc.aio.server()
    router_pb2_grpc.add_RouterServicer_to_server(FakeRouter(), server)
    transport.bind(server, address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


async def test_renewed_certificates_are_used_when_the_router_is_restarted(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/router.sock"
    files, new = make_certificates(tmp_path / "files"), make_certificates(tmp_path / "new")
    # Each look at the files comes a second after the last one.
    fleet = HostFleet(address, Transport(files, clock=itertools.count().__next__))
    async with serving(address, Transport(files)):
        assert (await fleet.workers() or {}).keys() == {"worker-0"}
    async with serving(address, Transport(replace_certificates(files, new))):
        assert (await fleet.workers() or {}).keys() == {"worker-0"}
    assert await fleet.workers() is None
    await fleet.close()
