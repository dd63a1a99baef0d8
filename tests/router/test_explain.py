"""Explain: the policy's terms for a request that is not placed."""

from __future__ import annotations

import grpc
import pytest

from headrace.protos import router_pb2
from headrace.protos.status import Reason, error_of
from headrace.router import service
from tests.router.conftest import StartRouter, StartWorker
from tests.router.fake_worker import BLOCK_SIZE, until

PROMPT = list(range(100, 100 + 8 * BLOCK_SIZE + 1))


async def test_the_choice_its_reason_and_every_term_are_told(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    warm, cold, gone = [await start_worker(name) for name in ("warm", "cold", "gone")]
    router = await start_router(warm, cold, gone)
    warm.store(PROMPT)
    gone.report(draining=True)
    cold.report(num_uncached_tokens=500)
    await until(lambda: len(router.fleet.index) == 8 and router.fleet.num_ready == 2)
    told = await router.router.Explain(router_pb2.ExplainRequest(model="m", token_ids=PROMPT, max_tokens=10))
    assert (told.worker_id, told.reason) == ("warm", router_pb2.PLACEMENT_REASON_PREFIX)
    assert told.num_prompt_tokens == len(PROMPT)
    assert [worker.worker_id for worker in told.workers] == ["warm", "cold", "gone"]
    first, second, third = told.workers
    assert (first.num_cached_tokens, second.num_cached_tokens) == (8 * BLOCK_SIZE, 0)
    # 1000 tokens/s: a millisecond a token.
    assert (first.cost.prefill_ms, second.cost.prefill_ms) == pytest.approx((1.0, float(len(PROMPT))))
    assert 0 < second.cost.backlog_ms <= 500
    assert second.cost.ttft_ms == second.cost.queue_ms + second.cost.backlog_ms + second.cost.prefill_ms
    terms = ("queue", "backlog", "prefill", "decode", "eviction", "pressure", "transfer", "image")
    for worker in (first, second):
        assert sum(getattr(worker.cost, f"{term}_ms") for term in terms) == pytest.approx(worker.cost.total_ms)
    assert not third.HasField("cost")
    assert (third.state, third.detail) == (router_pb2.WORKER_STATE_DRAINING, "the worker drains")


async def test_explaining_books_nothing_and_decides_as_placing_does(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    workers = [await start_worker(name) for name in "ab"]
    router = await start_router(*workers)
    await router.generate(PROMPT, session_key="s")
    for _ in range(3):
        told = await router.router.Explain(router_pb2.ExplainRequest(token_ids=PROMPT, session_key="s"))
        assert told.reason == router_pb2.PLACEMENT_REASON_SESSION
        assert told.worker_id == next(worker.name for worker in workers if worker.requests)
    await router.until_idle()
    assert sum(len(worker.requests) for worker in workers) == 1


async def test_another_salt_finds_nothing_in_the_caches(start_router: StartRouter, start_worker: StartWorker) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    worker.store(PROMPT)
    await until(lambda: len(router.fleet.index) == 8)
    told = await router.router.Explain(router_pb2.ExplainRequest(token_ids=PROMPT, cache_salt="other"))
    assert (told.workers[0].num_cached_tokens, told.reason) == (0, router_pb2.PLACEMENT_REASON_ONLY)


async def test_without_a_ready_worker_nobody_is_chosen(start_router: StartRouter, start_worker: StartWorker) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    await worker.kill()
    await until(lambda: router.fleet.num_ready == 0)
    told = await router.router.Explain(router_pb2.ExplainRequest(token_ids=PROMPT))
    assert (told.worker_id, told.reason) == ("", router_pb2.PLACEMENT_REASON_UNSPECIFIED)
    assert told.workers[0].state == router_pb2.WORKER_STATE_UNREACHABLE


@pytest.mark.parametrize(
    ("asked", "reason", "field"),
    [
        (router_pb2.ExplainRequest(model="m"), Reason.INVALID_FIELD, "token_ids"),
        (router_pb2.ExplainRequest(model="nosuch", token_ids=PROMPT), Reason.MODEL_NOT_FOUND, "model"),
    ],
)
async def test_what_cannot_be_explained_is_refused_with_the_field(
    start_router: StartRouter,
    start_worker: StartWorker,
    asked: router_pb2.ExplainRequest,
    reason: Reason,
    field: str,
) -> None:
    router = await start_router(await start_worker())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.router.Explain(asked)
    error = error_of(caught.value)
    assert (error.reason, error.field) == (reason, field)


async def test_only_a_few_placements_are_explained_at_a_time(
    start_router: StartRouter, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_MAX_EXPLAINING", 0)
    router = await start_router(await start_worker())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.router.Explain(router_pb2.ExplainRequest(token_ids=PROMPT))
    assert error_of(caught.value).reason is Reason.QUEUE_FULL


async def test_a_prompt_that_no_context_holds_is_not_explained(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    for size in (worker.card.max_context_tokens, 5_000_000):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.router.Explain(router_pb2.ExplainRequest(token_ids=[5] * size))
        assert error_of(caught.value).reason is Reason.CONTEXT_TOO_LONG
