"""A process that stands still keeps its connections open. Both ends of a call notice it all the same."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import grpc

from headrace.common.transport.channels import PLAIN
from headrace.protos.router_pb2 import RouterGetTokenizerRequest
from headrace.protos.router_pb2_grpc import RouterStub
from tests.common.transport.endless import endless
from tests.e2e.fleet import Process
from tests.patience import patience

# Silence of a connection after which it ends (`COMMON_OPTIONS`), and time for machines that are late.
SILENCE_S, LATE_S = 20.0, 20.0


async def test_callers_and_servers_lose_a_process_that_stands_still(tmp_path: Path) -> None:
    own, other = (f"unix:{tmp_path / name}.sock" for name in ("own", "other"))
    process = Process("other", ["-m", "tests.common.transport.endless", other, own])
    async with endless(own) as streams, PLAIN.channel(other) as channel:
        process.start()
        try:
            async with asyncio.timeout(patience(30)):
                await streams.has_begun.wait()
            with PLAIN.blocking_channel(other) as blocking:
                calls = [
                    stub.GetTokenizer(RouterGetTokenizerRequest()) for stub in map(RouterStub, (channel, blocking))
                ]
                assert (await calls[0].read()).chunk == next(calls[1]).chunk == b"a"
                process.signal(signal.SIGSTOP)
                async with asyncio.timeout(SILENCE_S + LATE_S):
                    of_caller, of_thread = await asyncio.gather(
                        _error_of(calls[0].read()), _error_of(asyncio.to_thread(list, calls[1]))
                    )
                    await streams.has_ended.wait()
            assert of_caller.code() is of_thread.code() is grpc.StatusCode.UNAVAILABLE
            with PLAIN.blocking_channel(other) as late:
                call = RouterStub(late).GetTokenizer(RouterGetTokenizerRequest(), timeout=patience(30))
                refused = await _error_of(asyncio.to_thread(list, call))
            assert refused.code() is grpc.StatusCode.UNAVAILABLE
        finally:
            process.end()


async def _error_of(answer: Any) -> Any:
    """The error of a call that fails."""
    try:
        await answer
    except grpc.RpcError as error:
        return error
    raise AssertionError("the call has ended without an error")
