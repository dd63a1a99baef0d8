"""Three hosts with mutual TLS, a join token and Redis: authentication, placement, and a host that joins under load.

The hosts are network namespaces. The tests are skipped where these are not permitted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest

from headrace.common.transport.channels import PLAIN, Transport
from headrace.protos import inference_pb2, inference_pb2_grpc, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.certificates import make_certificates
from tests.e2e.fleet import Process
from tests.e2e.serving import HTTP, MODEL, READY_BOUND_S, until
from tests.e2e.small_model import small_model
from tests.e2e.streams import load
from tests.infra.hosts import Host, network_of
from tests.patience import patience
from tests.redis_server import RedisServer

pytestmark = pytest.mark.e2e

PORT = 50051


@dataclass
class Hosts:
    """Gateway and router on the first host, a worker on each of two others, and an idle host.

    Every host has its own certificate.
    """

    front: Host
    workers: list[Host]
    directory: Path
    redis_url: str
    processes: list[Process]

    @property
    def base_url(self) -> str:
        return f"http://{self.front.address}:8000"

    @property
    def router(self) -> str:
        return f"{self.front.address}:{PORT}"

    def flags_of(self, name: str) -> list[str]:
        """The flags with which the processes of a host authenticate."""
        own = make_certificates(self.directory / name, ca=self.directory / "ca")
        return ["--tls-dir", str(own), "--join-token-file", str(own / "join-token")]

    def add_worker(self, index: int) -> Process:
        """A worker on its host, not started."""
        host = self.workers[index]
        argv = ["-m", "headrace.worker", "--model", str(small_model()), "--name", MODEL, "--threads", "1"]
        argv += ["--worker-id", f"worker-{index}", "--listen", f"{host.address}:{PORT}", "--kv-cache-gb", "0.5"]
        argv += ["--redis", self.redis_url, "--max-num-seqs", "4", *self.flags_of(f"worker-{index}")]
        self.processes.append(Process(f"worker-{index}", argv, before=host.enter))
        return self.processes[-1]

    def infos(self) -> dict[str, router_pb2.WorkerInfo]:
        """The workers that take requests, as the router sees them."""
        member = Transport(self.directory / "ca", self.directory / "ca" / "join-token")
        with member.blocking_channel(self.router) as channel:
            try:
                answer = router_pb2_grpc.RouterStub(channel).ListWorkers(
                    router_pb2.ListWorkersRequest(), timeout=patience(5)
                )
            except grpc.RpcError:
                return {}
        return {info.worker_id: info for info in answer.workers if info.state == router_pb2.WORKER_STATE_READY}

    def served(self, worker_id: str) -> int:
        """Requests that a worker has ended well."""
        info = self.infos().get(worker_id)
        return info.load.counters.requests_finished if info is not None else 0

    def gateway_is_ready(self) -> bool:
        try:
            return HTTP.get(f"{self.base_url}/health/ready").status_code == 200
        except httpx.HTTPError:
            return False


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with network_of(4) as (front, *workers):
        make_certificates(tmp_path / "ca")
        # On the tests' own host, which is the first address of the network.
        redis_server = RedisServer(tmp_path, address=f"{front.address.rpartition('.')[0]}.1").start()
        made = Hosts(front, workers, tmp_path, redis_server.url, [])
        listen = ["-m", "headrace.router", "--listen", made.router, "--redis", made.redis_url]
        made.processes.append(Process("router", [*listen, *made.flags_of("router")], before=front.enter))
        edge = ["-m", "headrace.gateway", "--host", front.address, "--port", "8000", "--router", made.router]
        made.processes.append(Process("gateway", [*edge, *made.flags_of("gateway")], before=front.enter))
        try:
            for index in range(2):
                made.add_worker(index)
            for process in made.processes:
                process.start()
            until(lambda: len(made.infos()) == 2, "both workers are ready", READY_BOUND_S)
            until(made.gateway_is_ready, "the gateway is ready")
            yield made
        finally:
            for process in made.processes:
                process.end()
                print(process.tail())
            redis_server.kill()


def refusal_by_router(transport: Transport, address: str) -> str:
    """The code with which a request is refused."""
    request = inference_pb2.GenerateRequest(model=MODEL, token_ids=[1, 2, 3])
    with transport.blocking_channel(address) as channel, pytest.raises(grpc.RpcError) as raised:
        next(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=5))
    return str(raised.value.code().name)


def refusal_by_worker(transport: Transport, address: str) -> str:
    """The code with which even a look is refused."""
    with transport.blocking_channel(address) as channel, pytest.raises(grpc.RpcError) as raised:
        worker_pb2_grpc.WorkerStub(channel).GetModelCard(worker_pb2.GetModelCardRequest(), timeout=patience(5))
    return str(raised.value.code().name)


@pytest.mark.timeout(300)
async def test_three_hosts_serve_members_alone_and_a_host_that_is_added_under_load_takes_work(
    hosts: Hosts, tmp_path: Path
) -> None:
    stranger = make_certificates(tmp_path / "stranger")
    for transport, code in (
        (PLAIN, "UNAVAILABLE"),
        (Transport(stranger, stranger / "join-token"), "UNAVAILABLE"),
        (Transport(hosts.directory / "ca"), "UNAUTHENTICATED"),  # a member without the token
    ):
        assert refusal_by_router(transport, hosts.router) == code
        for host in hosts.workers[:2]:
            assert refusal_by_worker(transport, f"{host.address}:{PORT}") == code
    added = hosts.add_worker(2)
    async with load(hosts.base_url, num_clients=8, max_tokens=12) as requests:
        await requests.more(32)
        shares = [await asyncio.to_thread(hosts.served, f"worker-{index}") for index in range(2)]
        assert min(shares) >= sum(shares) / 4, f"load decides: {shares}"
        added.start()
        await asyncio.to_thread(until, lambda: any("listening on" in line for line in added.logs), "it listens", 90)
        await asyncio.to_thread(until, lambda: hosts.served("worker-2") > 0, "it takes work", 30)
        await requests.more(8)
    assert [stream.error for stream in requests.failed] == []
