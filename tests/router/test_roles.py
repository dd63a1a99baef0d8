"""Workers that are set aside for prompts or for answers: where requests go, and how answers continue."""

from __future__ import annotations

import grpc
import pytest

from headrace.protos import inference_pb2, router_pb2, worker_pb2
from tests.router.conftest import RunningRouter, StartRouter, StartWorker
from tests.router.fake_worker import BLOCK_SIZE, FakeWorker, answer, until

# 1,000 tokens a second: more than a second, and less.
LONG = [number % 9000 for number in range(2000)]
SHORT = [5000 + number for number in range(100)]


async def fleet(
    start_router: StartRouter, start_worker: StartWorker, roles: str, layouts: str | None = None
) -> tuple[RunningRouter, list[FakeWorker]]:
    """A worker for each letter of `roles`: p, d or b. Those with the same letter in `layouts` exchange blocks."""
    values = {"p": worker_pb2.ROLE_PREFILL, "d": worker_pb2.ROLE_DECODE, "b": worker_pb2.ROLE_UNSPECIFIED}
    workers = []
    for number, role in enumerate(roles):
        worker = await start_worker(f"{role}{number}")
        worker.card.role = values[role]
        worker.card.kv_layout = layouts[number] if layouts else "l"
        worker.card.kv_block_bytes = 1000
        await worker.kill()
        await worker.restart()
        workers.append(worker)
    return await start_router(*workers), workers


def requests_of(worker: FakeWorker) -> list[inference_pb2.GenerateRequest]:
    return [inference_pb2.GenerateRequest.FromString(raw) for raw in worker.requests]


def count(*workers: FakeWorker) -> list[int]:
    return [len(worker.requests) for worker in workers]


async def test_a_long_prompt_is_computed_by_one_worker_and_answered_by_another(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router, (prefill, decode) = await fleet(start_router, start_worker, "pd")
    tokens, finish = await router.generate(LONG)
    assert tokens == answer(LONG, 20)
    assert finish.reason == inference_pb2.FINISH_REASON_LENGTH
    (first,), (second,) = requests_of(prefill), requests_of(decode)
    assert (list(first.resume_token_ids), first.kv_source) == ([], "")
    num_resumed = len(second.resume_token_ids)
    assert list(second.resume_token_ids) == answer(LONG, num_resumed)
    assert (second.kv_source, second.kv_source_tokens) == (prefill.address, len(LONG))
    assert second.attempt == 1
    await until(lambda: prefill.num_running == 0)
    assert router.metrics.prefills._value.get() == 1
    assert router.metrics.resumes._value.get() == 0
    await router.until_idle()


async def test_short_prompts_and_answers_of_one_message_stay(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router, (prefill, decode, both) = await fleet(start_router, start_worker, "pdb")
    for _ in range(6):
        await router.generate(SHORT)
    assert count(prefill) == [0]
    prefill.requests.clear()
    both.report(num_running=16, num_uncached_tokens=10**6)
    await until(lambda: any(link.reported.load.num_running for link in router.fleet.links()))
    prefill.eos_at = 0
    num_short = count(decode, both)
    await router.generate(LONG)
    assert (count(prefill), count(decode, both)) == ([1], num_short), "the answer had ended"


@pytest.mark.parametrize("roles", ["bb", "pp", "dd", "pb"])
async def test_without_two_sides_nothing_moves(
    start_router: StartRouter, start_worker: StartWorker, roles: str
) -> None:
    router, workers = await fleet(start_router, start_worker, roles, "lm" if roles == "pb" else "ll")
    assert (await router.generate(LONG))[0] == answer(LONG, 20)
    assert sum(count(*workers)) == 1
    assert router.metrics.prefills._value.get() == 0


async def test_a_prompt_that_is_cached_is_not_long(start_router: StartRouter, start_worker: StartWorker) -> None:
    router, (prefill, decode) = await fleet(start_router, start_worker, "pd")
    prefill.store(LONG)
    await until(lambda: len(router.fleet.index) == len(LONG) // BLOCK_SIZE)
    assert (await router.generate(LONG))[0] == answer(LONG, 20)
    (request,) = requests_of(decode)
    assert (count(prefill), request.kv_source) == ([0], prefill.address)


async def test_answers_outlive_both_workers(start_router: StartRouter, start_worker: StartWorker) -> None:
    router, (prefill, decode) = await fleet(start_router, start_worker, "pd")
    decode.budget = 3
    call = router.call(LONG)
    tokens: list[int] = []
    while len(tokens) < 4:
        tokens += (await call.read()).token_ids
    await decode.kill()
    prefill.budget = 5
    while len(tokens) < 8:
        tokens += (await call.read()).token_ids
    assert count(prefill, decode) == [2, 1], "the only one that is left goes on"
    decode.budget = None
    await decode.restart()
    prefill.budget = None
    while (message := await call.read()) is not grpc.aio.EOF:
        tokens += message.token_ids
    assert tokens == answer(LONG, 20)
    await router.until_idle()


async def test_a_worker_that_dies_with_the_prompt_is_replaced(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router, (first, second, decode) = await fleet(start_router, start_worker, "ppd")
    first.budget = second.budget = 0
    call = router.call(LONG)
    await until(lambda: first.is_stuck or second.is_stuck)
    victim, other = (first, second) if first.is_stuck else (second, first)
    other.budget = None
    await victim.kill()
    tokens = [token_id async for message in call for token_id in message.token_ids]
    assert tokens == answer(LONG, 20)
    (request,) = requests_of(decode)
    assert request.kv_source == other.address
    assert count(other) == [1]


async def test_roles_are_told(start_router: StartRouter, start_worker: StartWorker) -> None:
    router, (prefill, decode) = await fleet(start_router, start_worker, "pd")
    listed = await router.router.ListWorkers(router_pb2.ListWorkersRequest())
    assert [worker.role for worker in listed.workers] == [worker_pb2.ROLE_DECODE, worker_pb2.ROLE_PREFILL]
    explained = await router.router.Explain(router_pb2.ExplainRequest(token_ids=LONG))
    by_name = {worker.worker_id: worker for worker in explained.workers}
    assert explained.worker_id == prefill.name
    assert by_name[prefill.name].role == worker_pb2.ROLE_PREFILL
    assert not by_name[decode.name].HasField("cost"), "it does not get the prompt"
