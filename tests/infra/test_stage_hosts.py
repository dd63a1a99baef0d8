"""A pipeline over two hosts with mutual TLS: its link is cut, or one of the hosts stands still, and comes back. The
worker names the second stage, or that joins by `headrace serve --join`.

The hosts are network namespaces, and the tests are skipped where these are not permitted. `python -m tests.soak
stage-hosts` runs them, in twenty minutes. HEADRACE_SOAK_ROUNDS is how often something happens, in one run or in several
(see `soak_tally`), and HEADRACE_SEED repeats the choices.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest

from headrace.common.transport.channels import PLAIN, Transport
from headrace.protos import router_pb2, router_pb2_grpc, stage_pb2, stage_pb2_grpc
from headrace.protos.stage_pb2 import ComputeRequest
from tests.certificates import make_certificates
from tests.e2e.fleet import Process
from tests.e2e.groups import IS_SOAK, kept, nothing_left, stopped, tally_of
from tests.e2e.serving import HEADRACE, HTTP, MODEL, READY_BOUND_S, held_by
from tests.e2e.small_model import small_model
from tests.e2e.streams import chat_body, run_streams
from tests.infra.hosts import Host, network_of
from tests.patience import patience, until
from tests.soak_tally import most_seconds
from tests.worker.pipeline.stages import LISTENING, Stage

NUM_ROUNDS = int(os.environ.get("HEADRACE_SOAK_ROUNDS", "20"))
PORT, STAGE_PORT, JOIN_PORT = 50051, 50071, 50070
NUM_STREAMS, MAX_TOKENS = 6, 48
# A connection ends after 20 s of silence; a cut link is noticed earlier if something is to be sent.
GIVEN_UP_S, MOMENT_S = 60.0, 3.0

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not IS_SOAK, reason="minutes: python -m tests.soak stage-hosts"),
]


class JoiningStage:
    """A host that joins the pipeline at `joins` with one command; not started. See `Stage`."""

    def __init__(self, joins: str, listen: str, flags: Sequence[str], before: Sequence[str]) -> None:
        where = ["--join", joins, "--stage-listen", listen, "--workers", "1", "--threads", "1"]
        argv = [*HEADRACE[1:], "serve", str(small_model()), *where, *flags]
        self.process = Process("joining", argv, before=before)

    @property
    def num_starts(self) -> int:
        """How often it has begun to listen."""
        return sum(LISTENING in line for line in self.process.logs)


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(child) for thread in threads for child in (thread / "children").read_text().split())


@dataclass
class TwoHosts:
    """Router, gateway and the first stage on the first host, the second stage on the other."""

    front: Host
    back: Host
    router: Process
    gateway: Process
    worker: Process
    stage: Stage | JoiningStage
    transport: Transport

    @property
    def base_url(self) -> str:
        return f"http://{self.front.address}:8000"

    def workers(self) -> dict[str, router_pb2.WorkerInfo]:
        """The workers that the router lists; none if it does not respond."""
        with self.transport.blocking_channel(f"{self.front.address}:{PORT}") as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            try:
                answer = stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=patience(5))
            except grpc.RpcError:
                return {}
        return {info.worker_id: info for info in answer.workers}

    def is_ready(self) -> bool:
        """Whether a worker takes requests and the gateway answers."""
        states = [info.state for info in self.workers().values()]
        try:
            answers = HTTP.get(f"{self.base_url}/health/ready").status_code == 200
        except httpx.HTTPError:
            return False
        return answers and states == [router_pb2.WORKER_STATE_READY]

    def cut_for_a_moment(self) -> None:
        """The link is cut for less than the 10 s after which connections end. What was sent comes when it is back."""
        self.back.cut_off()
        time.sleep(MOMENT_S)
        self.back.heal()

    def cut(self) -> None:
        """The link is cut until both ends have noticed."""
        with self._given_up_by_both():
            self.back.cut_off()
        self.back.heal()

    def freeze_front(self) -> None:
        """The host of the first stage stands still until the second has noticed."""
        starts = self.stage.num_starts
        with contextlib.ExitStack() as still:
            for process in (self.router, self.gateway, self.worker):
                still.enter_context(stopped(process.pid))
            until(lambda: self.stage.num_starts > starts, "the stage has given the worker up", GIVEN_UP_S)

    def freeze_back(self) -> None:
        """The host of the second stage stands still until the first has noticed."""
        worker = self.worker.pid
        with contextlib.ExitStack() as still:
            for pid in self.stage_pids():
                still.enter_context(stopped(pid))
            until(lambda: self.worker.pid != worker, "the worker has given the stage up", GIVEN_UP_S)

    def stage_pids(self) -> list[int]:
        """The processes of the second stage: its own, and that which started it."""
        return [self.stage.process.pid, *children_of(self.stage.process.pid)]

    @contextlib.contextmanager
    def _given_up_by_both(self) -> Iterator[None]:
        worker, starts = self.worker.pid, self.stage.num_starts
        yield
        until(lambda: self.worker.pid != worker, "the worker has given the stage up", GIVEN_UP_S)
        until(lambda: self.stage.num_starts > starts, "the stage has given the worker up", GIVEN_UP_S)


@pytest.fixture(params=["named", "joining"])
def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TwoHosts]:
    certificates = make_certificates(tmp_path / "ca")

    def member(name: str) -> list[str]:
        own = make_certificates(tmp_path / name, ca=tmp_path / "ca")
        return ["--tls-dir", str(own), "--join-token-file", str(own / "join-token")]

    with nothing_left(), network_of(2) as (front, back):
        of_front, router = member("front"), f"{front.address}:{PORT}"
        edge = ["--host", front.address, "--port", "8000", "--router", router, *of_front]
        worker = ["--model", str(small_model()), "--name", MODEL, "--threads", "1", "--worker-id", "worker-0"]
        worker += ["--listen", f"{front.address}:50061", "--router", router, "--execution-mode", "accuracy", *of_front]
        worker += ["--pipeline", "2", "--kv-cache-gb", "0.01"]
        listen, joins = f"{back.address}:{STAGE_PORT}", f"{front.address}:{JOIN_PORT}"
        stage: Stage | JoiningStage
        if request.param == "named":
            worker += ["--stage", listen]
            stage = Stage(small_model(), tmp_path, "stage", *member("back"), listen=listen, before=back.enter)
        else:
            worker += ["--await-stages", joins]
            stage = JoiningStage(joins, listen, member("back"), back.enter)
        made = TwoHosts(
            front,
            back,
            Process("router", ["-m", "headrace.router", "--listen", router, *of_front], before=front.enter),
            Process("gateway", ["-m", "headrace.gateway", *edge], before=front.enter),
            Process("worker", ["-m", "headrace.worker", *worker], before=front.enter),
            stage,
            Transport(certificates, certificates / "join-token"),
        )
        with kept([made.router, made.gateway, made.worker, made.stage.process]):
            until(made.is_ready, "the pipeline serves", READY_BOUND_S)
            yield made


async def refusal(transport: Transport, address: str) -> str:
    """The code with which a stage refuses a call."""

    async def ask() -> AsyncIterator[ComputeRequest]:
        yield ComputeRequest(setup=stage_pb2.StageSetup())

    async with transport.channel(address) as channel:
        with pytest.raises(grpc.RpcError) as raised:
            async for _ in stage_pb2_grpc.StageStub(channel).Compute(ask(), timeout=patience(5)):
                pass
    return str(raised.value.code().name)


@pytest.mark.timeout(300 + 90 * NUM_ROUNDS)
async def test_a_pipeline_over_two_hosts_survives_cuts_and_hosts_that_stand_still(
    hosts: TwoHosts, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    address = f"{hosts.back.address}:{STAGE_PORT}"
    stranger = make_certificates(tmp_path / "stranger")
    for transport, code in (
        (PLAIN, "UNAVAILABLE"),
        (Transport(stranger, stranger / "join-token"), "UNAVAILABLE"),
        (Transport(tmp_path / "ca"), "UNAUTHENTICATED"),  # a member without the token
        (hosts.transport, "RESOURCE_EXHAUSTED"),  # a member, while the stage computes for the worker
    ):
        assert await refusal(transport, address) == code
    bodies = [chat_body(number, MAX_TOKENS, temperature=0.9, top_p=0.95, seed=7) for number in range(NUM_STREAMS)]
    undisturbed = await run_streams(hosts.base_url, bodies)
    assert all(stream.is_done for stream in undisturbed)
    kinds = [hosts.cut_for_a_moment, hosts.cut, hosts.freeze_back, hosts.freeze_front]
    tally = tally_of(f"stage-hosts, {request.node.callspec.id}")
    for number, rng in tally.rounds(NUM_ROUNDS, most_seconds()):
        start_s = time.monotonic()
        happens = kinds[number] if number < len(kinds) else rng.choice(kinds)
        print(f"round {number}: {happens.__name__}", flush=True)
        worker, pids = hosts.worker.pid, hosts.stage_pids()
        streams = await run_streams(
            hosts.base_url,
            bodies,
            disturb_behind=rng.randrange(2, MAX_TOKENS - 8),
            disturb=lambda happens=happens: asyncio.to_thread(happens),  # type: ignore[misc]
        )
        assert [stream.result for stream in streams] == [stream.result for stream in undisturbed], happens.__doc__
        await asyncio.to_thread(until, hosts.is_ready, "the pipeline is back", 120)
        assert hosts.stage_pids() == pids, "the stage starts itself again"
        if happens == hosts.cut_for_a_moment:
            assert hosts.worker.pid == worker, "a short cut loses nothing"
        tally.note(happens.__name__, time.monotonic() - start_s)
    await asyncio.to_thread(until, lambda: not held_by(hosts.workers().values()), "all blocks are free")
    print(f"{tally}, of {NUM_STREAMS} streams each", flush=True)
