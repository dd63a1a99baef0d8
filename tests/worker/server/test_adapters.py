"""Requests with adapters on a running worker: their cache identity, and the adapters that they hold and release."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.protos import worker_pb2
from headrace.protos.block_hash import block_hashes, root_hash
from headrace.protos.inference_pb2 import GenerateRequest, GenerateResponse, SamplingParams
from headrace.protos.model_identity import identity_of
from headrace.protos.status import Reason, error_of
from headrace.router.fleet.worker_adapters import WorkerAdapters
from headrace.worker.adapters.library import AdapterLibrary
from headrace.worker.adapters.reader import AdapterReader
from headrace.worker.model.adapter_memory import AdaptedGroup, AdapterMemory
from headrace.worker.server.adapters import AdapterDesk
from tests.patience import patience
from tests.worker.adapters.files import LAYERS, LINEARS, write_adapter
from tests.worker.conftest import BLOCK_SIZE
from tests.worker.server.running import FINGERPRINT, MODEL, TOKENIZER, RunningWorker, running_worker, small_engine

PROMPT = list(range(12))
NUM_SLOTS = 2


class Memory:
    """The part of a runner that has adapters."""

    def __init__(self) -> None:
        groups = [AdaptedGroup([linear], f"a{i}", [f"b{i}"]) for i, linear in enumerate(LINEARS)]
        self.adapters: AdapterMemory | None = AdapterMemory(groups, NUM_SLOTS, 4, is_bfloat16=False)


@dataclass
class Worker(RunningWorker):
    """A worker with adapters."""

    library: AdapterLibrary
    desk: AdapterDesk

    def call(self, adapter: str, max_tokens: int = 3, **fields: Any) -> Any:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return self.inference.Generate(
            GenerateRequest(token_ids=PROMPT, adapter=adapter, sampling=sampling, **fields), timeout=20
        )

    async def answer(self, adapter: str, **fields: Any) -> list[GenerateResponse]:
        return [response async for response in self.call(adapter, **fields)]

    async def load(self, name: str, path: Path, **fields: Any) -> worker_pb2.Adapter:
        request = worker_pb2.LoadAdapterRequest(name=name, path=str(path), **fields)
        adapter: worker_pb2.Adapter = (await self.worker.LoadAdapter(request)).adapter
        return adapter


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    memory = Memory()
    assert memory.adapters is not None
    library = AdapterLibrary(memory, AdapterReader(LAYERS, memory.adapters))
    desk = AdapterDesk(library, MODEL)
    async with running_worker(small_engine(), desk=desk) as running:
        yield Worker(**vars(running), library=library, desk=desk)
    library.check()
    assert all(not adapter.num_requests for adapter in library.adapters()), "a request kept its adapter"


async def test_blocks_and_identity_are_those_of_the_adapters_files(worker: Worker, tmp_path: Path) -> None:
    sql = await worker.load("sql", write_adapter(tmp_path / "sql"))
    base, first, again = [(await worker.answer(name))[0] for name in ("", "sql", "sql")]
    assert base.model_identity == "identity"
    assert first.model_identity == identity_of(FINGERPRINT, TOKENIZER, sql.sha256)
    assert (base.num_cached_tokens, first.num_cached_tokens) == (0, 0), "the model's blocks are none of the adapter's"
    assert again.num_cached_tokens >= 2 * BLOCK_SIZE
    for sha256 in ("", sql.sha256):
        assert block_hashes(root_hash(FINGERPRINT, sha256), PROMPT, BLOCK_SIZE)[0] in worker.hub.findable


async def test_replacing_an_adapter_leaves_its_cached_prefixes_behind(worker: Worker, tmp_path: Path) -> None:
    await worker.load("sql", write_adapter(tmp_path / "old"))
    began = (await worker.answer("sql"))[0].model_identity
    await worker.load("sql", write_adapter(tmp_path / "new", seed=1), in_place=True)
    assert (await worker.answer("sql"))[0].num_cached_tokens == 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.answer("sql", resume_token_ids=[5], model_identity=began)
    assert error_of(caught.value).reason is Reason.MODEL_CHANGED


async def test_unknown_adapters_are_unknown_models(worker: Worker, tmp_path: Path) -> None:
    await worker.load("sql", write_adapter(tmp_path / "sql"))
    await worker.worker.UnloadAdapter(worker_pb2.UnloadAdapterRequest(name="sql"))
    for call in (worker.answer("sql"), worker.worker.UnloadAdapter(worker_pb2.UnloadAdapterRequest(name="sql"))):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert error_of(caught.value).reason is Reason.MODEL_NOT_FOUND


async def test_a_request_waits_for_a_slot(worker: Worker, tmp_path: Path) -> None:
    for seed in range(3):
        await worker.load(str(seed), write_adapter(tmp_path / str(seed), seed=seed))
    held = [worker.library.find(name) for name in ("0", "1")]
    for adapter in held:
        await worker.library.acquire(adapter, 1.0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.answer("2", max_wait_ms=50)
    assert error_of(caught.value).reason is Reason.QUEUE_FULL
    waiting = asyncio.create_task(worker.answer("2"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    worker.library.release(held[0])
    assert (await waiting)[-1].finish.num_generated_tokens == 3
    worker.library.release(held[1])


async def test_the_time_to_read_an_adapter_refuses_no_request(worker: Worker, tmp_path: Path) -> None:
    for seed in range(3):
        await worker.load(str(seed), write_adapter(tmp_path / str(seed), seed=seed))
    assert not worker.library.find("0").is_in_memory, "it has given way"
    assert (await worker.answer("0", max_wait_ms=0))[-1].finish.num_generated_tokens == 3


async def test_a_cancelled_request_gives_its_adapter_back(worker: Worker, tmp_path: Path) -> None:
    await worker.load("sql", write_adapter(tmp_path / "sql"))
    call = worker.call("sql", max_tokens=200)
    await call.read()
    call.cancel()
    async with asyncio.timeout(patience(10)):
        while worker.library.find("sql").num_requests:
            await asyncio.sleep(0.005)


async def test_watchers_learn_of_adapters_and_of_those_in_memory(worker: Worker, tmp_path: Path) -> None:
    watch = worker.worker.Watch(worker_pb2.WatchRequest(heartbeat_ms=5000))
    first = await watch.read()
    assert (list(first.adapters.adapters), first.adapters.max_in_memory) == ([], NUM_SLOTS)
    for seed in range(3):
        await worker.load(str(seed), write_adapter(tmp_path / str(seed), seed=seed))
    seen = WorkerAdapters()
    seen.take(first)

    def known() -> dict[str, bool]:
        return {adapter.name: adapter.is_in_memory for adapter in seen.all()}

    async with asyncio.timeout(patience(10)):
        while known() != {"0": False, "1": True, "2": True}:
            seen.take(await watch.read())
        await worker.answer("0")
        while sum(known().values()) != 2 or not known()["0"]:
            message = await watch.read()
            assert not message.HasField("adapters"), "the list is sent once"
            assert not message.HasField("adapter_changes"), "what is known has not changed"
            seen.take(message)
    counters = worker.hub.load().counters
    assert (counters.adapter_loads, counters.adapter_evictions) == (4, 2)
    watch.cancel()


@pytest.mark.parametrize(
    ("name", "path", "field"),
    [("fake", "/a", "lora_name"), ("a b", "/a", "lora_name"), ("", "/a", "lora_name"), ("a", "here", "lora_path"),
     ("a", "/nowhere", "lora_path")],
)  # fmt: skip
async def test_what_cannot_be_loaded_is_refused_by_its_field(worker: Worker, name: str, path: str, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.load(name, Path(path) if path else Path())
    error = error_of(caught.value)
    assert (error.reason, error.field) == (Reason.INVALID_FIELD, field)


async def test_watchers_know_the_adapters_after_each_change(worker: Worker, tmp_path: Path) -> None:
    """They get what has changed, not all."""
    paths = [write_adapter(tmp_path / str(seed), seed=seed) for seed in range(4)]
    await worker.load("0", paths[0])
    request = worker_pb2.WatchRequest(heartbeat_ms=50, watcher_id=5)
    watch = worker.worker.Watch(request)
    seen = WorkerAdapters()
    seen.take(await watch.read())
    messages: list[worker_pb2.WatchResponse] = []

    async def agrees() -> None:
        async with asyncio.timeout(patience(20)):
            while {one.name: one for one in seen.all()} != {one.name: one for one in worker.desk.list().adapters}:
                messages.append(await watch.read())
                seen.take(messages[-1])

    await agrees()
    for number in (1, 2, 3):  # there is room for two in memory
        await worker.load(str(number), paths[number])
        await agrees()
    await worker.load("3", paths[0], in_place=True)
    await agrees()
    worker.desk.unload("1")
    worker.desk.unload("3")
    await agrees()
    assert [adapter.name for adapter in seen.all()] == ["0", "2"]
    assert not any(message.HasField("adapters") for message in messages)
    assert any(message.HasField("adapter_changes") for message in messages)
    # The end of a load is told too, on a busy machine together with the begin of the next.
    assert all(len(message.adapter_changes.known) <= 2 for message in messages)
    watch.cancel()
