"""Three hosts, one of which is cut off and comes back. Network namespaces; skipped where they are not permitted."""

from __future__ import annotations

import asyncio
import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import httpx
import pytest

from headrace.protos import router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.e2e.fleet import Process
from tests.e2e.serving import HTTP, MODEL, READY_BOUND_S, until
from tests.e2e.small_model import small_model
from tests.e2e.streams import chat_body, load, run_streams
from tests.infra.hosts import Host, network_of
from tests.patience import patience

pytestmark = pytest.mark.e2e

PORT = 50051
NUM_STREAMS = 16
MAX_TOKENS = 48


@dataclass
class ThreeHosts:
    """Gateway and router on the first host, a worker on each of the others."""

    front: Host
    workers: list[Host]
    processes: list[Process]

    @property
    def base_url(self) -> str:
        return f"http://{self.front.address}:8000"

    def info(self, index: int) -> router_pb2.WorkerInfo | None:
        """The router's entry of a worker; None if it has none."""
        with grpc.insecure_channel(f"{self.front.address}:{PORT}") as channel:
            answer = router_pb2_grpc.RouterStub(channel).ListWorkers(
                router_pb2.ListWorkersRequest(), timeout=patience(5)
            )
        found = [info for info in answer.workers if info.worker_id == f"worker-{index}"]
        return found[0] if found else None

    def is_ready(self, index: int) -> bool:
        info = self.info(index)
        return info is not None and info.state == router_pb2.WORKER_STATE_READY

    def truth(self, index: int) -> tuple[int, int]:
        """Open a new watch at a worker. Returns the number of its findable blocks and the exclusive or of their
        hashes."""
        hashes: list[int] = []
        with grpc.insecure_channel(f"{self.workers[index].address}:{PORT}") as channel:
            watch = worker_pb2_grpc.WorkerStub(channel).Watch(worker_pb2.WatchRequest(), timeout=patience(10))
            for message in watch:
                hashes += message.kv_events.stored
                if len(hashes) >= message.load.num_cached_blocks:
                    break
            watch.cancel()
        return len(hashes), functools.reduce(operator.xor, hashes, 0)

    def index_is_true(self, index: int) -> bool:
        """Whether the router's index has exactly the worker's blocks, and the worker holds nothing else."""
        info = self.info(index)
        return info is not None and (info.num_indexed_blocks, info.indexed_digest) == self.truth(index)

    def is_idle(self, index: int) -> bool:
        info = self.info(index)
        if info is None or info.num_in_flight or info.load.num_running or info.load.num_waiting:
            return False
        return bool(info.load.num_free_blocks == info.load.num_blocks)

    def gateway_is_ready(self) -> bool:
        try:
            return HTTP.get(f"{self.base_url}/health/ready").status_code == 200
        except httpx.HTTPError:
            return False


@pytest.fixture
def three_hosts() -> Iterator[ThreeHosts]:
    with network_of(3) as (front, *workers):
        router_address = f"{front.address}:{PORT}"
        processes = [
            Process("router", ["-m", "headrace.router", "--listen", router_address, "--insecure"], before=front.enter),
            Process(
                "gateway",
                ["-m", "headrace.gateway", "--host", front.address, "--port", "8000", "--router", router_address],
                before=front.enter,
            ),
        ]
        for index, host in enumerate(workers):
            argv = ["-m", "headrace.worker", "--model", str(small_model()), "--name", MODEL, "--threads", "1"]
            argv += [
                "--worker-id",
                f"worker-{index}",
                "--listen",
                f"{host.address}:{PORT}",
                "--kv-cache-gb",
                "0.5",
                "--insecure",
            ]
            argv += ["--router", router_address, "--execution-mode", "accuracy"]
            processes.append(Process(f"worker-{index}", argv, before=host.enter))
        hosts = ThreeHosts(front, workers, processes)
        try:
            for process in processes:
                process.start()
            for index in range(2):
                until(lambda i=index: _answers(hosts, i), f"worker {index} is ready", READY_BOUND_S)  # type: ignore[misc]
            until(hosts.gateway_is_ready, "the gateway is ready")
            yield hosts
        finally:
            for process in processes:
                process.end()
                print(process.tail())


def _answers(hosts: ThreeHosts, index: int) -> bool:
    try:
        return hosts.is_ready(index)
    except grpc.RpcError:
        return False


@pytest.mark.timeout(300)
async def test_a_host_that_is_cut_off_loses_no_stream_and_comes_back_with_a_true_index(three_hosts: ThreeHosts) -> None:
    hosts = three_hosts
    bodies = [chat_body(number, MAX_TOKENS, temperature=0) for number in range(NUM_STREAMS)]
    undisturbed = await run_streams(hosts.base_url, bodies)
    # Cut off for a moment, so that the router still counts on it; and until its registration has ended.
    for index, is_forgotten in ((0, False), (1, True)):
        victim = hosts.workers[index]

        async def cut_off(victim: Host = victim) -> None:
            victim.cut_off()

        streams = await run_streams(hosts.base_url, bodies, disturb_behind=6, disturb=cut_off)
        assert [stream.result for stream in streams] == [stream.result for stream in undisturbed]
        assert not hosts.is_ready(index)
        async with load(hosts.base_url, num_clients=4) as requests:
            await requests.more(8)  # what is cached changes meanwhile
            if is_forgotten:
                await asyncio.to_thread(until, lambda i=index: hosts.info(i) is None, "its registration has ended")  # type: ignore[misc]
            victim.heal()
            await asyncio.to_thread(until, lambda i=index: hosts.is_ready(i), "it is ready again", 60)  # type: ignore[misc]
            await requests.more(8)
        assert requests.failed == []
        for worker in range(2):
            until(lambda w=worker: hosts.is_idle(w), f"worker {worker} is idle", 60)  # type: ignore[misc]
            until(lambda w=worker: hosts.index_is_true(w), f"the index of worker {worker} is true")  # type: ignore[misc]
            assert hosts.truth(worker)[0] > 0
