"""Placement of requests with LoRA adapters, and loading of adapters through the router."""

from __future__ import annotations

import grpc
import pytest

from headrace.protos import inference_pb2, router_pb2
from headrace.protos.block_hash import block_hashes, root_hash
from headrace.protos.model_identity import model_identity
from headrace.protos.status import Reason, error_of
from headrace.router.fleet.adapters import ServedList
from tests.router.conftest import RunningRouter, StartRouter, StartWorker
from tests.router.fake_worker import BLOCK_SIZE, FakeWorker, answer, until

PROMPT = list(range(20))


async def until_known(router: object, name: str, *workers: FakeWorker) -> None:
    """Wait until the router knows the adapter at exactly these workers."""
    addresses = {worker.address for worker in workers}
    links = router.fleet.links  # type: ignore[attr-defined]
    await until(lambda: {link.address for link in links() if link.adapters.find(name)} == addresses)


async def two_with_adapter(
    start_router: StartRouter, start_worker: StartWorker
) -> tuple[RunningRouter, list[FakeWorker]]:
    """A router, and two workers with the adapter `sql` that it knows."""
    workers = [await start_worker(name) for name in "ab"]
    for worker in workers:
        worker.has_adapter("sql")
    router = await start_router(*workers)
    await until_known(router, "sql", *workers)
    return router, workers


async def test_a_request_goes_to_workers_that_know_its_adapter(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    workers = [await start_worker(name) for name in "abc"]
    workers[1].has_adapter("sql")
    router = await start_router(*workers)
    await until_known(router, "sql", workers[1])
    for _ in range(6):
        assert (await router.generate(PROMPT, adapter="sql"))[0] == answer(PROMPT, 20)
    assert [len(worker.requests) for worker in workers] == [0, 6, 0]
    await router.until_idle()


async def test_an_unknown_adapter_is_an_unknown_model(start_router: StartRouter, start_worker: StartWorker) -> None:
    worker = await start_worker()
    worker.has_adapter("sql")
    router = await start_router(worker)
    await until_known(router, "sql", worker)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(PROMPT, adapter="nope")
    assert error_of(caught.value).reason is Reason.MODEL_NOT_FOUND
    assert "there is sql" in error_of(caught.value).message
    await router.until_idle()


async def test_a_worker_with_the_adapter_in_memory_is_cheaper(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    workers = [await start_worker(name) for name in "ab"]
    workers[0].has_adapter("sql", in_memory=False)
    workers[1].has_adapter("sql")
    router = await start_router(*workers)
    await until_known(router, "sql", *workers)
    explained = await router.router.Explain(router_pb2.ExplainRequest(adapter="sql", token_ids=PROMPT))
    assert explained.worker_id == "b"
    assert [worker.cost.adapter_ms for worker in explained.workers] == [0.0, 220.0]
    for _ in range(4):
        await router.generate(PROMPT, adapter="sql")
    assert len(workers[1].requests) == 4


async def test_prefixes_of_adapters_and_of_the_model_are_apart(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router, workers = await two_with_adapter(start_router, start_worker)
    workers[0].store(PROMPT)
    root = root_hash(workers[1].card.fingerprint, "a" * 64)
    workers[1].report(stored=block_hashes(root, PROMPT, BLOCK_SIZE))
    await until(lambda: all(link.info().num_indexed_blocks for link in router.fleet.links()))
    for adapter, expected in (("", "a"), ("sql", "b")):
        explained = await router.router.Explain(router_pb2.ExplainRequest(adapter=adapter, token_ids=PROMPT))
        assert explained.worker_id == expected
        assert explained.reason == router_pb2.PLACEMENT_REASON_PREFIX


async def test_an_answer_is_continued_with_the_adapter_that_began_it(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    """The dying worker's adapter has a namesake with other files, and one with the same files."""
    first, other, same = [await start_worker(name) for name in ("first", "other", "same")]
    first.has_adapter("sql")
    first.budget = 5
    router = await start_router(first, other, same)
    await until_known(router, "sql", first)
    call = router.call(PROMPT, adapter="sql")
    await until(lambda: first.is_stuck)
    other.has_adapter("sql", "b" * 64)
    same.has_adapter("sql")
    await until_known(router, "sql", first, other, same)
    await first.kill()
    messages = [message async for message in call]
    assert [token for message in messages for token in message.token_ids] == answer(PROMPT, 20)
    assert (len(other.requests), len(same.requests)) == (0, 1)
    resumed = inference_pb2.GenerateRequest.FromString(same.requests[0])
    assert resumed.adapter == "sql"
    assert len(resumed.resume_token_ids) == 5
    assert resumed.model_identity == model_identity(same.card, "a" * 64)
    await router.until_idle()


async def test_an_adapter_that_was_replaced_unseen_is_the_one_that_continues(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    """The first worker's adapter is replaced, and the router has not heard of it when the request arrives."""
    first, old, new = [await start_worker(name) for name in ("first", "old", "new")]
    first.has_adapter("sql")
    first.budget = 5
    router = await start_router(first, old, new)
    await until_known(router, "sql", first)
    first.adapters["sql"].sha256 = "b" * 64
    call = router.call(PROMPT, adapter="sql")
    await until(lambda: first.is_stuck)
    old.has_adapter("sql")
    new.has_adapter("sql", "b" * 64)
    await until_known(router, "sql", first, old, new)
    await first.kill()
    messages = [message async for message in call]
    assert [token for message in messages for token in message.token_ids] == answer(PROMPT, 20)
    assert (len(old.requests), len(new.requests)) == (0, 1)
    await router.until_idle()


async def test_without_that_adapter_the_answer_ends_clearly(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    first, other = await start_worker("first"), await start_worker("other")
    first.has_adapter("sql")
    first.budget = 5
    router = await start_router(first, other, capacity_wait_s=0.5)
    await until_known(router, "sql", first)
    call = router.call(PROMPT, adapter="sql")
    await until(lambda: first.is_stuck)
    await first.kill()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert error_of(caught.value).reason is Reason.MODEL_CHANGED
    assert not other.requests


async def test_loading_reaches_all_workers_and_those_that_join_later(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    workers = [await start_worker(name) for name in "ab"]
    router = await start_router(*workers)
    await router.until_ready(2)
    request = router_pb2.RouterLoadAdapterRequest(name="sql", path="/adapters/sql")
    served = (await router.router.LoadAdapter(request)).adapter
    assert (served.model, served.adapter.name, served.num_workers, served.num_in_memory) == ("m", "sql", 2, 2)
    await until_known(router, "sql", *workers)
    listed = await router.router.ListModels(router_pb2.ListModelsRequest())
    assert [(each.model, each.adapter.name, each.num_workers) for each in listed.adapters] == [("m", "sql", 2)]
    await workers[0].kill()
    workers[0].adapters.clear()
    await router.until_ready(1)
    await workers[0].restart()
    await until(lambda: "sql" in workers[0].adapters)
    await router.router.UnloadAdapter(router_pb2.RouterUnloadAdapterRequest(name="sql"))
    await until_known(router, "sql")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.router.UnloadAdapter(router_pb2.RouterUnloadAdapterRequest(name="sql"))
    assert error_of(caught.value).reason is Reason.MODEL_NOT_FOUND


@pytest.mark.parametrize(("name", "path", "field"), [("sql", "/broken", "lora_path"), ("m", "/a", "lora_name")])
async def test_what_cannot_be_loaded_is_refused_by_its_field(
    start_router: StartRouter, start_worker: StartWorker, name: str, path: str, field: str
) -> None:
    router = await start_router(await start_worker())
    await router.until_ready(1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.router.LoadAdapter(router_pb2.RouterLoadAdapterRequest(name=name, path=path))
    error = error_of(caught.value)
    assert (error.reason, error.field) == (Reason.INVALID_FIELD, field)


async def test_the_list_of_adapters_is_only_made_again_after_a_change(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router, workers = await two_with_adapter(start_router, start_worker)
    served, links = ServedList(), router.fleet.links
    before = served.of(links())
    assert [(each.adapter.name, each.num_workers) for each in before] == [("sql", 2)]
    assert served.of(links()) is before
    workers[0].has_adapter("law", in_memory=False)
    await until_known(router, "law", workers[0])
    after = served.of(links())
    assert [(each.adapter.name, each.num_workers, each.num_in_memory) for each in after] == [
        ("law", 1, 0),
        ("sql", 2, 2),
    ]
    await workers[1].kill()
    await until(lambda: [each.num_workers for each in served.of(links())] == [1, 1])
