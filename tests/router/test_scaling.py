"""Scaling signals, KEDA's calls, and models whose workers are started on demand. Real servers, scripted workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest

from headrace.protos import keda_pb2, keda_pb2_grpc, router_pb2
from headrace.protos.status import Reason, error_of
from headrace.router.dispatch.holding import OnDemand
from headrace.router.dispatch.scaling import ScalingConfig, ScalingSignal
from tests.patience import patience
from tests.router.conftest import RunningRouter, StartRouter, StartWorker, collected
from tests.router.fake_worker import FakeWorker, answer, until

PROMPT = [7, 8, 9]
ON_DEMAND = OnDemand(frozenset({"m"}), 60.0)


def signal_of(router: RunningRouter, model: str = "m") -> ScalingSignal:
    signal = router.server.scaling.signal(model)
    assert signal is not None
    return signal


async def until_reported(router: RunningRouter, worker: FakeWorker, **load: Any) -> None:
    """The worker reports this load, and the router knows."""
    worker.report(**load)
    name, value = next(iter(load.items()))
    await until(lambda: any(getattr(link.reported.load, name) == value for link in router.fleet.links()))


def exported(router: RunningRouter, name: str) -> dict[str, float]:
    """The series of a metric with their labels, as a scrape shows them."""
    lines = generate_latest(router.metrics.registry).decode().splitlines()
    series = dict(line.rsplit(" ", 1) for line in lines if line.startswith(f"{name}{{"))
    return {labels.removeprefix(name): float(value) for labels, value in series.items()}


@pytest.fixture
async def keda() -> AsyncIterator[Any]:
    """A plain client of the external scaler at a port."""
    channels = []

    def stub(port: int) -> Any:
        channels.append(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        return keda_pb2_grpc.ExternalScalerStub(channels[-1])

    yield stub
    for channel in channels:
        await channel.close()


def trigger(**metadata: str) -> keda_pb2.ScaledObjectRef:
    return keda_pb2.ScaledObjectRef(name="worker", namespace="headrace", scalerMetadata=metadata)


async def test_the_signals_follow_from_what_workers_report(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    first, second = [await start_worker(name) for name in "ab"]
    other = await start_worker("c", model="n")
    router = await start_router(first, second, other, scaling=ScalingConfig(window_s=1e-3))
    await until_reported(
        router, first, num_running=16, num_waiting=16, num_uncached_tokens=4000, num_free_blocks=200,
        num_cached_blocks=150,
    )  # fmt: skip
    await until(lambda: signal_of(router).num_at_workers == 32)
    signal = signal_of(router)
    assert signal.num_ready == 2
    assert signal.kv_pressure == pytest.approx(0.4)  # 800 of 2,000 blocks
    assert signal.backlog_s == pytest.approx(2.0)  # 4,000 tokens at 2 * 1,000 a second
    assert signal.queue_wait_ms == 0.0  # the other worker is idle
    await until_reported(router, second, num_running=16, num_waiting=16, num_uncached_tokens=4000)
    await until(lambda: signal_of(router).num_at_workers == 64)
    assert signal_of(router).queue_wait_ms > 1000
    await until(lambda: signal_of(router).num_wanted >= 5)  # 64 / 16 / 0.8
    idle = signal_of(router, "n")
    assert (idle.num_ready, idle.num_wanted, idle.queue_wait_ms, idle.kv_pressure) == (1, 1, 0.0, 0.0)
    assert [entry.model for entry in router.server.scaling.signals()] == ["m", "n"]


async def test_prometheus_the_rpc_and_keda_show_the_same_numbers(
    start_router: StartRouter, start_worker: StartWorker, keda: Any
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    await until_reported(router, worker, num_running=16, num_waiting=8, num_free_blocks=250, num_uncached_tokens=3000)
    await until(lambda: router.server.scaling.latest and signal_of(router).num_at_workers == 24)
    await until(lambda: signal_of(router).num_wanted == 2)
    answered = await router.router.ListScalingSignals(router_pb2.ListScalingSignalsRequest(model="m"))
    (shown,) = answered.signals
    assert (shown.model, shown.workers_ready, shown.workers_wanted) == ("m", 1, 2)
    assert shown.kv_pressure == pytest.approx(0.75)
    assert shown.backlog_seconds == pytest.approx(3.0)
    assert shown.requests_at_workers == 24
    unknown = await router.router.ListScalingSignals(router_pb2.ListScalingSignalsRequest(model="x"))
    assert not unknown.signals

    label = '{model="m"}'
    assert exported(router, "headrace_model_workers_wanted") == {label: 2.0}
    assert exported(router, "headrace_model_kv_pressure")[label] == pytest.approx(0.75)
    assert exported(router, "headrace_model_backlog_seconds")[label] == pytest.approx(3.0)
    assert exported(router, "headrace_model_queue_wait_milliseconds")[label] > 100

    scaler = keda(router.port)
    assert (await scaler.IsActive(trigger())).result
    for name, value in [("workers_wanted", 2), ("kv_pressure_percent", 75), ("backlog_seconds", 3)]:
        asked = trigger(model="m", metric=name, target="1.5")
        (spec,) = (await scaler.GetMetricSpec(asked)).metricSpecs
        assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == (name, 2, 1.5)
        request = keda_pb2.GetMetricsRequest(scaledObjectRef=asked, metricName=name)
        (metric,) = (await scaler.GetMetrics(request)).metricValues
        assert metric.metricValueFloat == pytest.approx(value)
        assert metric.metricValue == value


@pytest.mark.parametrize(
    ("metadata", "reason", "words"),
    [
        ({"model": "x"}, Reason.MODEL_NOT_FOUND, "knows 'm', 'n'"),
        ({}, Reason.INVALID_FIELD, "one of 'm', 'n'"),
        ({"model": "m", "metric": "cpu"}, Reason.INVALID_FIELD, "workers_wanted"),
        ({"model": "m", "target": "many"}, Reason.INVALID_FIELD, "greater than 0"),
        ({"model": "m", "target": "0"}, Reason.INVALID_FIELD, "greater than 0"),
    ],
)
async def test_a_wrong_trigger_is_told_what_to_write(
    start_router: StartRouter,
    start_worker: StartWorker,
    keda: Any,
    metadata: dict[str, str],
    reason: Reason,
    words: str,
) -> None:
    router = await start_router(await start_worker("a"), await start_worker("b", model="n"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await keda(router.port).GetMetrics(keda_pb2.GetMetricsRequest(scaledObjectRef=trigger(**metadata)))
    error = error_of(caught.value)
    assert error.reason is reason
    assert words in error.message


async def test_the_first_request_is_held_and_goes_on_when_a_worker_joins(
    start_router: StartRouter, start_worker: StartWorker, keda: Any
) -> None:
    router = await start_router(on_demand=ON_DEMAND, capacity_wait_s=0.01)
    scaler = keda(router.port)
    actives: list[bool] = []

    async def follow() -> None:
        stream = scaler.StreamIsActive(trigger(model="m"))
        while (message := await stream.read()) is not grpc.aio.EOF:
            actives.append(message.result)

    following = asyncio.create_task(follow())
    await until(lambda: actives == [False])
    assert signal_of(router).num_wanted == 0
    requests = [asyncio.create_task(router.generate([*PROMPT, number], model="m")) for number in (1, 2)]
    await until(lambda: actives == [False, True])
    await until(lambda: signal_of(router).num_waiting == 2)
    assert (await scaler.IsActive(trigger(model="m"))).result
    assert signal_of(router).num_wanted == 1
    worker = await start_worker()
    router.fleet.register("w", worker.address)
    assert [(await request)[0] for request in requests] == [answer([*PROMPT, number], 20) for number in (1, 2)]
    await router.until_idle()
    assert signal_of(router).num_waiting == 0
    following.cancel()


async def test_a_model_whose_last_worker_went_is_held_too(
    start_router: StartRouter, start_worker: StartWorker, keda: Any
) -> None:
    """Its card is still known, so that the request is in the queue."""
    worker = await start_worker()
    router = await start_router(worker, on_demand=ON_DEMAND, capacity_wait_s=0.01)
    await router.generate(PROMPT)
    await worker.kill()
    await until(lambda: router.fleet.num_ready == 0)
    request = asyncio.create_task(router.generate([*PROMPT, 1], model="m"))
    await until(lambda: signal_of(router).num_waiting == 1)
    assert (await keda(router.port).IsActive(trigger(model="m"))).result
    # Longer than a request without --on-demand waits.
    await asyncio.sleep(0.7)
    assert not request.done()
    await worker.restart()
    assert (await request)[0] == answer([*PROMPT, 1], 20)


@pytest.mark.parametrize("was_served", [False, True])
async def test_a_request_is_given_back_if_no_worker_comes(
    start_router: StartRouter, start_worker: StartWorker, was_served: bool
) -> None:
    workers = [await start_worker()] if was_served else []
    router = await start_router(*workers, on_demand=OnDemand(frozenset({"m"}), 0.3), capacity_wait_s=60.0)
    for worker in workers:
        await worker.kill()
        await until(lambda: router.fleet.num_ready == 0)
    began_s = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collected(router.call(PROMPT, model="m"))
    error = error_of(caught.value)
    assert error.reason is Reason.MODEL_NOT_LOADED
    assert error.row.http_status == 503
    assert error.retry_after_s == 10.0
    assert "--cold-start" in error.message
    assert time.monotonic() - began_s >= 0.3
    await router.until_idle()
    assert signal_of(router).num_refused == {"model_not_loaded": 1}
    assert exported(router, "headrace_model_refusals_total") == {'{model="m",reason="model_not_loaded"}': 1.0}


async def test_no_more_requests_are_held_than_may_wait(start_router: StartRouter) -> None:
    router = await start_router(on_demand=ON_DEMAND, max_waiting=2)
    held = [asyncio.create_task(router.generate([*PROMPT, number], model="m")) for number in (1, 2)]
    await until(lambda: signal_of(router).num_waiting == 2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collected(router.call(PROMPT, model="m"))
    assert error_of(caught.value).reason is Reason.QUEUE_FULL
    for request in held:
        request.cancel()
    await until(lambda: signal_of(router).num_waiting == 0)


async def test_other_models_are_refused_as_before(start_router: StartRouter, start_worker: StartWorker) -> None:
    router = await start_router(await start_worker("a", model="n"), on_demand=ON_DEMAND)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collected(router.call(PROMPT, model="x"))
    assert error_of(caught.value).reason is Reason.MODEL_NOT_FOUND
    assert [signal.model for signal in router.server.scaling.signals()] == ["m", "n"]
    listed = await router.router.ListModels(router_pb2.ListModelsRequest())
    assert list(listed.on_demand) == ["m"]


async def test_a_caller_may_wait_for_a_model(start_router: StartRouter, start_worker: StartWorker) -> None:
    """A gateway does, which has no tokenizer yet to make a request with."""
    router = await start_router(on_demand=ON_DEMAND)
    asked = asyncio.ensure_future(router.router.AwaitModel(router_pb2.AwaitModelRequest(model="m")))
    await until(lambda: signal_of(router).num_waiting == 1)
    worker = await start_worker()
    router.fleet.register("w", worker.address)
    assert (await asked).card.name == "m"
    assert (await router.router.AwaitModel(router_pb2.AwaitModelRequest(model="m"))).card.name == "m"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await router.router.AwaitModel(router_pb2.AwaitModelRequest(model="x"))
    assert error_of(caught.value).reason is Reason.MODEL_NOT_FOUND


async def test_an_idle_model_on_demand_needs_no_worker_after_a_while(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(
        worker, on_demand=ON_DEMAND, scaling=ScalingConfig(idle_after_s=patience(0.5), window_s=1.0)
    )
    assert signal_of(router).num_wanted == 1
    await router.generate(PROMPT)
    await until(lambda: signal_of(router).num_wanted == 0)
    other = await start_router(worker, scaling=ScalingConfig(idle_after_s=0.0, window_s=1.0))
    assert signal_of(other).num_wanted == 1  # a model that is not on demand keeps one


async def test_refused_requests_are_demand(start_router: StartRouter, start_worker: StartWorker) -> None:
    worker = await start_worker()
    router = await start_router(worker, max_waiting=0, scaling=ScalingConfig(window_s=1.0))
    await until_reported(router, worker, num_running=12, num_waiting=9, decode_step_ms=100)
    before = signal_of(router).num_wanted
    for number in range(40):
        with pytest.raises(grpc.aio.AioRpcError):
            await collected(router.call([*PROMPT, number]))
    assert signal_of(router).num_refused == {"queue_full": 40}
    await until(lambda: signal_of(router).num_wanted > before)
