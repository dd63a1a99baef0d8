"""The processes around a router under test: a scripted worker that is always fast, and a bare pass-through.

    python -m benchmarks.router.processes worker ADDRESS
    python -m benchmarks.router.processes pass ADDRESS WORKER_ADDRESS

The worker computes nothing: it sends the first token of a stream at once and then one to every stream at each tick, as
an engine does after a step. The pass-through is the least that a process in between can do with grpc.aio: read bytes,
write bytes. Both run on uvloop, as the router does, and end with SIGTERM.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from headrace.common.transport.session_client import GENERATE
from headrace.common.transport.session_server import SessionServer
from headrace.protos import inference_pb2, worker_pb2, worker_pb2_grpc

TICK_S = 0.025
NUM_TOKENS = 40


def scripted_messages(num_tokens: int) -> list[bytes]:
    """The messages of each stream: one token in each message, then the finish."""
    messages = [
        inference_pb2.GenerateResponse(start_pos=position, token_ids=[1000 + position])
        for position in range(num_tokens)
    ]
    messages[0].num_cached_tokens = 0
    finish = inference_pb2.Finish(
        reason=inference_pb2.FINISH_REASON_LENGTH, num_prompt_tokens=64, num_generated_tokens=num_tokens
    )
    messages.append(inference_pb2.GenerateResponse(start_pos=num_tokens, finish=finish))
    return [message.SerializeToString() for message in messages]


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """Card, watch and streams."""

    def __init__(self) -> None:
        self._messages = scripted_messages(NUM_TOKENS)
        self._ticked = asyncio.Event()

    async def tick(self) -> None:
        """Let all streams advance, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            ticked, self._ticked = self._ticked, asyncio.Event()
            ticked.set()

    async def GetModelCard(self, request: Any, context: Any) -> worker_pb2.GetModelCardResponse:
        """See worker.proto."""
        card = worker_pb2.ModelCard(
            name="scripted", fingerprint="0", max_context_tokens=8192, vocab_size=50_000, block_size=32
        )
        return worker_pb2.GetModelCardResponse(card=card, worker_id="scripted", epoch=1)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.WatchResponse]:
        """See worker.proto. The load never changes, but is reported as often as a busy worker's."""
        load = worker_pb2.Load(
            num_blocks=10_000, num_free_blocks=10_000, prefill_tokens_per_s=1e6, decode_step_ms=1.0, max_num_seqs=256
        )
        sequence = 0
        while True:
            events = worker_pb2.KvEvents(reset=sequence == 0)
            yield worker_pb2.WatchResponse(epoch=1, sequence=sequence, kv_events=events, load=load)
            sequence += 1
            await asyncio.sleep(0.05)

    async def generate(self, raw: bytes, context: Any) -> None:
        """A stream; the finish comes together with the last token's tick."""
        first, *rest, finish = self._messages
        await context.write(first)
        for message in rest:
            await self._ticked.wait()
            await context.write(message)
        await context.write(finish)


async def serve_worker(address: str) -> None:
    """The worker on this address."""
    worker = ScriptedWorker()
    generate = grpc.unary_stream_rpc_method_handler(worker.generate)
    server = _server({"Generate": generate, "Session": SessionServer(worker.generate).method()})
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    server.add_insecure_port(address)
    await server.start()
    await worker.tick()


async def serve_pass(address: str, worker_address: str) -> None:
    """Serve the pass-through at this address."""
    channel = grpc.aio.insecure_channel(worker_address)
    upstream = channel.unary_stream(GENERATE)

    async def generate(raw: bytes, context: Any) -> None:
        call = upstream(raw)
        while (message := await call.read()) is not grpc.aio.EOF:
            await context.write(message)

    server = _server({"Generate": grpc.unary_stream_rpc_method_handler(generate)})
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


def _server(methods: dict[str, Any]) -> grpc.aio.Server:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("headrace.v1.Inference", methods),))
    return server


if __name__ == "__main__":
    role, *addresses = sys.argv[1:]
    uvloop.run({"worker": serve_worker, "pass": serve_pass}[role](*addresses))
