"""A request's way through a router: bytes, placement, deaths, cancellation, errors. Real servers, scripted workers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest

from headrace.common.transport import session_server
from headrace.common.transport.session_client import SessionClient
from headrace.common.transport.wire_request import SharedPart, WireRequest
from headrace.protos import inference_pb2, worker_pb2
from headrace.protos.answer_bounds import MAX_REQUEST_BYTES
from headrace.protos.status import Reason, StatusError, error_of
from headrace.router.dispatch.generation import Generation
from headrace.router.placement.policy import MAX_GIVEN_BACK
from tests.router.conftest import StartRouter, StartWorker, collected
from tests.router.fake_worker import BLOCK_SIZE, EOS, FakeWorker, answer, until

PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15]


def requests_of(worker: FakeWorker) -> list[inference_pb2.GenerateRequest]:
    return [inference_pb2.GenerateRequest.FromString(raw) for raw in worker.requests]


async def failure_of(call: Any) -> StatusError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collected(call)
    return error_of(caught.value)


async def test_bytes_pass_unchanged_in_both_directions(start_router: StartRouter, start_worker: StartWorker) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    request = inference_pb2.GenerateRequest(
        request_id="r", token_ids=PROMPT, sampling=inference_pb2.SamplingParams(max_tokens=5, seed=3), tenant="t"
    )
    # An unknown field, as a newer client would send it, has to arrive too.
    raw = request.SerializeToString() + b"\xfa\x01\x03new"
    received = [message async for message in router.channel.unary_stream("/headrace.v1.Inference/Generate")(raw)]
    (arrived,) = map(inference_pb2.GenerateRequest.FromString, worker.requests)
    assert arrived.max_wait_ms > 0, "the router's own word"
    assert arrived.belief.placement_id > 0, "and what it is known by"
    arrived.ClearField("max_wait_ms")
    arrived.ClearField("belief")
    for name in ("kv_source", "kv_source_tokens"):
        assert arrived.HasField(name), "a caller's own does not count"
        arrived.ClearField(name)
    assert arrived.SerializeToString() == raw
    assert received == worker.sent
    assert len(received) == 6


async def test_request_id_and_traceparent_go_along_and_nothing_else(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    metadata = [("x-request-id", "abc"), ("traceparent", "00-1-2-01"), ("authorization", "secret")]
    await router.generate(PROMPT, metadata=metadata)
    (seen,) = worker.metadata
    assert (seen["x-request-id"], seen["traceparent"]) == ("abc", "00-1-2-01")
    assert "authorization" not in seen


async def test_a_request_goes_where_the_longest_prefix_is(start_router: StartRouter, start_worker: StartWorker) -> None:
    workers = [await start_worker(name) for name in "abc"]
    router = await start_router(*workers)
    workers[1].store(PROMPT[:BLOCK_SIZE])
    workers[2].store(PROMPT)
    await until(lambda: len(router.fleet.index) == 3)
    for _ in range(5):
        await router.generate(PROMPT)
    assert [len(worker.requests) for worker in workers] == [0, 0, 5]


async def test_load_decides_between_workers_with_the_same_prefix(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    busy, idle = [await start_worker(name) for name in ("busy", "idle")]
    router = await start_router(busy, idle)
    busy.report(num_running=4, num_uncached_tokens=100_000)
    for worker in (busy, idle):
        worker.store(PROMPT)
    await until(lambda: len(router.fleet.index) == 4)
    for _ in range(5):
        await router.generate(PROMPT)
    assert (len(busy.requests), len(idle.requests)) == (0, 5)


async def test_a_burst_of_cold_siblings_stays_together_and_strangers_spread(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    workers = [await start_worker(name) for name in "ab"]
    router = await start_router(*workers)
    shared = list(range(100, 2100))
    for number in range(6):
        await router.generate([*shared, number], max_tokens=1)
    assert sorted(len(worker.requests) for worker in workers) == [0, 6]
    for worker in workers:
        worker.budget = 0
        worker.requests.clear()
    calls = [router.call([number] * 2000, max_tokens=1) for number in range(4)]
    for call in calls:
        asyncio.ensure_future(call.read())  # noqa: RUF006
    await until(lambda: sum(len(worker.requests) for worker in workers) == 4)
    assert [len(worker.requests) for worker in workers] == [2, 2]
    for call in calls:
        call.cancel()


async def test_a_request_that_is_given_back_is_placed_again_with_what_its_worker_has(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    warm, other = [await start_worker(name) for name in ("warm", "other")]
    for worker in (warm, other):
        worker.num_watchers = 2
    router = await start_router(warm, other)
    warm.store(PROMPT)
    await until(lambda: len(router.fleet.index) == 2)
    busy = worker_pb2.Load(num_arrived=3, arrived_tokens=100_000, version=9)
    busy.MergeFrom(warm.load)
    warm.gives_back = worker_pb2.GivenBack(load=busy)
    prompt = [*PROMPT, *range(100, 140)]
    tokens, _ = await router.generate(prompt)
    assert tokens == answer(prompt, 20)
    (first,), (second,) = requests_of(warm), requests_of(other)
    assert (first.belief.num_requests, first.belief.num_uncached_tokens) == (0, 0)
    assert first.belief.slack_ms > 0
    assert first.belief.num_cached_tokens == 2 * BLOCK_SIZE
    assert second.belief.num_cached_tokens == 0
    assert (second.attempt, list(second.token_ids)) == (0, prompt), "nobody has taken it before"
    assert router.metrics.given_back._value.get() == 1
    assert router.metrics.resumes._value.get() == 0
    assert all(counter._value.get() == 0 for counter in router.metrics.worker_refusals.values())
    loads = {link.worker_id: link.reported.load for link in router.fleet.links()}
    assert (loads["warm"].num_arrived, loads["warm"].arrived_tokens) == (3, 100_000)
    await router.generate(prompt)
    assert len(other.requests) == 2, "the blocks are expected where the request went"
    warm.report()  # older than what is known
    warm.report(stored=[1])
    await until(lambda: len(router.fleet.index) == 3)
    assert {link.worker_id: link.reported.load for link in router.fleet.links()}["warm"].num_arrived == 3
    warm.report(version=10)
    await until(lambda: not any(link.reported.load.num_arrived for link in router.fleet.links()))
    await router.until_idle()


async def test_a_request_that_is_given_back_after_a_loss_counts_as_one_that_continued_once(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    lost, *busy = [await start_worker(name) for name in ("lost", "busy", "busy too")]
    for worker in (lost, *busy):
        worker.num_watchers = 2
    router = await start_router(lost, *busy)
    lost.store(PROMPT)
    await until(lambda: len(router.fleet.index) == 2)
    lost.bare_error = (grpc.StatusCode.UNAVAILABLE, "Socket closed")
    for worker in busy:
        worker.gives_back = worker_pb2.GivenBack(load=worker.load)
    await router.generate(PROMPT)
    assert len(lost.requests) == 1
    assert router.metrics.given_back._value.get() == MAX_GIVEN_BACK
    assert router.metrics.resumes._value.get() == 1
    await router.until_idle()


async def test_a_request_is_not_given_back_for_ever(start_router: StartRouter, start_worker: StartWorker) -> None:
    workers = [await start_worker(name) for name in "ab"]
    for worker in workers:
        worker.num_watchers = 2
        worker.gives_back = worker_pb2.GivenBack(load=worker.load)
    router = await start_router(*workers)
    assert (await router.generate(PROMPT))[0] == answer(PROMPT, 20)
    assert sum(len(worker.requests) for worker in workers) == MAX_GIVEN_BACK + 1
    await router.until_idle()


async def test_a_router_that_is_alone_allows_nothing_to_be_given_back(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    workers = [await start_worker(name) for name in "ab"]
    for worker in workers:
        worker.num_watchers = 1
        worker.gives_back = worker_pb2.GivenBack(load=worker.load)
    router = await start_router(*workers)
    await router.generate(PROMPT)
    assert sum(len(worker.requests) for worker in workers) == 1


async def test_a_session_stays_on_its_worker(start_router: StartRouter, start_worker: StartWorker) -> None:
    workers = [await start_worker(name) for name in "abcd"]
    router = await start_router(*workers)
    for number in range(8):
        await router.generate([number, 1, 2], session_key="s")
    assert sorted(len(worker.requests) for worker in workers) == [0, 0, 0, 8]


@pytest.mark.parametrize("delivered", [0, 1, 7, 19])
async def test_a_death_mid_stream_loses_and_repeats_nothing(
    start_router: StartRouter, start_worker: StartWorker, delivered: int
) -> None:
    workers = [await start_worker(name) for name in "ab"]
    router = await start_router(*workers)
    for worker in workers:
        worker.budget = delivered
    call = router.call(PROMPT)
    answered = asyncio.create_task(collected(call))
    await until(lambda: any(worker.is_stuck for worker in workers))
    victim, other = workers if workers[0].requests else workers[::-1]
    other.budget = None
    await victim.kill()
    tokens, finish = await answered
    assert tokens == answer(PROMPT, 20)
    assert (finish.reason, finish.num_generated_tokens) == (inference_pb2.FINISH_REASON_LENGTH, 20)
    (resumed,) = requests_of(other)
    assert resumed.attempt == 1
    assert list(resumed.resume_token_ids) == tokens[: len(resumed.resume_token_ids)]
    assert len(resumed.resume_token_ids) <= delivered
    await router.until_idle()


async def test_images_go_along_and_again_to_the_worker_that_continues(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    workers = [await start_worker(name) for name in "ab"]
    router = await start_router(*workers)
    for worker in workers:
        worker.budget = 3
    images = [inference_pb2.Image(data=bytes(300_000)), inference_pb2.Image(data=b"two", detail=1)]
    prompt = [7, *range(1 << 31, (1 << 31) + 8), 9]
    answered = asyncio.create_task(collected(router.call(prompt, images=images)))
    await until(lambda: any(worker.is_stuck for worker in workers))
    victim, other = workers if workers[0].requests else workers[::-1]
    other.budget = None
    await victim.kill()
    tokens, _ = await answered
    assert tokens == answer(prompt, 20)
    for worker, attempt in ((victim, 0), (other, 1)):
        (request,) = requests_of(worker)
        assert request.attempt == attempt
        assert list(request.images) == images
        assert list(request.token_ids) == prompt


def test_a_request_in_flight_keeps_its_images_once() -> None:
    shared = SharedPart(inference_pb2.GenerateRequest(token_ids=PROMPT, images=[{"data": b"a"}]).SerializeToString())
    own = inference_pb2.GenerateRequest(request_id="r", images=[{"data": b"b"}]).SerializeToString()

    async def write(raw: bytes) -> None:
        raise AssertionError("nothing is answered")

    generation = Generation(WireRequest(own, (shared,)), write, lambda: None, max_attempts=3)
    assert not generation.request.images
    assert generation.request.request_id == "r"
    belief = inference_pb2.Belief()
    for number in (0, 1):
        generation.attempts.number = number
        raw = generation.next_attempt(1000, belief).joined()
        sent = inference_pb2.GenerateRequest.FromString(raw)
        assert [image.data for image in sent.images] == [b"a", b"b"]
        assert (list(sent.token_ids), sent.attempt) == (PROMPT, number)


async def test_two_consecutive_deaths_are_survived(start_router: StartRouter, start_worker: StartWorker) -> None:
    workers = [await start_worker(name) for name in "abc"]
    router = await start_router(*workers)
    for worker in workers:
        worker.budget = 3
    answered = asyncio.create_task(router.generate(PROMPT))
    for _ in range(2):
        await until(lambda: any(worker.is_stuck for worker in workers))
        await next(worker for worker in workers if worker.is_stuck).kill()
    for worker in workers:
        worker.budget = None
    tokens, _ = await answered
    assert tokens == answer(PROMPT, 20)
    assert sorted(request.attempt for worker in workers for request in requests_of(worker)) == [0, 1, 2]
    await router.until_idle()


async def test_a_resumption_counts_on_from_what_the_client_resumed(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    workers = [await start_worker(name) for name in "ab"]
    router = await start_router(*workers)
    for worker in workers:
        worker.budget = 4
    resume = answer(PROMPT, 5)
    answered = asyncio.create_task(router.generate(PROMPT, resume_token_ids=resume, attempt=3))
    await until(lambda: any(worker.is_stuck for worker in workers))
    victim, other = workers if workers[0].requests else workers[::-1]
    other.budget = None
    await victim.kill()
    tokens, _ = await answered
    assert resume + tokens == answer(PROMPT, 20)
    assert requests_of(other)[0].attempt == 4


@pytest.mark.parametrize("plain_grpc", [False, True])
async def test_a_hanging_worker_is_given_up_and_the_answer_goes_on_elsewhere(
    start_router: StartRouter, start_worker: StartWorker, plain_grpc: bool
) -> None:
    workers = [await start_worker(name) for name in "ab"]
    router = await start_router(*workers, plain_grpc=plain_grpc)
    for worker in workers:
        worker.budget = 5
    answered = asyncio.create_task(router.generate(PROMPT))
    await until(lambda: any(worker.is_stuck for worker in workers))
    victim, other = workers if workers[0].requests else workers[::-1]
    other.budget = None
    victim.is_silent = True
    tokens, _ = await answered
    assert tokens == answer(PROMPT, 20)
    await until(lambda: victim.num_running == 0)
    await router.until_idle()
    assert (victim.num_sessions, other.num_sessions) == ((0, 0) if plain_grpc else (1, 1))


async def test_a_lost_finish_is_made_up_for_when_the_last_token_ends_the_answer(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    workers = [await start_worker(name) for name in "ab"]
    router = await start_router(*workers)
    for worker in workers:
        worker.budget, worker.eos_at = 6, 5
    answered = asyncio.create_task(router.generate(PROMPT))
    await until(lambda: any(len(worker.sent) == 6 for worker in workers))
    victim, other = workers if workers[0].requests else workers[::-1]
    await until(lambda: router.fleet.num_in_flight == 1 and victim.budget == 0)
    await victim.kill()
    tokens, finish = await answered
    assert tokens == [*answer(PROMPT, 5), EOS]
    assert (finish.reason, finish.stop_token_id) == (inference_pb2.FINISH_REASON_STOP, EOS)
    assert (finish.num_prompt_tokens, finish.num_generated_tokens) == (len(PROMPT), 6)
    assert other.requests == [] or other.budget != 6  # asked only if the last tokens were lost with the worker
    await router.until_idle()


@pytest.mark.parametrize("fault", ["start_pos_offset", "end_without_finish"])
async def test_a_stream_that_does_not_fit_is_fenced(
    start_router: StartRouter, start_worker: StartWorker, fault: str
) -> None:
    workers = [await start_worker(name) for name in "ab"]
    router = await start_router(*workers)
    setattr(workers[0], fault, 1)
    workers[0].store(PROMPT)
    await until(lambda: len(router.fleet.index) == 2)
    tokens, _ = await router.generate(PROMPT)
    assert tokens == answer(PROMPT, 20)
    assert len(workers[0].requests) == 1
    await router.until_idle()


async def test_what_a_worker_sends_after_the_finish_changes_nothing(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    worker.talks_on = True
    assert (await router.generate(PROMPT))[0] == answer(PROMPT, 20)
    assert len(worker.requests) == 1
    await router.until_idle()


async def test_a_cancelled_request_is_cancelled_at_the_worker_at_once(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    worker.budget = 3
    call = router.call(PROMPT)
    await call.read()
    call.cancel()
    await until(lambda: worker.num_cancelled == 1)
    await until(lambda: router.server.inference.num_in_flight == 0)
    await router.until_idle()


async def test_a_worker_that_restarts_on_its_address_answers_the_request_that_waits(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    worker.budget = 4
    answered = asyncio.create_task(router.generate(PROMPT))
    await until(lambda: worker.requests and worker.budget == 0)
    await worker.kill()
    await until(lambda: router.fleet.num_ready == 0)
    worker.budget = None
    await worker.restart()
    tokens, _ = await answered
    assert tokens == answer(PROMPT, 20)
    assert (await router.generate(PROMPT))[0] == tokens
    await router.until_idle()


async def test_no_capacity_is_said_with_a_time_to_retry(start_router: StartRouter, start_worker: StartWorker) -> None:
    worker = await start_worker()
    router = await start_router(worker, capacity_wait_s=0.3)
    await worker.kill()
    await until(lambda: router.fleet.num_ready == 0)
    error = await failure_of(router.call(PROMPT, model="m"))
    assert (error.reason, error.retry_after_s) == (Reason.NO_CAPACITY, 1.0)
    empty = await start_router(capacity_wait_s=0.1)
    error = await failure_of(empty.call(PROMPT))
    assert error.reason is Reason.NO_CAPACITY
    assert "--" not in error.message, "flags are for operators"
    await router.until_idle()


async def test_workers_that_keep_failing_end_in_worker_lost(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    workers = [await start_worker(name) for name in "abcde"]
    router = await start_router(*workers)
    for worker in workers:
        worker.bare_error = (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
    error = await failure_of(router.call(PROMPT))
    assert error.reason is Reason.WORKER_LOST
    assert sum(len(worker.requests) for worker in workers) == 4
    await router.until_idle()


async def test_a_request_that_kills_its_workers_does_not_end_the_fleet(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    workers = [await start_worker(name) for name in "abcd"]
    router = await start_router(*workers)
    for worker in workers:
        worker.bare_error = (grpc.StatusCode.UNAVAILABLE, "Socket closed")
    for request_id in ("first", "again"):
        error = await failure_of(router.call(PROMPT, request_id=request_id, sampling={"seed": len(request_id)}))
        assert (error.reason, error.retry_after_s) == (Reason.INTERNAL, None)
        assert "2 workers were lost" in error.message
    assert sum(len(worker.requests) for worker in workers) == 2
    for worker in workers:
        worker.bare_error = None
    tokens, _ = await router.generate([1, 2, 3])
    assert tokens == answer([1, 2, 3], 20)
    await router.until_idle()


async def test_a_request_that_kills_a_worker_counts_also_after_the_worker_was_forgotten(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    """The model loads for longer than a lease lasts, so the worker registers as if it were new."""
    worker = await start_worker()
    worker.budget = 0
    router = await start_router(lease_s=0.3, capacity_wait_s=2.0)
    router.fleet.register("w", worker.address)
    failed = asyncio.create_task(failure_of(router.call(PROMPT)))
    for _ in range(2):
        await until(lambda: worker.is_stuck)
        await worker.kill()
        await until(lambda: not router.fleet.links())
        await worker.restart()
        router.fleet.register("w", worker.address)
    worker.budget = None
    error = await failed
    assert error.reason is Reason.INTERNAL
    assert "2 workers were lost" in error.message
    assert len(worker.requests) == 2
    await router.until_idle()


async def test_requests_that_a_worker_has_not_begun_are_company(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    workers = [await start_worker(name) for name in "abc"]
    router = await start_router(*workers)
    for worker in workers:
        worker.budget = 0
        worker.report(num_arrived=2)
    await until(lambda: all(link.reported.load.num_arrived == 2 for link in router.fleet.links()))
    answered = asyncio.create_task(router.generate(PROMPT))
    for _ in range(2):
        await until(lambda: any(worker.is_stuck for worker in workers))
        victim = next(worker for worker in workers if worker.is_stuck)
        await victim.kill()
    for worker in workers:
        worker.budget = None
    assert (await answered)[0] == answer(PROMPT, 20)
    assert sum(len(worker.requests) for worker in workers) == 3


async def test_the_choices_of_a_prompt_that_kills_its_workers_count_as_one(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    workers = [await start_worker(name) for name in "abcdef"]
    router = await start_router(*workers)
    for worker in workers:
        worker.budget = 0
    choices = [asyncio.create_task(failure_of(router.call(PROMPT, sampling={"seed": i}))) for i in range(4)]
    num_killed = 0
    while not all(choice.done() for choice in choices):
        victims = [worker for worker in workers if worker.is_stuck]
        num_killed += len(victims)
        await asyncio.gather(*(victim.kill() for victim in victims))
        await asyncio.sleep(0.01)
    assert {(await choice).reason for choice in choices} == {Reason.INTERNAL}
    assert num_killed < len(workers)
    await router.until_idle()


async def test_a_lone_worker_may_be_lost_often_while_it_brings_tokens(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    worker.budget = 2
    answered = asyncio.create_task(router.generate(PROMPT))
    for _ in range(6):
        await until(lambda: worker.is_stuck)
        await worker.kill()
        await until(lambda: router.fleet.num_ready == 0)
        worker.budget = 2
        await worker.restart()
    worker.budget = None
    assert (await answered)[0] == answer(PROMPT, 20)
    await router.until_idle()


async def test_a_new_router_takes_an_answer_that_has_begun_for_one_whose_worker_comes_back(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker("a", model="x")
    tokens, identity = await begun(await start_router(worker), PROMPT)
    other = await start_worker("b", model="y")
    router = await start_router(other)
    resumed = {"resume_token_ids": tokens, "attempt": 1, "model_identity": identity}
    waiting = asyncio.create_task(router.generate(PROMPT, model="x", **resumed))
    new = await failure_of(router.call(PROMPT, model="x"))
    assert new.reason is Reason.MODEL_NOT_FOUND
    assert not waiting.done()
    router.fleet.register("a", worker.address)
    rest, _ = await waiting
    assert tokens + rest == answer(PROMPT, 20)


async def test_an_unknown_model_is_named_with_those_there_are(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(await start_worker("a", model="x"), await start_worker("b", model="y"))
    error = await failure_of(router.call(PROMPT, model="z"))
    assert (error.reason, error.field) == (Reason.MODEL_NOT_FOUND, "model")
    assert "'z'" in error.message
    assert "x, y" in error.message
    ambiguous = await failure_of(router.call(PROMPT))
    assert (ambiguous.reason, ambiguous.field) == (Reason.INVALID_FIELD, "model")


async def test_each_request_goes_to_a_worker_of_its_model(start_router: StartRouter, start_worker: StartWorker) -> None:
    x, y = await start_worker("a", model="x"), await start_worker("b", model="y", fingerprint="e" * 64)
    router = await start_router(x, y)
    for model in "xyx":
        await router.generate(PROMPT, model=model)
    assert (len(x.requests), len(y.requests)) == (2, 1)


async def test_a_prompt_goes_to_workers_with_the_tokenizer_that_made_it(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    old, new = await start_worker("old"), await start_worker("new", tokenizer_sha256="cd" * 32)
    router = await start_router(old, new)
    for i in range(6):
        await router.generate([*PROMPT, i], tokenizer_sha256="cd" * 32)
    assert (len(old.requests), len(new.requests)) == (0, 6)
    new.store(PROMPT * 20)
    await router.generate(PROMPT * 20, tokenizer_sha256="ab" * 32)
    assert len(old.requests) == 1, "although the other has it cached"
    failure = await failure_of(router.call(PROMPT, tokenizer_sha256="ef" * 32))
    assert (failure.reason, failure.field, failure.retry_after_s) == (Reason.MODEL_CHANGED, "tokenizer_sha256", 2.0)
    assert "a tokenizer that no worker of model 'm' has any more; send the request again" in failure.message
    await new.kill()
    await router.until_ready(1)
    failure = await failure_of(router.call(PROMPT, tokenizer_sha256="cd" * 32))
    assert failure.reason is Reason.MODEL_CHANGED
    assert (len(old.requests), len(new.requests)) == (1, 6)
    await router.until_idle()


async def test_a_prompt_with_images_goes_to_workers_that_see_them_as_it_has_them(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    """As while workers restart one by one with another --max-image-pixels, or with images at all."""
    blind, old, new = [await start_worker(name) for name in ("blind", "old", "new")]
    old.card.images.max_view_pixels, new.card.images.max_view_pixels = 100, 200
    blind.card.max_context_tokens += 1
    router = await start_router(blind, old, new)
    card = router.fleet.models()["m"]
    assert card.images.max_view_pixels == 200, "gateways are told of the images"
    for i in range(6):
        await router.generate([*PROMPT, i], image_view_pixels=200)
    assert [len(worker.requests) for worker in (blind, old, new)] == [0, 0, 6]
    new.store(PROMPT * 20)
    await router.generate(PROMPT * 20, image_view_pixels=100)
    assert len(old.requests) == 1, "although the other has it cached"
    failure = await failure_of(router.call(PROMPT, image_view_pixels=300))
    assert (failure.reason, failure.field, failure.retry_after_s) == (Reason.MODEL_CHANGED, "image_view_pixels", 2.0)
    assert "no worker of model 'm' sees images within the bound of 300 pixels any more" in failure.message
    await router.generate(PROMPT)
    await router.until_idle()


async def test_an_answer_is_not_resumed_on_other_weights(start_router: StartRouter, start_worker: StartWorker) -> None:
    first = await start_worker("a")
    router = await start_router(first, capacity_wait_s=0.5)
    first.budget = 4
    answered = asyncio.create_task(failure_of(router.call(PROMPT)))
    await until(lambda: first.budget == 0)
    other = await start_worker("b", fingerprint="e" * 64)
    router.fleet.register("b", other.address)
    await router.until_ready(2)
    await first.kill()
    first.card.fingerprint = "d" * 64
    await first.restart()
    assert (await answered).reason is Reason.MODEL_CHANGED
    assert other.requests == []
    assert len(first.requests) == 1


async def test_an_answer_waits_for_its_own_worker_as_for_a_lone_one(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    first = await start_worker("a")
    other = await start_worker("b", model="m", fingerprint="e" * 64)
    router = await start_router(first, capacity_wait_s=0.3)
    tokens, identity = await begun(router, PROMPT)
    router.fleet.register("b", other.address)
    await router.until_ready(2)
    await first.kill()
    await router.until_ready(1)

    def again() -> Any:
        return router.call(PROMPT, resume_token_ids=tokens, attempt=1, model_identity=identity)

    assert (await failure_of(again())).reason is Reason.NO_CAPACITY, "a gateway asks again while its client waits"
    await first.restart()
    await router.until_ready(2)
    rest, _ = await collected(again(), len(tokens))
    assert tokens + rest == answer(PROMPT, 20)
    assert other.requests == []


async def begun(router: Any, prompt: list[int]) -> tuple[list[int], str]:
    """The first three tokens of an answer and the identity that came with them, as a gateway knows them."""
    call = router.call(prompt)
    tokens: list[int] = []
    identity = ""
    async for message in call:
        tokens.extend(message.token_ids)
        identity = message.model_identity or identity
        if len(tokens) == 3:
            break
    call.cancel()
    return tokens, identity


@pytest.mark.parametrize("changed", ["fingerprint", "tokenizer_sha256"])
async def test_another_router_resumes_an_answer_with_the_model_that_began_it(
    start_router: StartRouter, start_worker: StartWorker, changed: str
) -> None:
    old, new = await start_worker("old"), await start_worker("new", **{changed: "e" * 64})
    first, second = await start_router(old), await start_router(old, new)
    for i in range(20):
        prompt = [*PROMPT, i]
        tokens, identity = await begun(first, prompt)
        rest, _ = await second.generate(prompt, resume_token_ids=tokens, attempt=1, model_identity=identity)
        assert tokens + rest == answer(prompt, 20)
    assert (len(old.requests), len(new.requests)) == (40, 0)


async def test_an_answer_whose_model_is_gone_ends_with_what_to_do(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    old, new = await start_worker("old"), await start_worker("new", fingerprint="e" * 64)
    first = await start_router(old)
    tokens, identity = await begun(first, PROMPT)
    second = await start_router(new, capacity_wait_s=0.2)
    failure = await failure_of(second.call(PROMPT, resume_token_ids=tokens, attempt=1, model_identity=identity))
    assert (failure.reason, new.requests) == (Reason.MODEL_CHANGED, [])
    assert failure.retry_after_s
    assert "ask again" in failure.message


async def test_tokens_of_unknown_weights_are_not_continued_where_workers_differ(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    one = await start_worker("one")
    router = await start_router(one)
    rest, _ = await router.generate(PROMPT, resume_token_ids=answer(PROMPT, 3), attempt=1)
    assert rest == answer(PROMPT, 20)[3:]
    other = await start_worker("other", fingerprint="e" * 64)
    router.fleet.register("other", other.address)
    await router.until_ready(2)
    failure = await failure_of(router.call(PROMPT, resume_token_ids=answer(PROMPT, 3), attempt=1))
    assert failure.reason is Reason.MODEL_CHANGED
    assert (len(one.requests), other.requests) == (1, [])


@pytest.mark.parametrize("reason", [Reason.INVALID_FIELD, Reason.CONTEXT_TOO_LONG, Reason.INTERNAL, Reason.QUEUE_FULL])
async def test_an_error_of_the_worker_passes_with_its_details(
    start_router: StartRouter, start_worker: StartWorker, reason: Reason
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    worker.error = StatusError(reason, "what is wrong", field="sampling.top_p", retry_after_s=2.5)
    error = await failure_of(router.call(PROMPT))
    assert (error.reason, error.message) == (reason, "what is wrong")
    assert (error.field, error.retry_after_s) == ("sampling.top_p", 2.5)
    assert len(worker.requests) == 1
    await router.until_idle()


@pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.DRAINING])
async def test_a_worker_that_refuses_is_passed_over(
    start_router: StartRouter, start_worker: StartWorker, reason: Reason
) -> None:
    refusing, other = [await start_worker(name) for name in "ab"]
    router = await start_router(refusing, other)
    refusing.store(PROMPT)
    await until(lambda: len(router.fleet.index) == 2)
    refusing.error = StatusError(reason, "not now", retry_after_s=1)
    tokens, _ = await router.generate(PROMPT)
    assert tokens == answer(PROMPT, 20)
    assert (len(refusing.requests), len(other.requests)) == (1, 1)
    await router.until_idle()


async def test_a_draining_worker_gets_no_new_requests(start_router: StartRouter, start_worker: StartWorker) -> None:
    draining, other = [await start_worker(name) for name in "ab"]
    router = await start_router(draining, other)
    draining.store(PROMPT)
    draining.report(draining=True)
    await router.until_ready(1)
    await router.generate(PROMPT)
    assert (len(draining.requests), len(other.requests)) == (0, 1)


async def test_what_is_no_request_is_refused(start_router: StartRouter, start_worker: StartWorker) -> None:
    router = await start_router(await start_worker())
    error = await failure_of(router.channel.unary_stream("/headrace.v1.Inference/Generate")(b"\xff\xff"))
    assert error.reason is Reason.INVALID_FIELD


async def test_more_requests_than_the_bound_are_refused(start_router: StartRouter, start_worker: StartWorker) -> None:
    worker = await start_worker()
    router = await start_router(worker, max_in_flight=1)
    worker.budget = 1
    held = router.call(PROMPT)
    await held.read()
    error = await failure_of(router.call(PROMPT))
    assert (error.reason, error.retry_after_s) == (Reason.QUEUE_FULL, 1.0)
    held.cancel()


async def test_more_bytes_of_requests_than_the_bound_are_refused(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker, max_request_bytes=400)
    worker.budget = 1
    held = router.call([300] * 150)
    await held.read()
    error = await failure_of(router.call([300] * 150))
    assert (error.reason, error.retry_after_s) == (Reason.QUEUE_FULL, 1.0)
    assert "400 bytes" in error.message
    sample = router.metrics.registry.get_sample_value
    assert 300 < (sample("headrace_router_request_bytes") or 0) <= 400
    assert sample("headrace_router_request_bytes_max") == 400
    held.cancel()
    await until(lambda: router.server.inference.num_in_flight == 0)
    assert sample("headrace_router_request_bytes") == 0


async def test_sessions_do_not_bound_the_bytes_of_requests_before_the_router_does(start_router: StartRouter) -> None:
    """Or else --max-request-mb would have no effect above their bound."""

    class Large(bytes):
        def __len__(self) -> int:
            return session_server.MAX_REQUEST_BYTES

    router = await start_router()
    sessions = router.server.inference.sessions
    request = WireRequest(Large())
    assert [sessions.begin("host", 0, request) for _ in range(2)] == [None, None]
    for _ in range(2):
        sessions.ended("host", request)


async def test_images_may_have_more_bytes_than_an_answer(start_router: StartRouter, start_worker: StartWorker) -> None:
    worker = await start_worker()
    worker.card.images.max_images, worker.card.images.max_bytes = 2, 12 << 20
    router = await start_router(worker)
    images = [inference_pb2.Image(data=bytes([number]) * (10 << 20)) for number in range(2)]
    tokens, _ = await router.generate(PROMPT, images=images)
    assert tokens == answer(PROMPT, 20)
    (arrived,) = map(inference_pb2.GenerateRequest.FromString, worker.requests)
    assert list(arrived.images) == images


async def test_bytes_that_requests_share_count_until_the_last_of_them_ends(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    worker.budget = 1
    part = SharedPart(inference_pb2.GenerateRequest(token_ids=PROMPT * 200).SerializeToString())
    client = SessionClient(router.channel)
    calls = [
        client.generate(WireRequest(inference_pb2.GenerateRequest(request_id=name).SerializeToString(), (part,)))
        for name in ("a", "b")
    ]
    await until(lambda: len(worker.requests) == 2)
    sample = router.metrics.registry.get_sample_value
    assert len(part.raw) < (sample("headrace_router_request_bytes") or 0) < len(part.raw) + 100
    calls[0].cancel()
    await until(lambda: router.server.inference.num_in_flight == 1)
    assert len(part.raw) < (sample("headrace_router_request_bytes") or 0)
    calls[1].cancel()
    await until(lambda: router.server.inference.num_in_flight == 0)
    assert sample("headrace_router_request_bytes") == 0


async def test_every_bound_of_the_routers_memory_is_a_metric(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(await start_worker(), max_in_flight=7)
    await router.generate(PROMPT, session_key="s")
    sample = router.metrics.registry.get_sample_value
    bounded = ("index_entries", "index_predicted_blocks", "sessions", "requests_waiting", "requests_held")
    for name in (*bounded, "request_bytes", "callers", "unsent_bytes", "unread_bytes"):
        value, most = sample(f"headrace_router_{name}"), sample(f"headrace_router_{name}_max")
        assert value is not None
        assert most is not None
        assert value <= most
    assert sample("headrace_router_requests_held_max") == 7
    assert sample("headrace_router_sessions") == 1
    assert (sample("headrace_router_resident_bytes") or 0) > 1_000_000


async def test_a_body_over_the_cap_is_refused(start_router: StartRouter, start_worker: StartWorker) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    call = router.channel.unary_stream("/headrace.v1.Inference/Generate")(bytes(MAX_REQUEST_BYTES + 1))
    assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert worker.requests == []


async def test_no_booking_is_left_after_random_cancels_and_deaths(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    seed = 20
    rng = random.Random(seed)
    workers = [await start_worker(name) for name in "abc"]
    router = await start_router(*workers, capacity_wait_s=10)
    ends = {"answered": 0, "cancelled": 0}

    async def one(number: int) -> None:
        prompt = [rng.randrange(20) for _ in range(rng.randrange(1, 30))]
        call, stop_after = router.call(prompt, request_id=f"{seed}/{number}"), rng.randrange(40)
        tokens: list[int] = []
        async for message in call:
            tokens.extend(message.token_ids)
            if len(tokens) > stop_after:
                call.cancel()
                ends["cancelled"] += 1
                return
        assert tokens == answer(prompt, 20)
        ends["answered"] += 1

    async def quietly(number: int) -> None:
        try:
            await one(number)
        except asyncio.CancelledError:
            assert not asyncio.current_task().cancelling()  # type: ignore[union-attr]

    async def reaper() -> None:
        while True:
            victim = rng.choice(workers)
            await victim.kill()
            await victim.restart()
            await router.until_ready(3)

    reaping = asyncio.create_task(reaper())
    for start in range(0, 200, 20):
        await asyncio.gather(*(quietly(number) for number in range(start, start + 20)))
    reaping.cancel()
    await asyncio.gather(reaping, return_exceptions=True)
    await until(lambda: router.server.inference.num_in_flight == 0)
    await router.until_idle()
    await until(lambda: all(worker.num_running == 0 for worker in workers))
    assert ends["answered"] > 20
    assert ends["cancelled"] > 20
