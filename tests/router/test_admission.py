"""Limits, refusals and waiting at the door of a router. Real servers, scripted workers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from headrace.protos import inference_pb2
from headrace.protos.status import Reason, StatusError, error_of
from tests.router.conftest import RunningRouter, StartRouter, StartWorker, collected
from tests.router.fake_worker import FakeWorker, answer, until

PROMPT = [7, 8, 9, 10, 11]
LONG_PROMPT = list(range(1000))
FULL = {"num_waiting": 9}
ROOM = {"num_waiting": 0}


async def failure_of(call: Any) -> StatusError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collected(call)
    return error_of(caught.value)


async def until_full(router: RunningRouter, worker: FakeWorker) -> None:
    """The worker says that it takes no more, and the router knows."""
    worker.report(**FULL)
    await until(lambda: all(link.reported.load.num_waiting for link in router.fleet.links()))


async def asked(router: RunningRouter, number: int, **fields: Any) -> asyncio.Task[Any]:
    """A request that waits, the `number`-th one (from 1)."""
    task = asyncio.create_task(router.generate([*PROMPT, number], **fields))
    await until(lambda: router.server.admission.num_waiting >= number or task.done())
    return task


def prompts_of(worker: FakeWorker) -> list[int]:
    """Numbers of the requests in the order in which they came to the worker."""
    return [inference_pb2.GenerateRequest.FromString(raw).token_ids[-1] for raw in worker.requests]


async def test_a_request_waits_while_all_workers_are_full_and_goes_when_one_has_room(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    first, second = [await start_worker(name) for name in "ab"]
    router = await start_router(first, second)
    first.report(num_running=16, **FULL)
    await until_full(router, second)
    waiting = await asked(router, 1)
    assert not first.requests
    assert not second.requests
    second.report(**ROOM)
    tokens, _ = await waiting
    assert tokens == answer([*PROMPT, 1], 20)
    assert (len(first.requests), len(second.requests)) == (0, 1)
    await router.until_idle()


async def test_who_waits_is_told_that_the_tokenizer_of_its_prompt_is_gone(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    old, new = await start_worker("old"), await start_worker("new", tokenizer_sha256="cd" * 32)
    router = await start_router(old, new)
    old.report(num_running=16, **FULL)
    await until_full(router, new)
    gone = asyncio.create_task(failure_of(router.call([*PROMPT, 1], tokenizer_sha256="cd" * 32)))
    await until(lambda: router.server.admission.num_waiting == 1)
    waiting = await asked(router, 2, tokenizer_sha256="ab" * 32)
    await new.kill()
    await router.until_ready(1)
    old.report(**ROOM)
    assert (await gone).reason is Reason.MODEL_CHANGED
    assert (await waiting)[0] == answer([*PROMPT, 2], 20), "it does not wait behind the other"
    assert len(old.requests) == 1
    await router.until_idle()


async def test_one_worker_with_room_is_enough_not_to_wait(start_router: StartRouter, start_worker: StartWorker) -> None:
    full, free = [await start_worker(name) for name in "ab"]
    router = await start_router(full, free)
    full.report(num_waiting=9, num_running=16)
    await until(lambda: any(link.reported.load.num_waiting for link in router.fleet.links()))
    await router.generate(PROMPT)
    assert (len(full.requests), len(free.requests)) == (0, 1)


async def test_room_is_given_out_no_more_often_than_there_is(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    worker.load.max_num_seqs = 4
    router = await start_router(worker)
    worker.budget = 0
    calls = [router.call(PROMPT) for _ in range(8)]
    reading = [asyncio.create_task(collected(call)) for call in calls]
    # Four seats, and one that waits behind them.
    await until(lambda: len(worker.requests) == 5 and router.server.admission.num_waiting == 3)
    worker.budget = None
    for task in reading:
        await task
    await router.until_idle()


async def test_those_that_wait_go_by_priority_and_in_turn_between_tenants(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    worker.load.max_num_seqs = 1
    router = await start_router(worker, tenant_weights={"heavy": 2.0})
    await until_full(router, worker)
    order = [
        ("flood", 0),
        ("flood", 0),
        ("flood", 0),
        ("heavy", 0),
        ("heavy", 0),
        ("heavy", 0),
        ("late", 0),
        ("vip", 1),
    ]
    tasks = [
        await asked(router, number, tenant=tenant, priority=priority)
        for number, (tenant, priority) in enumerate(order, 1)
    ]
    worker.report(**ROOM)
    for task in tasks:
        await task
    assert prompts_of(worker) == [8, 1, 4, 7, 5, 2, 6, 3]


async def test_a_tenant_whose_clients_give_up_and_ask_again_keeps_its_share(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    worker.load.max_num_seqs = 1
    router = await start_router(worker)
    await until_full(router, worker)
    tasks = [await asked(router, number, tenant="patient") for number in (1, 2, 3)]
    for _ in range(5):
        gives_up = router.call([*PROMPT, 4], tenant="impatient")
        await until(lambda: router.server.admission.num_waiting == 4)
        gives_up.cancel()
        await until(lambda: router.server.admission.num_waiting == 3)
    tasks.append(await asked(router, 4, tenant="impatient"))
    worker.report(**ROOM)
    for task in tasks:
        await task
    assert prompts_of(worker) == [1, 4, 2, 3]


async def test_a_worker_is_told_how_long_a_request_may_still_wait_and_judges_it(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker, max_ttft_s=5.0)
    # At 1000 tokens/s the prompt comes after what the router allows. Only the worker knows what of that is waiting.
    worker.report(num_running=9, num_uncached_tokens=100_000)
    await until(lambda: router.fleet.links()[0].reported.load.num_uncached_tokens)
    await collected(router.call(LONG_PROMPT))
    await collected(router.call(LONG_PROMPT, max_wait_ms=300))
    await collected(router.call(LONG_PROMPT, max_wait_ms=9000))
    told = [inference_pb2.GenerateRequest.FromString(raw).max_wait_ms for raw in worker.requests]
    assert [0 < ms <= most for ms, most in zip(told, (5000, 300, 5000), strict=True)] == [True] * 3


async def test_a_refusal_of_all_workers_is_passed_on_with_its_time_to_come_back(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    workers = [await start_worker(name) for name in ("a", "b")]
    for worker in workers:
        worker.error = StatusError(Reason.QUEUE_FULL, "it would wait for too long", retry_after_s=7.0)
    router = await start_router(*workers)
    error = await failure_of(router.call(PROMPT))
    assert (error.reason, error.retry_after_s) == (Reason.QUEUE_FULL, 7.0)
    assert [len(worker.requests) for worker in workers] == [1, 1]
    await router.until_idle()


async def test_more_refusals_than_a_request_may_lose_workers_end_nothing(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    """`--max-attempts` bounds lost workers only."""
    workers = [await start_worker(name) for name in "abcdef"]
    for worker in workers:
        worker.error = StatusError(Reason.QUEUE_FULL, "it would wait for too long", retry_after_s=7.0)
    router = await start_router(*workers)
    error = await failure_of(router.call(PROMPT))
    assert (error.reason, error.retry_after_s) == (Reason.QUEUE_FULL, 7.0)
    assert [len(worker.requests) for worker in workers] == [1] * 6
    workers[-1].error = None
    await router.generate(PROMPT)
    assert len(workers[-1].requests) == 2
    await router.until_idle()


async def test_a_slower_worker_in_time_is_better_than_a_cheaper_one_too_late(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    late, slow = [await start_worker(name) for name in ("late", "slow")]
    late.load.num_running, late.load.num_uncached_tokens = 4, 4_000
    slow.load.decode_step_ms = 1000
    router = await start_router(late, slow)
    await router.generate(LONG_PROMPT)
    assert (len(late.requests), len(slow.requests)) == (1, 0)
    # Others, since the first one is cached now.
    other = [token + 1 for token in LONG_PROMPT]
    await collected(router.inference.Generate(inference_pb2.GenerateRequest(token_ids=other), timeout=2))
    assert (len(late.requests), len(slow.requests)) == (1, 1)


async def test_who_would_wait_too_long_in_the_queue_is_refused_at_once(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    worker.load.max_num_seqs = 1
    # An answer of 128 tokens at 10 ms a step each 1.28 s.
    router = await start_router(worker, max_ttft_s=3.0)
    await until_full(router, worker)
    waiting = [await asked(router, number) for number in (1, 2)]
    error = await failure_of(router.call(PROMPT))
    assert (error.reason, error.retry_after_s) == (Reason.QUEUE_FULL, 0.9)
    worker.report(**ROOM)
    await asyncio.gather(*waiting)
    await router.until_idle()


async def test_who_has_waited_too_long_is_refused(start_router: StartRouter, start_worker: StartWorker) -> None:
    worker = await start_worker()
    worker.load.max_num_seqs = 0
    router = await start_router(worker, max_ttft_s=0.2)
    worker.report(max_num_seqs=1, num_waiting=9, decode_step_ms=0.1)
    await until(lambda: router.fleet.links()[0].reported.load.num_waiting)
    error = await failure_of(router.call(PROMPT))
    assert error.reason is Reason.QUEUE_FULL
    await router.until_idle()


async def test_the_queue_is_bounded_and_a_flood_gives_way(start_router: StartRouter, start_worker: StartWorker) -> None:
    worker = await start_worker()
    router = await start_router(worker, max_waiting=3)
    await until_full(router, worker)
    flood = [await asked(router, number, tenant="flood") for number in (1, 2, 3)]
    error = await failure_of(router.call(PROMPT, tenant="flood"))
    assert error.reason is Reason.QUEUE_FULL
    assert error.retry_after_s is not None
    other = asyncio.create_task(router.generate([*PROMPT, 4], tenant="other"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await flood[2]
    assert error_of(caught.value).reason is Reason.QUEUE_FULL
    assert router.server.admission.num_waiting == 3
    worker.report(**ROOM)
    await asyncio.gather(*flood[:2], other)
    assert sorted(prompts_of(worker)) == [1, 2, 4]
    await router.until_idle()


@pytest.mark.parametrize("tenant", ["other", "flood"])
async def test_a_flood_for_one_model_gives_way_to_requests_for_another(
    start_router: StartRouter, start_worker: StartWorker, tenant: str
) -> None:
    """Also to those of the same tenant: without API keys there is only one."""
    away, busy = await start_worker("a", model="away"), await start_worker("b", model="busy")
    router = await start_router(away, busy, max_waiting=3)
    await away.kill()
    await router.until_ready(1)
    busy.report(**FULL)
    await until(lambda: any(link.reported.load.num_waiting for link in router.fleet.links()))
    flood = [await asked(router, number, model="away", tenant="flood") for number in (1, 2, 3)]
    waiting = asyncio.create_task(router.generate([*PROMPT, 4], model="busy", tenant=tenant))
    await until(lambda: waiting.done() or flood[2].done())
    assert not waiting.done()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await flood[2]
    assert error_of(caught.value).reason is Reason.QUEUE_FULL
    router.server.admission.check()
    busy.report(**ROOM)
    assert (await waiting)[0] == answer([*PROMPT, 4], 20)
    await away.restart()
    await asyncio.gather(*flood[:2])
    await router.until_idle()


async def test_a_queue_that_gave_way_whole_is_no_reason_to_wait(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    away, busy = await start_worker("a", model="away"), await start_worker("b", model="busy")
    router = await start_router(away, busy, max_waiting=1)
    await away.kill()
    await router.until_ready(1)
    busy.report(**FULL)
    await until(lambda: any(link.reported.load.num_waiting for link in router.fleet.links()))
    low = await asked(router, 1, model="away", priority=-1)
    high = asyncio.create_task(router.generate([*PROMPT, 2], model="busy"))
    with pytest.raises(grpc.aio.AioRpcError):
        await low
    await away.restart()
    await router.until_ready(2)
    await router.generate([*PROMPT, 3], model="away")
    busy.report(**ROOM)
    await high
    await router.until_idle()


async def test_a_tenant_has_no_more_in_flight_than_it_may(start_router: StartRouter, start_worker: StartWorker) -> None:
    worker = await start_worker()
    router = await start_router(worker, max_in_flight_per_tenant=2)
    worker.budget = 0
    held = [router.call(PROMPT, tenant="t") for _ in range(2)]
    await until(lambda: len(worker.requests) == 2)
    error = await failure_of(router.call(PROMPT, tenant="t"))
    assert (error.reason, error.retry_after_s) == (Reason.QUOTA, 1.0)
    assert "'t'" in error.message
    worker.budget = None
    await router.generate(PROMPT, tenant="other")
    # Somebody reads this answer already: it goes on.
    await router.generate(PROMPT, tenant="t", resume_token_ids=answer(PROMPT, 3), attempt=1)
    for call in held:
        call.cancel()
    await until(lambda: router.server.inference.num_in_flight == 0)
    await router.generate(PROMPT, tenant="t")
    await router.until_idle()


async def test_an_answer_that_has_begun_neither_waits_nor_is_refused(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker, max_ttft_s=0.5)
    worker.report(num_uncached_tokens=10_000, **FULL)
    await until(lambda: router.fleet.links()[0].reported.load.num_waiting)
    tokens, _ = await router.generate(PROMPT, resume_token_ids=answer(PROMPT, 3), attempt=1)
    assert tokens == answer(PROMPT, 20)[3:]


async def test_a_client_that_leaves_the_queue_leaves_nothing(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    await until_full(router, worker)
    calls = [router.call([*PROMPT, number]) for number in range(1, 6)]
    reading = [asyncio.create_task(call.read()) for call in calls]
    await until(lambda: router.server.admission.num_waiting == 5)
    for call in calls[:4]:
        call.cancel()
    await until(lambda: router.server.admission.num_waiting == 1)
    worker.report(**ROOM)
    await until(lambda: prompts_of(worker) == [5])
    calls[4].cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    await until(lambda: router.server.inference.num_in_flight == 0)
    await router.until_idle()


async def test_the_workers_of_one_model_being_full_is_nothing_to_another(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    x, y = await start_worker("a", model="x"), await start_worker("b", model="y", fingerprint="e" * 64)
    router = await start_router(x, y)
    x.report(**FULL)
    await until(lambda: any(link.reported.load.num_waiting for link in router.fleet.links()))
    waiting = await asked(router, 1, model="x")
    await router.generate(PROMPT, model="y")
    assert (len(x.requests), len(y.requests)) == (0, 1)
    x.report(**ROOM)
    await waiting


async def test_a_worker_that_comes_back_takes_those_that_waited_for_the_dead_one(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    await worker.kill()
    await until(lambda: router.fleet.num_ready == 0)
    waiting = [await asked(router, number) for number in (1, 2)]
    await worker.restart()
    await asyncio.gather(*waiting)
    await router.until_idle()


async def test_a_stopping_router_sends_those_that_wait_elsewhere(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    await until_full(router, worker)
    failures = [asyncio.create_task(failure_of(router.call(PROMPT))) for _ in range(2)]
    await until(lambda: router.server.admission.num_waiting == 2)
    await router.server.stop(5.0)
    assert [(await failure).reason for failure in failures] == [Reason.DRAINING] * 2
    assert not worker.requests


async def test_what_waits_and_what_was_refused_is_counted(start_router: StartRouter, start_worker: StartWorker) -> None:
    worker = await start_worker()
    router = await start_router(worker, max_waiting=1)
    await until_full(router, worker)
    waiting = await asked(router, 1)

    def value(name: str, **labels: str) -> float | None:
        return router.metrics.registry.get_sample_value(f"headrace_router_{name}", labels)

    assert (value("requests_waiting"), value("requests_waiting_max")) == (1, 1)
    await failure_of(router.call(PROMPT))
    assert value("refusals_total", reason="queue_full") == 1
    worker.report(**ROOM)
    await waiting
    assert value("requests_waiting") == 0


async def test_a_restart_of_the_only_worker_does_not_count_as_waiting_for_room(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker, max_ttft_s=3.0, capacity_wait_s=1000.0)
    await worker.kill()
    await until(lambda: router.fleet.num_ready == 0)
    waiting = await asked(router, 1)
    router.server.admission._clock = lambda: time.monotonic() + 9.0
    await worker.restart()
    tokens, _ = await waiting
    assert tokens == answer([*PROMPT, 1], 20)


async def test_that_requests_wait_for_a_worker_is_told_to_the_operator_once(
    start_router: StartRouter, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await start_worker()
    router = await start_router(worker, capacity_wait_s=0.1)
    await worker.kill()
    await until(lambda: router.fleet.num_ready == 0)
    for _ in range(3):
        error = await failure_of(router.call(PROMPT, model="m"))
        assert error.reason is Reason.NO_CAPACITY
        assert "try again" in error.message
    told = [one.getMessage() for one in caplog.records if "wait" in one.getMessage()]
    assert told == ["requests for m wait: none of its workers takes requests"]
