"""Streams without end between two servers; as a process, one of them: OWN_ADDRESS OTHER_ADDRESS."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from headrace.common.transport.channels import PLAIN, SERVER_OPTIONS
from headrace.protos import router_pb2, router_pb2_grpc
from headrace.protos.router_pb2 import RouterGetTokenizerRequest, RouterGetTokenizerResponse


class Endless(router_pb2_grpc.RouterServicer):  # type: ignore[misc]
    """Begins a stream, and waits until its caller is gone."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self.has_ended = asyncio.Event()

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[RouterGetTokenizerResponse]:
        yield router_pb2.RouterGetTokenizerResponse(chunk=b"a")
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.has_ended.set()


@asynccontextmanager
async def endless(address: str) -> AsyncIterator[Endless]:
    """Context manager: serve such streams."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    streams = Endless()
    router_pb2_grpc.add_RouterServicer_to_server(streams, server)
    PLAIN.bind(server, address)
    await server.start()
    try:
        yield streams
    finally:
        await server.stop(None)


async def _main(own: str, other: str) -> None:
    async with endless(own), PLAIN.channel(other) as channel:
        async for _ in router_pb2_grpc.RouterStub(channel).GetTokenizer(RouterGetTokenizerRequest()):
            print("both listen", flush=True)


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
