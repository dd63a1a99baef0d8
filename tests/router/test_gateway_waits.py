"""A gateway's client through a real router: the only worker dies, stays away, and comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.gateway.upstream.routers import Upstream
from headrace.protos import inference_pb2
from headrace.protos.status import Reason, StatusError
from headrace.router.dispatch.holding import OnDemand
from headrace.router.dispatch.scaling import ScalingConfig
from tests.router.conftest import StartRouter, StartWorker
from tests.router.fake_worker import answer, until

PROMPT = [7, 8, 9]


async def tokens_of(upstream: Upstream, prompt: list[int]) -> list[int]:
    """All tokens of a generation, in the order in which they were delivered."""
    sampling = inference_pb2.SamplingParams(max_tokens=20)
    request = inference_pb2.GenerateRequest(model="m", token_ids=prompt, sampling=sampling)
    tokens: list[int] = []
    async for message in upstream.generate(request):
        assert not message.token_ids or message.start_pos == len(tokens)
        tokens.extend(message.token_ids)
    return tokens


async def test_streams_and_new_requests_wait_for_the_only_worker(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    worker = await start_worker()
    router = await start_router(worker, capacity_wait_s=0.02)
    given_back: list[Any] = []
    upstream = Upstream([f"127.0.0.1:{router.port}"], on_retry=given_back.append)
    worker.budget = 4
    stream = asyncio.create_task(tokens_of(upstream, PROMPT))
    await until(lambda: worker.is_stuck)
    await worker.kill()
    await until(lambda: router.fleet.num_ready == 0)
    new = asyncio.create_task(tokens_of(upstream, [*PROMPT, 10]))
    # Before, three times ended a stream, and the first one a new request.
    await until(lambda: given_back.count(Reason.NO_CAPACITY) >= 16, 30.0)
    assert not stream.done()
    assert not new.done()
    worker.budget = None
    await worker.restart()
    assert await stream == answer(PROMPT, 20)
    assert await new == answer([*PROMPT, 10], 20)
    await upstream.close()


async def test_a_gateway_waits_for_the_first_worker_of_a_model_on_demand(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    router = await start_router(on_demand=OnDemand(frozenset({"m"})))
    upstream = Upstream([f"127.0.0.1:{router.port}"])
    assert await upstream.list_models() == []
    assert upstream.on_demand == {"m"}
    waits = asyncio.create_task(upstream.await_model("m"))
    await until(lambda: router.server.scaling.signals()[0].num_waiting == 1)
    worker = await start_worker()
    router.fleet.register("w", worker.address)
    await waits
    assert [card.name for card in await upstream.list_models()] == ["m"]
    await upstream.close()


async def test_a_model_that_a_gateway_uses_is_not_idle(start_router: StartRouter, start_worker: StartWorker) -> None:
    """While it loads the tokenizer, requests that wait for this are not with a worker yet."""
    worker = await start_worker()
    scaling = ScalingConfig(idle_after_s=1e-6, window_s=1.0)
    routers = [await start_router(worker, on_demand=OnDemand(frozenset({"m"})), scaling=scaling) for _ in range(2)]
    upstream = Upstream([f"127.0.0.1:{router.port}" for router in routers])
    await upstream.list_models()

    def num_wanted() -> list[int]:
        return [router.server.scaling.signals()[0].num_wanted for router in routers]

    await until(lambda: num_wanted() == [0, 0])
    async with upstream.using(["m", "of another router"]):
        await until(lambda: num_wanted() == [1, 1])
    await until(lambda: num_wanted() == [0, 0])
    await upstream.close()


async def test_a_gateway_does_not_ask_again_when_no_worker_was_started_in_time(start_router: StartRouter) -> None:
    router = await start_router(on_demand=OnDemand(frozenset({"m"}), 0.1))
    upstream = Upstream([f"127.0.0.1:{router.port}"])
    for asks in (upstream.await_model("m"), tokens_of(upstream, PROMPT)):
        with pytest.raises(StatusError) as caught:
            await asks
        assert (caught.value.reason, caught.value.retry_after_s) == (Reason.MODEL_NOT_LOADED, 10.0)
    await upstream.close()
