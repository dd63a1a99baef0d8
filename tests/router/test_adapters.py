"""Placement of requests with LoRA adapters, and loading of adapters through the router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from headrace.protos import inference_pb2, router_pb2, worker_pb2
from headrace.protos.block_hash import block_hashes, root_hash
from headrace.protos.model_identity import model_identity
from headrace.protos.status import Reason, error_of
from headrace.router.fleet.fleet_adapters import ServedList
from headrace.router.fleet.links import LinkState
from headrace.router.fleet.worker_adapters import WorkerAdapters
from tests.router.conftest import RunningRouter, StartRouter, StartWorker, collected
from tests.router.fake_worker import BLOCK_SIZE, FakeWorker, answer, until

PROMPT = list(range(20))


async def until_known(router: object, name: str, *workers: FakeWorker) -> None:
    """Wait until the router knows the adapter at exactly these workers."""
    addresses = {worker.address for worker in workers}
    links = router.fleet.links  # type: ignore[attr-defined]
    await until(lambda: {link.address for link in links() if link.adapters.find(name)} == addresses)


def load_request(path: str, **fields: bool) -> router_pb2.RouterLoadAdapterRequest:
    return router_pb2.RouterLoadAdapterRequest(name="sql", path=path, **fields)


async def until_path(router: object, path: str) -> None:
    """Wait until the router knows the adapter `sql` with this path at all its workers."""
    links = router.fleet.links  # type: ignore[attr-defined]
    await until(lambda: all((found := link.adapters.find("sql")) and found.path == path for link in links()))


async def restarted(routers: list[RunningRouter], *workers: FakeWorker) -> None:
    """Restart the workers, which then have no adapters, and wait until the routers know."""
    for worker in workers:
        await worker.kill()
        worker.adapters.clear()
    for router in routers:
        await router.until_ready(len(router.fleet.links()) - len(workers))
    for worker in workers:
        await worker.restart()
    for router in routers:
        await router.until_ready(len(router.fleet.links()))


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


async def test_requests_can_name_an_adapter_as_soon_as_it_is_loaded(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    """The report of a worker, by which requests are placed, comes after its answer."""
    worker = await start_worker()
    router = await start_router(worker)
    worker.tells_late_s = 0.1
    await router.router.LoadAdapter(load_request("/adapters/sql"))
    assert (await router.generate(PROMPT, adapter="sql"))[0] == answer(PROMPT, 20)
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


async def begun(router: RunningRouter, worker: FakeWorker) -> dict[str, Any]:
    """The fields with which a gateway continues an answer of the adapter `sql`, of which the worker, which is now
    dead, has generated five tokens."""
    worker.budget = 5
    call = router.call(PROMPT, adapter="sql")
    messages = [await call.read() for _ in range(5)]
    call.cancel()
    await worker.kill()
    worker.budget = None
    await until(lambda: not all(link.is_ready for link in router.fleet.links()))
    tokens = [token for message in messages for token in message.token_ids]
    identity = messages[0].model_identity
    return {"adapter": "sql", "resume_token_ids": tokens, "attempt": 1, "model_identity": identity}


async def failure_of(call: Any) -> Reason:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collected(call)
    return error_of(caught.value).reason


async def test_an_answer_waits_for_the_worker_that_has_its_adapter(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    first, other = await start_worker("first"), await start_worker("other")
    first.has_adapter("sql")
    router = await start_router(first, other, capacity_wait_s=0.2)
    await until_known(router, "sql", first)
    resumed = await begun(router, first)
    assert await failure_of(router.call(PROMPT, **resumed)) is Reason.NO_CAPACITY, "a gateway asks again"
    await first.restart()
    await router.until_ready(2)
    assert (await router.generate(PROMPT, **resumed))[0] == answer(PROMPT, 20)[5:]
    assert not other.requests
    await router.until_idle()


async def test_an_answer_waits_while_its_adapter_is_loaded_again(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker, capacity_wait_s=0.2)
    await router.router.LoadAdapter(load_request("/v1"))
    await until_known(router, "sql", worker)
    resumed = await begun(router, worker)
    worker.adapters.clear()
    worker.may_load.clear()
    await worker.restart()
    await router.until_ready(1)
    assert await failure_of(router.call(PROMPT, **resumed)) is Reason.NO_CAPACITY
    worker.may_load.set()
    await until_known(router, "sql", worker)
    assert (await router.generate(PROMPT, **resumed))[0] == answer(PROMPT, 20)[5:]
    await router.until_idle()


async def test_without_that_adapter_the_answer_ends_clearly(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    """Its worker comes back without the adapter."""
    first, other = await start_worker("first"), await start_worker("other")
    first.has_adapter("sql")
    router = await start_router(first, other, capacity_wait_s=0.2)
    await until_known(router, "sql", first)
    resumed = await begun(router, first)
    first.adapters.clear()
    await first.restart()
    await router.until_ready(2)
    assert await failure_of(router.call(PROMPT, **resumed)) is Reason.MODEL_CHANGED
    assert not other.requests
    assert len(first.requests) == 1


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


async def test_an_adapter_that_was_unloaded_through_another_router_stays_unloaded(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    first, second = routers = [await start_router(worker) for _ in range(2)]
    await first.router.LoadAdapter(load_request("/v1"))
    await first.router.LoadAdapter(router_pb2.RouterLoadAdapterRequest(name="law", path="/law"))
    for router in routers:
        await until_known(router, "law", worker)
    await second.router.UnloadAdapter(router_pb2.RouterUnloadAdapterRequest(name="sql"))
    await until_known(first, "sql")
    first.fleet.links()[0].suspect("a call failed")
    worker.report()
    await first.until_ready(1)
    await restarted(routers, worker)
    await until_known(first, "law", worker)
    assert "sql" not in worker.adapters
    # It can be loaded again.
    await first.router.LoadAdapter(load_request("/v1"))
    await until_known(first, "sql", worker)
    await restarted(routers, worker)
    await until_known(first, "sql", worker)


@pytest.mark.parametrize("num_restarted", [1, 2])
async def test_an_adapter_that_was_replaced_through_another_router_stays_replaced(
    start_router: StartRouter, start_worker: StartWorker, num_restarted: int
) -> None:
    workers = [await start_worker(name) for name in "ab"]
    first, second = [await start_router(*workers) for _ in range(2)]
    await first.router.LoadAdapter(load_request("/v1"))
    for router in (first, second):
        await until_path(router, "/v1")
    await second.router.LoadAdapter(load_request("/v2", in_place=True))
    for router in (first, second):
        await until_path(router, "/v2")
    await second.server.stop(0.0)  # so only the first one loads it again
    await restarted([first], *workers[:num_restarted])
    await until_known(first, "sql", *workers)
    await until_path(first, "/v2")


async def test_a_worker_that_only_fell_silent_gets_what_was_loaded_meanwhile(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    silent, other = workers = [await start_worker(name) for name in "ab"]
    router = await start_router(*workers)
    silent.is_silent = True
    await until(lambda: any(link.state is LinkState.UNREACHABLE for link in router.fleet.links()))
    await router.router.LoadAdapter(load_request("/v1"))
    assert (set(silent.adapters), set(other.adapters)) == (set(), {"sql"})
    silent.is_silent = False
    await until_known(router, "sql", *workers)


def test_only_changes_of_a_running_worker_are_told() -> None:
    told: list[tuple[str, str | None]] = []
    adapters = WorkerAdapters(lambda name, adapter: told.append((name, adapter and adapter.path)))

    def adapter(name: str, path: str = "/v1", sha256: str = "a", **fields: bool) -> worker_pb2.Adapter:
        return worker_pb2.Adapter(name=name, path=path, sha256=sha256, **fields)

    def take(epoch: int, *known: worker_pb2.Adapter) -> None:
        adapters.take(worker_pb2.WatchResponse(epoch=epoch, adapters=worker_pb2.AdapterList(adapters=known)))

    def change(*known: worker_pb2.Adapter, unloaded: Sequence[str] = ()) -> None:
        changes = worker_pb2.AdapterChanges(known=known, unloaded=unloaded)
        adapters.take(worker_pb2.WatchResponse(epoch=2, adapter_changes=changes))

    take(1, adapter("sql"), adapter("law"))
    take(2, adapter("law", "/v2"), adapter("sum"))
    assert told == [], "it restarted"
    take(2, adapter("law", "/v2", is_in_memory=True), adapter("new"))
    assert told == [("sum", None)]
    change(adapter("law", "/v2"), adapter("new", sha256="b"), adapter("law 2"))
    assert told[1:] == [("new", "/v1")]
    change(adapter("law", "/v3"), unloaded=["new", "never seen"])
    assert told[2:] == [("new", None), ("never seen", None), ("law", "/v3")]


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
