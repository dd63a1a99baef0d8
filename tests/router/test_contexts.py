"""Workers of one model with different contexts: where requests go, and how long answers become."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import pytest

from headrace.protos import inference_pb2, router_pb2, worker_pb2
from headrace.protos.model_identity import model_identity
from headrace.protos.status import Reason, StatusError, error_of
from headrace.router.dispatch.attempt import MAX_MOVES
from headrace.router.fleet import known_models
from headrace.router.fleet.pools import Pools
from tests.router.conftest import RunningRouter, StartRouter, StartWorker, collected
from tests.router.fake_worker import FakeWorker, answer, until

SMALL, LARGE = 1024, 4096
LONG = [number % 9000 for number in range(2000)]
ROLES = {"p": worker_pb2.ROLE_PREFILL, "d": worker_pb2.ROLE_DECODE, "b": worker_pb2.ROLE_UNSPECIFIED}


async def fleet(
    start_router: StartRouter,
    start_worker: StartWorker,
    contexts: Sequence[int],
    roles: str = "bb",
    *,
    is_largest_last: bool = True,
    **options: float,
) -> tuple[RunningRouter, list[FakeWorker]]:
    """A worker for each context and letter of `roles`. The one with the largest context has the last address, or the
    first."""
    workers = [await start_worker(f"{role}{number}") for number, role in enumerate(roles)]
    by_address = sorted(workers, key=lambda worker: worker.address)
    largest = by_address[-1 if is_largest_last else 0]
    number = contexts.index(max(contexts))
    place = workers.index(largest)
    workers[number], workers[place] = workers[place], workers[number]
    for worker, context, role in zip(workers, contexts, roles, strict=True):
        worker.card.role, worker.card.max_context_tokens = ROLES[role], context
        worker.card.kv_layout, worker.card.kv_block_bytes = "l", 1000
        await worker.kill()
        await worker.restart()
    return await start_router(*workers, **options), workers


def count(*workers: FakeWorker) -> list[int]:
    return [len(worker.requests) for worker in workers]


async def busy(router: RunningRouter, *workers: FakeWorker) -> None:
    """Make these workers so busy that requests prefer others."""
    for worker in workers:
        worker.report(num_running=10, num_uncached_tokens=10**6)
    addresses = {worker.address for worker in workers}
    links = [link for link in router.fleet.links() if link.address in addresses]
    await until(lambda: all(link.reported.load.num_uncached_tokens for link in links))


@pytest.mark.parametrize("is_largest_last", [True, False])
async def test_a_prompt_goes_to_a_worker_that_it_fits(
    start_router: StartRouter, start_worker: StartWorker, is_largest_last: bool
) -> None:
    router, (small, large) = await fleet(start_router, start_worker, [SMALL, LARGE], is_largest_last=is_largest_last)
    await busy(router, large)
    assert (await router.generate(LONG))[0] == answer(LONG, 20)
    assert (await router.generate(LONG[:1010]))[0] == answer(LONG[:1010], 20), "answers count, too"
    assert count(small, large) == [0, 2]
    await router.generate(LONG[:100])
    assert count(small, large) == [1, 2]
    listed = await router.router.ListModels(router_pb2.ListModelsRequest())
    assert [card.max_context_tokens for card in listed.models] == [LARGE]


@pytest.mark.parametrize("is_largest_last", [True, False])
async def test_an_answer_stays_with_the_prompt_if_it_fits_nowhere_else(
    start_router: StartRouter, start_worker: StartWorker, is_largest_last: bool
) -> None:
    router, (prefill, decode) = await fleet(
        start_router, start_worker, [LARGE, SMALL], "pd", is_largest_last=is_largest_last
    )
    assert (await router.generate(LONG))[0] == answer(LONG, 20)
    assert count(prefill, decode) == [1, 0]
    assert router.metrics.prefills._value.get() == 0


async def test_a_prompt_that_fits_only_where_answers_are_generated_goes_there(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router, (prefill, decode) = await fleet(start_router, start_worker, [SMALL, LARGE], "pd")
    assert (await router.generate(LONG))[0] == answer(LONG, 20)
    assert count(prefill, decode) == [0, 1]


@pytest.mark.parametrize("is_largest_last", [True, False])
async def test_a_begun_answer_waits_for_a_worker_that_it_fits(
    start_router: StartRouter, start_worker: StartWorker, is_largest_last: bool
) -> None:
    router, (small, large) = await fleet(start_router, start_worker, [SMALL, LARGE], is_largest_last=is_largest_last)
    large.budget = 5
    call, tokens = router.call(LONG), list[int]()
    while len(tokens) < 5:
        tokens += (await call.read()).token_ids
    await large.kill()
    await until(lambda: router.fleet.num_ready == 1)
    large.budget = None
    await large.restart()
    while (message := await call.read()) is not grpc.aio.EOF:
        tokens += message.token_ids
    assert tokens == answer(LONG, 20)
    assert count(small) == [0]
    await router.until_idle()


async def test_an_answer_that_fits_no_ready_worker_fails_so_that_it_is_tried_again(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router, (small, large) = await fleet(start_router, start_worker, [SMALL, LARGE], capacity_wait_s=0.2)
    large.report(draining=True)
    await until(lambda: router.fleet.num_ready == 1)
    for begun in ([], answer(LONG, 5)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.generate(LONG, resume_token_ids=begun)
        assert error_of(caught.value).reason is Reason.NO_CAPACITY
    large.report(draining=False)
    await router.until_ready(2)
    call = router.call(LONG, resume_token_ids=answer(LONG, 5))
    assert (await collected(call, 5))[0] == answer(LONG, 20)[5:]
    assert count(small, large) == [0, 1]


async def test_an_answer_waits_for_a_worker_that_has_not_been_reached_yet(
    start_router: StartRouter, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the one with the longer context. After a long time, it counts as gone."""
    small = await start_worker("small")
    small.card.max_context_tokens = SMALL
    router = await start_router(small, capacity_wait_s=0.1)
    await router.router.Register(router_pb2.RegisterRequest(worker_id="large", address="127.0.0.1:1"))
    begun = {"resume_token_ids": answer(LONG, 5), "model_identity": model_identity(small.card)}
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(LONG, **begun)
    assert error_of(caught.value).reason is Reason.NO_CAPACITY
    monkeypatch.setattr(known_models, "REMEMBER_MODEL_S", 0.0)
    tokens, finish = await router.generate(LONG, **begun)
    assert (tokens, finish.reason) == ([], inference_pb2.FINISH_REASON_LENGTH)


@pytest.mark.parametrize("with_token", [False, True])
async def test_an_answer_that_outgrows_its_worker_continues_at_a_larger_one(
    start_router: StartRouter, start_worker: StartWorker, with_token: bool
) -> None:
    router, (small, large) = await fleet(start_router, start_worker, [SMALL, LARGE])
    small.ends_with_token = large.ends_with_token = with_token
    await busy(router, large)
    prompt, num_tokens = LONG[:800], 400
    tokens, finish = await router.generate(prompt, num_tokens)
    assert tokens == answer(prompt, num_tokens)
    assert (finish.reason, finish.num_generated_tokens) == (inference_pb2.FINISH_REASON_LENGTH, num_tokens)
    assert count(small, large) == [1, 1]
    (continued,) = (inference_pb2.GenerateRequest.FromString(raw) for raw in large.requests)
    assert len(continued.resume_token_ids) == SMALL - len(prompt)
    assert continued.kv_source == "" or continued.kv_source == small.address
    await router.until_idle()


async def test_an_answer_at_the_end_of_the_longest_context_ends(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router, (small, large) = await fleet(start_router, start_worker, [SMALL, SMALL + 50])
    await busy(router, large)
    prompt = LONG[:800]
    tokens, finish = await router.generate(prompt, 10_000)
    assert tokens == answer(prompt, SMALL + 50 - len(prompt))
    assert finish.reason == inference_pb2.FINISH_REASON_LENGTH
    assert count(small, large) == [1, 1]


@pytest.mark.parametrize("num_delivered", [100, 224, 300])
async def test_an_answer_ends_if_the_workers_that_it_would_fit_have_left(
    start_router: StartRouter, start_worker: StartWorker, num_delivered: int
) -> None:
    """An answer of any length continues as far as the workers that are left allow, and ends there."""
    small = await start_worker("small")
    small.card.max_context_tokens = SMALL
    router = await start_router(small)
    prompt = LONG[:800]
    whole = answer(prompt, 400)
    call = router.call(prompt, 400, resume_token_ids=whole[:num_delivered])
    tokens, finish = await collected(call, num_delivered)
    assert tokens == whole[num_delivered : SMALL - len(prompt)]
    assert finish.reason == inference_pb2.FINISH_REASON_LENGTH
    assert finish.num_generated_tokens == num_delivered + len(tokens)
    assert count(small) == [1 if tokens else 0]


async def test_an_answer_outgrows_its_worker_while_the_larger_one_restarts(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router, (small, large) = await fleet(start_router, start_worker, [SMALL, LARGE])
    await busy(router, large)
    small.budget = 10
    prompt, tokens = LONG[:1000], list[int]()
    call = router.call(prompt, 30)
    while len(tokens) < 10:
        tokens += (await call.read()).token_ids
    await large.kill()
    await until(lambda: router.fleet.num_ready == 1)
    small.budget = None
    while len(tokens) < SMALL - len(prompt):
        tokens += (await call.read()).token_ids
    await large.restart()
    while (message := await call.read()) is not grpc.aio.EOF:
        tokens += message.token_ids
    assert tokens == answer(prompt, 30)
    await router.until_idle()


async def test_the_refusal_of_the_only_worker_that_fits_is_passed_on(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router, (_, large) = await fleet(start_router, start_worker, [SMALL, LARGE])
    large.error = StatusError(Reason.QUEUE_FULL, "it is full", retry_after_s=3.0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.generate(LONG)
    assert (error_of(caught.value).reason, error_of(caught.value).message) == (Reason.QUEUE_FULL, "it is full")


async def test_an_answer_moves_a_few_times_at_most(
    start_router: StartRouter, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if placement and the choice to move disagree."""
    router, (prefill, decode) = await fleet(start_router, start_worker, [LARGE, LARGE], "pd")
    monkeypatch.setattr(Pools, "for_next_stage", lambda pools, request, members, index, priors: members)
    monkeypatch.setattr(Pools, "continues_elsewhere", lambda *_: True)
    decode.report(num_running=10, num_uncached_tokens=10**9, num_free_blocks=0)
    await busy(router, decode)
    tokens = 3 * MAX_MOVES
    assert (await router.generate(LONG, tokens))[0] == answer(LONG, tokens)
    assert sum(count(prefill, decode)) <= MAX_MOVES + 1
