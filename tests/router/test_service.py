"""Router's own methods, health and metrics, on a real server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import generate_latest

from headrace.common.transport.session_client import SessionClient
from headrace.common.transport.wire_request import WireRequest
from headrace.protos import inference_pb2, router_pb2
from headrace.protos.status import Reason, StatusError, error_of
from headrace.router import service
from headrace.router.dispatch import generation
from headrace.router.fleet import leases
from headrace.router.placement.candidates import Candidates
from headrace.router.placement.policy import Placement, RequestFacts, place_at
from headrace.router.placement.prompt import Prompt
from tests.patience import patience
from tests.redis_server import RedisServer
from tests.router.conftest import RunningRouter, StartRouter, StartWorker, collected
from tests.router.fake_worker import BLOCK_SIZE, BUNDLE, answer, until


async def health_of(router: RunningRouter, service: str) -> str:
    stub = health_pb2_grpc.HealthStub(router.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


async def accepts_connections(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def bundle_of(router: RunningRouter, sha256: str) -> bytes:
    request = router_pb2.RouterGetTokenizerRequest(sha256=sha256)
    return b"".join([piece.chunk async for piece in router.router.GetTokenizer(request)])


async def test_the_models_are_those_of_live_workers_sorted(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    workers = [await start_worker(name, model=model) for name, model in (("a", "y"), ("b", "x"), ("c", "y"))]
    router = await start_router(*workers)
    listed = await router.router.ListModels(router_pb2.ListModelsRequest())
    assert [card.name for card in listed.models] == ["x", "y"]
    assert listed.models[1] == workers[0].card
    await workers[1].kill()
    await router.until_ready(2)
    listed = await router.router.ListModels(router_pb2.ListModelsRequest())
    assert [card.name for card in listed.models] == ["y"]


async def test_workers_are_listed_reachable_or_not(start_router: StartRouter, start_worker: StartWorker) -> None:
    workers = [await start_worker(name) for name in ("b", "a", "c")]
    router = await start_router(*workers)
    workers[0].report(num_running=3)
    workers[1].report(draining=True)
    await workers[2].kill()
    await router.until_ready(1)
    await until(lambda: any(link.reported.load.num_running == 3 for link in router.fleet.links()))
    listed = (await router.router.ListWorkers(router_pb2.ListWorkersRequest())).workers
    assert [(info.worker_id, info.state) for info in listed] == [
        ("a", router_pb2.WORKER_STATE_DRAINING),
        ("b", router_pb2.WORKER_STATE_READY),
        ("c", router_pb2.WORKER_STATE_UNREACHABLE),
    ]
    assert (listed[1].model, listed[1].load.num_running, listed[1].detail) == ("m", 3, "")
    assert listed[1].address == workers[0].address
    assert listed[2].detail


async def test_requests_in_flight_are_listed(start_router: StartRouter, start_worker: StartWorker) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    worker.budget = 1
    call = router.call([1, 2, 3])
    await call.read()
    (info,) = (await router.router.ListWorkers(router_pb2.ListWorkersRequest())).workers
    assert info.num_in_flight == 1
    call.cancel()


async def test_a_registered_worker_serves_while_it_is_heard_or_its_lease_lasts(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker("w")
    router = await start_router(lease_s=1.0)
    request = router_pb2.RegisterRequest(worker_id="w", address=worker.address)
    assert (await router.router.Register(request)).lease_ms == 1000
    assert (await router.generate([1, 2, 3]))[0] == answer([1, 2, 3], 20)
    await until(lambda: worker.address not in router.fleet._registry.members())
    assert (await router.generate([1, 2, 3]))[0] == answer([1, 2, 3], 20)
    await worker.kill()
    await until(lambda: not router.fleet.links())
    assert len(router.fleet.index) == 0


async def test_a_deregistered_worker_ends_what_it_has_and_gets_no_more(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker, other = await start_worker("w"), await start_worker("v")
    router = await start_router(lease_s=60.0)
    await router.router.Register(router_pb2.RegisterRequest(worker_id="w", address=worker.address))
    await router.until_ready(1)
    worker.budget = 1
    answered = asyncio.create_task(collected(router.call([1, 2, 3])))
    await until(lambda: worker.is_stuck)
    await router.router.Deregister(router_pb2.DeregisterRequest(worker_id="w", address=worker.address))
    await router.router.Register(router_pb2.RegisterRequest(worker_id="v", address=other.address))
    await router.generate([1, 2, 3])
    assert (len(worker.requests), len(other.requests)) == (1, 1)
    worker.budget = None
    assert (await answered)[0] == answer([1, 2, 3], 20)
    await router.until_idle()


async def test_a_registration_without_a_name_is_refused(start_router: StartRouter) -> None:
    router = await start_router()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.router.Register(router_pb2.RegisterRequest(address="127.0.0.1:1"))
    error = error_of(caught.value)
    assert (error.reason, error.field) == (Reason.INVALID_FIELD, "worker_id")


async def test_a_tokenizer_comes_from_a_worker_that_has_it(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(await start_worker())
    assert await bundle_of(router, "ab" * 32) == BUNDLE


@pytest.mark.parametrize(("sha256", "reason"), [("cd" * 32, Reason.NOT_FOUND), ("", Reason.INVALID_FIELD)])
async def test_a_tokenizer_that_nobody_has_is_refused(
    start_router: StartRouter, start_worker: StartWorker, sha256: str, reason: Reason
) -> None:
    router = await start_router(await start_worker())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bundle_of(router, sha256)
    assert error_of(caught.value).reason is reason


async def test_health_tells_of_a_redis_that_takes_no_writes_and_all_else_goes_on(
    start_router: StartRouter, start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_HEALTH_POLL_S", 0.05)
    monkeypatch.setattr(leases, "READ_INTERVAL_S", 0.05)
    redis = RedisServer(tmp_path, "--maxmemory", "1", "--maxmemory-policy", "noeviction").start()
    reader = leases.LeaseReader(redis.url, lambda _: None, lambda: None)
    reader.start()
    router = await start_router(await start_worker(), leases=reader)

    async def until_redis_is(state: router_pb2.RedisState, status: str) -> None:
        async with asyncio.timeout(patience(20)):
            while (await router.router.ListModels(router_pb2.ListModelsRequest())).redis != state:
                await asyncio.sleep(0.02)
            while await health_of(router, "redis") != status:
                await asyncio.sleep(0.02)
        for other in ("", "headrace.v1.Router", "headrace.v1.Inference"):
            assert await health_of(router, other) == "SERVING"

    try:
        await until_redis_is(router_pb2.REDIS_STATE_UNWRITABLE, "NOT_SERVING")
        redis.client().config_set("maxmemory", 0)
        await until_redis_is(router_pb2.REDIS_STATE_OK, "SERVING")
        redis.kill()
        await until_redis_is(router_pb2.REDIS_STATE_UNREACHABLE, "NOT_SERVING")
    finally:
        await reader.close()
        redis.kill()


async def test_a_router_without_redis_tells_of_none(start_router: StartRouter) -> None:
    router = await start_router()
    answer = await router.router.ListModels(router_pb2.ListModelsRequest())
    assert answer.redis == router_pb2.REDIS_STATE_UNSPECIFIED
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await health_of(router, "redis")
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_of_inference_follows_the_workers_and_that_of_the_router_does_not(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker)

    async def reaches(status: str) -> None:
        async with asyncio.timeout(patience(10)):
            while await health_of(router, "headrace.v1.Inference") != status:
                await asyncio.sleep(0.01)

    await reaches("SERVING")
    await worker.kill()
    await reaches("NOT_SERVING")
    assert await health_of(router, "headrace.v1.Router") == "SERVING"
    assert await health_of(router, "") == "SERVING"
    await worker.restart()
    await reaches("SERVING")


async def test_reflection_names_both_services(start_router: StartRouter) -> None:
    router = await start_router()
    stub = reflection_pb2_grpc.ServerReflectionStub(router.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async for response in stub.ServerReflectionInfo(iter([request])):
        names = {service.name for service in response.list_services_response.service}
        assert {"headrace.v1.Inference", "headrace.v1.Router"} <= names
        return
    pytest.fail("no answer")


async def test_metrics_count_placements_resumes_and_ends(start_router: StartRouter, start_worker: StartWorker) -> None:
    workers = [await start_worker(name) for name in "ab"]
    router = await start_router(*workers)
    for worker in workers:
        worker.budget = 2
    answered = asyncio.create_task(router.generate([1, 2, 3]))
    await until(lambda: any(worker.is_stuck for worker in workers))
    victim = next(worker for worker in workers if worker.is_stuck)
    for worker in workers:
        if worker is not victim:
            worker.budget = None
    await victim.kill()
    await answered
    await until(lambda: router.server.inference.num_in_flight == 0)
    page = generate_latest(router.metrics.registry).decode()
    for line in (
        'headrace_router_placements_total{reason="load"} 1.0',
        'headrace_router_placements_total{reason="only"} 1.0',
        "headrace_router_resumes_total 1.0",
        'headrace_router_requests_total{code="OK"} 1.0',
        "headrace_router_requests_in_flight 0.0",
        "headrace_router_decision_seconds_count 2.0",
        "headrace_router_index_entries_max 4e+06",
    ):
        assert line in page


@pytest.mark.parametrize("in_session", [False, True])
async def test_a_request_that_reaches_its_deadline_is_not_counted_as_cancelled(
    start_router: StartRouter, start_worker: StartWorker, in_session: bool
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    worker.report(num_waiting=9)
    await until(lambda: router.fleet.links()[0].reported.load.num_waiting)
    client = SessionClient(router.channel, plain_grpc=not in_session)
    wire = WireRequest(inference_pb2.GenerateRequest(token_ids=[1, 2, 3]).SerializeToString())

    def count(code: str) -> float:
        return router.metrics.registry.get_sample_value("headrace_router_requests_total", {"code": code}) or 0.0

    call = client.generate(wire, timeout=0.2)
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    await until(lambda: count("DEADLINE_EXCEEDED") + count("CANCELLED"))
    assert (count("DEADLINE_EXCEEDED"), count("CANCELLED")) == (1.0, 0.0)
    call = client.generate(wire, timeout=30.0)
    reading = asyncio.create_task(call.read())
    await until(lambda: router.server.admission.num_waiting == 1)
    call.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await until(lambda: count("CANCELLED"))
    assert (count("DEADLINE_EXCEEDED"), count("CANCELLED")) == (1.0, 1.0)


@pytest.mark.parametrize(("reason", "label"), [(Reason.QUEUE_FULL, "full"), (Reason.DRAINING, "draining")])
async def test_a_worker_that_takes_no_request_is_not_counted_as_lost(
    start_router: StartRouter,
    start_worker: StartWorker,
    caplog: pytest.LogCaptureFixture,
    reason: Reason,
    label: str,
) -> None:
    caplog.set_level(logging.INFO)
    workers = [await start_worker(name) for name in "ab"]
    router = await start_router(*workers)
    caplog.clear()
    workers[0].error = StatusError(reason, "not now", retry_after_s=1.0)
    while not workers[0].requests:
        await router.generate([1, 2, 3])
    page = generate_latest(router.metrics.registry).decode()
    assert "headrace_router_resumes_total 0.0" in page
    assert f'headrace_router_worker_refusals_total{{reason="{label}"}} 1.0' in page
    assert not [one for one in caplog.records if one.name.endswith("forwarding")], "a line for each request"


async def test_a_stopping_router_lets_running_streams_end_and_takes_no_new_ones(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    worker.budget = 1
    answered = asyncio.create_task(collected(router.call([1, 2, 3])))
    await until(lambda: worker.is_stuck)
    stopping = asyncio.create_task(router.server.stop(20.0))
    async with asyncio.timeout(patience(10)):
        while await accepts_connections(router.port):
            await asyncio.sleep(0.01)
    worker.budget = None
    assert (await answered)[0] == answer([1, 2, 3], 20)
    await stopping
    await router.until_idle()


async def test_a_request_that_no_context_holds_is_refused_before_it_is_read_or_copied(
    start_router: StartRouter, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    parsed: list[int] = []
    copied: list[Prompt] = []
    parse, copy = generation._parsed, Prompt._copy

    def parsing(raw: bytes) -> inference_pb2.GenerateRequest:
        parsed.append(len(raw))
        return parse(raw)

    def copying(self: Prompt) -> Iterator[None]:
        copied.append(self)
        return copy(self)

    monkeypatch.setattr(generation, "_parsed", parsing)
    monkeypatch.setattr(Prompt, "_copy", copying)
    too_long = [5] * worker.card.max_context_tokens
    for tokens, num_read in ((too_long, 1), ([5] * 10_000_000, 0)):
        parsed.clear()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.generate(tokens)
        assert error_of(caught.value).reason is Reason.CONTEXT_TOO_LONG
        assert (len(parsed), copied) == (num_read, [])
    assert not worker.requests
    await router.until_idle()


# --- KV blocks that requests give up ----------------------------------------------------------------------------------


async def test_a_request_that_gives_up_kv_blocks_goes_to_a_worker_that_allows_it(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    workers = [await start_worker(name) for name in "abc"]
    most = workers[1].card.max_context_tokens
    workers[1].card.max_evicting_context_tokens = 3 * most
    router = await start_router(*workers)
    await router.until_ready(3)
    rule = {"cache_eviction": inference_pb2.CacheEviction(max_cache_size=64 * BLOCK_SIZE)}
    for prompt in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
        assert (await router.generate(prompt, sampling=rule))[0] == answer(prompt, 20)
    # So does an answer that has become longer than the context of the others.
    whole = answer([1, 2, 3], most + 10)
    call = router.call([1, 2, 3], most + 10, sampling=rule, resume_token_ids=whole[:most])
    assert (await collected(call, most))[0] == whole[most:]
    assert [len(worker.requests) for worker in workers] == [0, 4, 0]
    # If no worker can serve it, one of them says why.
    await router.generate([1, 2, 3], sampling={"cache_eviction": inference_pb2.CacheEviction(max_cache_size=1)})
    for number in range(6):
        await router.generate([number, 2, 3])
    assert all(worker.requests for worker in workers), "without a rule it may go anywhere"
    await router.until_idle()


async def test_a_fleet_places_by_the_policy_that_it_is_given(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    """The prompt is cached at the first worker, so routers' own policy would stay there."""
    workers = [await start_worker(name) for name in "ab"]
    asked: list[int] = []

    def in_turn(request: RequestFacts, candidates: Candidates, *args: Any, **options: Any) -> Placement | None:
        asked.append(len(candidates))
        chosen = (len(asked) - 1) % len(candidates)
        return msgspec.structs.replace(place_at(request, candidates.worker_ids[chosen], 0), number=chosen)

    router = await start_router(*workers, policy=in_turn)
    for _ in range(4):
        await router.generate([7] * 40, 3)
    assert [len(worker.requests) for worker in workers] == [2, 2]
    assert asked == [2] * 4
