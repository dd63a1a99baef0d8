"""A worker whose engine is stuck or fails, in real processes: its streams go on at another worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.protos import inference_pb2, inference_pb2_grpc, router_pb2, router_pb2_grpc
from headrace.protos.inference_pb2 import GenerateRequest, SamplingParams
from headrace.protos.status import Reason, error_of
from headrace.worker.engine.watchdog import EXIT_ENGINE_FAILED
from tests.e2e.fleet import Process
from tests.patience import patience
from tests.worker.conftest import VOCAB_SIZE
from tests.worker.fake_runner import expected_tokens
from tests.worker.fake_worker import SPOILS_SCHEDULER

NOT_SERVING, SERVING = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING
BOUND_S = 60

pytestmark = pytest.mark.e2e


class TwoWorkers:
    """Two worker processes over fake runners, and a router process that has them both."""

    def __init__(self, directory: Path) -> None:
        self.addresses = [f"unix:{directory}/worker-{index}.sock" for index in range(2)]
        self.router_address = f"unix:{directory}/router.sock"
        self.hangs = [directory / f"hangs-{index}" for index in range(2)]
        workers = [
            Process(
                f"worker-{index}",
                [
                    *("-m", "tests.worker.fake_worker", str(self.hangs[index]), "--model", str(directory)),
                    *("--listen", address, "--worker-id", f"worker-{index}", "--stuck-after-s", f"{patience(2):.1f}"),
                ],
            )
            for index, address in enumerate(self.addresses)
        ]
        self.workers = workers
        known = [flag for address in self.addresses for flag in ("--worker", address)]
        self.router = Process("router", ["-m", "headrace.router", "--listen", self.router_address, *known])

    def start(self) -> None:
        for process in (*self.workers, self.router):
            process.start()

    def end(self) -> None:
        for process in (*self.workers, self.router):
            process.end()

    def tail(self) -> str:
        return "\n".join(process.tail() for process in (*self.workers, self.router))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoWorkers]:
    two = TwoWorkers(tmp_path_factory.mktemp("two"))
    two.start()
    try:
        yield two
    finally:
        two.end()


@pytest.fixture
async def router(fleet: TwoWorkers) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(fleet.router_address) as channel:
        await until_ready(channel, fleet, 2)
        yield channel


async def workers_of(channel: grpc.aio.Channel) -> list[router_pb2.WorkerInfo]:
    answer = await router_pb2_grpc.RouterStub(channel).ListWorkers(
        router_pb2.ListWorkersRequest(), wait_for_ready=True, timeout=patience(BOUND_S)
    )
    return list(answer.workers)


async def until_ready(channel: grpc.aio.Channel, fleet: TwoWorkers, number: int) -> None:
    states: list[int] = []
    try:
        async with asyncio.timeout(patience(BOUND_S)):
            while states.count(router_pb2.WORKER_STATE_READY) != number:
                states = [worker.state for worker in await workers_of(channel)]
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"{number} workers should be ready: {states}\n{fleet.tail()}") from None


async def until_health(address: str, wanted: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(patience(BOUND_S)):
        stub = health_pb2_grpc.HealthStub(channel)
        while (await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)).status != wanted:
            await asyncio.sleep(0.05)


def stream_of(
    channel: grpc.aio.Channel, prompt: list[int], num_tokens: int
) -> grpc.aio.UnaryStreamCall[GenerateRequest, inference_pb2.GenerateResponse]:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(request_id="stream", token_ids=prompt, sampling=sampling)
    return inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=patience(BOUND_S))


async def test_a_stuck_worker_loses_its_streams_to_another_and_comes_back(
    fleet: TwoWorkers, router: grpc.aio.Channel
) -> None:
    responses = aiter(stream_of(router, [1, 2, 3], 600))
    tokens = list((await anext(responses)).token_ids)
    (victim,) = [worker for worker in await workers_of(router) if worker.num_in_flight]
    number = fleet.addresses.index(victim.address)
    fleet.hangs[number].touch()
    try:
        async for response in responses:
            assert response.start_pos == len(tokens)
            tokens += response.token_ids
        assert tokens == expected_tokens([1, 2, 3], 600, VOCAB_SIZE)
        await until_health(victim.address, NOT_SERVING)
        await until_ready(router, fleet, 1)
        async with grpc.aio.insecure_channel(victim.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stream_of(channel, [1], 1).read()
        error = error_of(caught.value)
        assert (error.reason, "has ended no step for" in error.message) == (Reason.NO_CAPACITY, True)
    finally:
        fleet.hangs[number].unlink()
    await until_health(victim.address, SERVING)
    await until_ready(router, fleet, 2)
    logs = fleet.workers[number].tail()
    assert "the engine is at fake_worker.py" in logs
    assert "the worker serves again" in logs


async def test_a_worker_whose_engine_fails_ends_with_a_line_that_says_why(
    fleet: TwoWorkers, router: grpc.aio.Channel
) -> None:
    worker = fleet.workers[0]
    async with grpc.aio.insecure_channel(fleet.addresses[0]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream_of(channel, [SPOILS_SCHEDULER, 2], 4).read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert await asyncio.to_thread(worker.gone, BOUND_S) == EXIT_ENGINE_FAILED
    assert (
        "CRITICAL headrace.worker.engine.watchdog [-] the engine failed; the process exits and has to be restarted"
        in worker.tail()
    )
    assert "ZeroDivisionError: a spoiled scheduler" in worker.tail()
    worker.start()
    await until_ready(router, fleet, 2)
