"""A worker's services on a real gRPC server, over an engine with the fake runner."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from headrace.common.transport.introspection import add_introspection, set_serving
from headrace.protos import inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from headrace.protos.inference_pb2 import GenerateRequest, GenerateResponse
from headrace.worker.engine.mailbox import Mailbox
from headrace.worker.engine.stages import Stages
from headrace.worker.engine.thread import EngineThread
from headrace.worker.kv.fetch import Bell
from headrace.worker.server.adapters import AdapterDesk
from headrace.worker.server.admission import ModelLimits
from headrace.worker.server.images import ImageDesk
from headrace.worker.server.service import SERVICE_NAMES, InferenceService, WorkerService
from headrace.worker.server.watch import WatchHub
from tests.patience import patience
from tests.worker.conftest import BLOCK_SIZE, VOCAB_SIZE, EngineUnderTest, make_engine
from tests.worker.vocabulary import EOS, VOCABULARY, grammars

MODEL = "fake"
FINGERPRINT, TOKENIZER, IDENTITY = "f" * 64, "7" * 64, "identity"
NUM_BLOCKS, MAX_NUM_SEQS = 64, 4


@dataclass
class RunningWorker:
    """A worker that serves, its parts, and stubs to call it with."""

    under_test: EngineUnderTest
    hub: WatchHub
    mailbox: Mailbox
    inference: Any
    worker: Any
    health: Any
    thread: EngineThread

    async def generate(self, **fields: object) -> list[GenerateResponse]:
        return [response async for response in self.inference.Generate(GenerateRequest(**fields))]  # type: ignore[arg-type]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(patience(20)):
            while not condition():
                await asyncio.sleep(0.002)


def small_engine() -> EngineUnderTest:
    """An engine for `running_worker`."""
    return make_engine(num_blocks=NUM_BLOCKS, max_num_seqs=MAX_NUM_SEQS)


@asynccontextmanager
async def running_worker(
    under_test: EngineUnderTest,
    *,
    bundle: bytes = b"",
    tokenizer_sha256: str = "",
    desk: AdapterDesk | None = None,
    images: ImageDesk | None = None,
    stages: Stages = Stages(),  # noqa: B008  without stages it has no state
    bell: Bell | None = None,
) -> AsyncIterator[RunningWorker]:
    """Serve an engine of `small_engine`. At the end, the scheduler's invariants must hold."""
    hub = WatchHub(epoch=7, max_num_seqs=MAX_NUM_SEQS, block_size=BLOCK_SIZE, adapters=desk)
    mailbox = Mailbox(MAX_NUM_SEQS + 2, hub.publish, bell=bell)
    context_tokens = NUM_BLOCKS * BLOCK_SIZE
    limits = ModelLimits(MODEL, FINGERPRINT, VOCAB_SIZE, context_tokens, frozenset({EOS}), IDENTITY, TOKENIZER)
    card = worker_pb2.ModelCard(name=MODEL, tokenizer_sha256=tokenizer_sha256)
    described = worker_pb2.GetModelCardResponse(card=card, worker_id="w", epoch=7)
    server = grpc.aio.server()
    inference = InferenceService(mailbox, hub, limits, grammars(), lambda: VOCABULARY, adapters=desk, images=images)
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    health = add_introspection(server, SERVICE_NAMES)
    service = WorkerService(described, bundle, mailbox, hub, desk, health=health)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    await set_serving(health, SERVICE_NAMES, True)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    thread = EngineThread(under_test.engine, mailbox, max_wait_s=60.0, stages=stages)
    thread.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stubs = inference_pb2_grpc.InferenceStub(channel), worker_pb2_grpc.WorkerStub(channel)
            yield RunningWorker(under_test, hub, mailbox, *stubs, health_pb2_grpc.HealthStub(channel), thread)
    finally:
        await server.stop(None)
        mailbox.stop()
        await asyncio.to_thread(thread.join, 20)
        assert not thread.is_alive()
        under_test.scheduler.check()
