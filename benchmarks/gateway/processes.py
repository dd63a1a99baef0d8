"""The processes around a gateway under test, and the minimum work of a gateway in isolation.

    python -m benchmarks.gateway.processes upstream ADDRESS MODEL_DIR
    python -m benchmarks.gateway.processes receive ADDRESS
    python -m benchmarks.gateway.processes write PORT

upstream: a worker that computes nothing. At each tick it sends one token to every stream, as an engine does after a
step. If a request's `cache_salt` is `idle`, its stream gets one token and then nothing. receive: reads NUM_STREAMS
streams of a worker in a session, as the gateway does, and discards them. write: an HTTP server that sends a prepared
event to every connection at each tick.

All run on uvloop, as the gateway does, and end with SIGTERM.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import uvicorn
import uvloop

from headrace.common.transport.channels import CHANNEL_OPTIONS, SERVER_OPTIONS
from headrace.common.transport.session_client import SessionClient
from headrace.common.transport.session_server import SessionServer, handler_of, whole
from headrace.protos import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from headrace.worker.model.directory import ModelDir, read_model_dir

TICK_S = 0.025
NUM_STREAMS = 64
# Tokens of ordinary text, of some characters each.
TOKEN_IDS = range(1000, 1400)
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1795164462,'
    b'"model":"benchmark","system_fingerprint":"fp_0123456789ab","choices":[{"index":0,"delta":{"content":" water"},'
    b'"logprobs":null,"finish_reason":null}]}\n\n'
)


class Ticker:
    """Wakes all who wait, every `TICK_S`."""

    def __init__(self) -> None:
        self._ticked = asyncio.Event()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            ticked, self._ticked = self._ticked, asyncio.Event()
            ticked.set()

    async def next(self) -> None:
        """Wait for the next tick."""
        await self._ticked.wait()


class Upstream(worker_pb2_grpc.WorkerServicer, inference_pb2_grpc.InferenceServicer):
    """Card, tokenizer and streams of a worker."""

    def __init__(self, model: ModelDir, ticker: Ticker) -> None:
        self._model = model
        self._ticker = ticker
        self._sessions = SessionServer(handler_of(self.generate, whole))

    async def GetModelCard(self, request: Any, context: Any) -> worker_pb2.GetModelCardResponse:
        """See worker.proto."""
        card = worker_pb2.ModelCard(
            name="benchmark",
            fingerprint="0123456789ab".ljust(64, "0"),
            tokenizer_sha256=self._model.tokenizer_sha256,
            max_context_tokens=8192,
            vocab_size=49152,
            block_size=32,
            eos_token_ids=self._model.eos_token_ids,
        )
        return worker_pb2.GetModelCardResponse(card=card, worker_id="upstream", epoch=1)

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.GetTokenizerResponse]:
        """See worker.proto."""
        bundle = self._model.tokenizer_bundle
        for start in range(0, len(bundle), 1 << 20):
            yield worker_pb2.GetTokenizerResponse(chunk=bundle[start : start + (1 << 20)])

    async def Session(self, request_iterator: Any, context: Any) -> None:
        """See inference.proto."""
        await self._sessions.serve(request_iterator, context)

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The messages of one call."""
        most = request.sampling.max_tokens
        for position in range(most):
            await self._ticker.next()
            token_id = TOKEN_IDS[position % len(TOKEN_IDS)]
            message = inference_pb2.GenerateResponse(start_pos=position, token_ids=[token_id])
            if position == most - 1:
                message.finish.reason = inference_pb2.FINISH_REASON_LENGTH
                message.finish.num_generated_tokens = most
            yield message
            if request.cache_salt == "idle":
                await asyncio.Event().wait()


async def upstream(address: str, model_dir: str) -> None:
    """Serve until SIGTERM."""
    ticker = Ticker()
    server = grpc.aio.server(options=SERVER_OPTIONS)
    service = Upstream(read_model_dir(Path(model_dir)), ticker)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    server.add_insecure_port(address)
    await server.start()
    print("ready", flush=True)
    await ticker.run()


async def receive(address: str) -> None:
    """Read `NUM_STREAMS` streams without end."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        client = SessionClient(channel)

        async def one() -> None:
            while True:
                request = inference_pb2.GenerateRequest(token_ids=[1], sampling={"max_tokens": 100_000})
                call = client.generate(request.SerializeToString())
                while (raw := await call.read()) is not grpc.aio.EOF:
                    inference_pb2.GenerateResponse.FromString(raw)

        print("ready", flush=True)
        await asyncio.gather(*(one() for _ in range(NUM_STREAMS)))


async def write(port: str) -> None:
    """Serve prepared events."""
    ticker = Ticker()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            await ticker.next()
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})

    config = uvicorn.Config(
        application, port=int(port), http="httptools", loop="none", lifespan="off", log_config=None, access_log=False
    )
    ticking = asyncio.create_task(ticker.run())
    print("ready", flush=True)
    await uvicorn.Server(config).serve()
    ticking.cancel()


if __name__ == "__main__":
    uvloop.run({"upstream": upstream, "receive": receive, "write": write}[sys.argv[1]](*sys.argv[2:]))
