"""The processes of `sim_fleet`, and the rounds that are measured with them."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec

from benchmarks.router.overhead import cpu_s
from benchmarks.router.survival import Process
from headrace.common.transport.channels import CHANNEL_OPTIONS
from headrace.common.transport.session_client import SessionClient
from headrace.protos import inference_pb2, router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
from headrace.sim.simulation import JobRecord
from headrace.sim.step_cost import StepCost
from headrace.sim.trace import Job
from headrace.worker.engine.step_cost import StepShape

NUM_WORKERS = 4
MAX_BATCHED_TOKENS = 1024
VOCABULARY = range(100, 49_000)
BOUND_S = 120.0
GIB = 2**30
# Requests to an idle worker, their tokens, and the seconds between two.
LONE_REQUESTS, LONE_PROMPT, LONE_ANSWER, LONE_GAP_S = 30, 256, 24, 0.05
COUNTERS = ("steps", "preemptions", "blocks_evicted", "blocks_written", "blocks_read", "blocks_received")


class Case(msgspec.Struct, frozen=True):
    """The tiers beyond the memory."""

    has_disk: bool = False
    has_peers: bool = False
    is_disk_shared: bool = False


class KvFacts(msgspec.Struct, frozen=True):
    """A worker's KV cache: tokens and bytes of a block, and the blocks that the worker has."""

    block_size: int
    block_bytes: float
    num_blocks: int


class Overheads(msgspec.Struct, frozen=True):
    """Seconds of an engine around a step, and of a message from one process to the next."""

    step_s: float
    hop_s: float


class Answer(msgspec.Struct):
    """The result of the request with this number. Times are in seconds since the start, in the client and at the worker
    as it tells them."""

    number: int
    asked_s: float
    first_s: float = 0.0
    ended_s: float = 0.0
    num_tokens: int = 0
    cached_tokens: int = 0
    disk_tokens: int = 0
    peer_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def record(self, job: Job) -> JobRecord:
        """The same as of the simulator."""
        made = JobRecord(job, -1, self.asked_s, self.first_s, self.ended_s, self.cached_tokens, self.disk_tokens)
        made.peer_tokens, made.num_tokens = self.peer_tokens, self.num_tokens
        return made


class Round(msgspec.Struct):
    """All requests of a round, each worker's busy seconds until the last was sent, what the workers counted, and the
    speeds that they learned in tokens per second (0: none)."""

    answers: list[Answer]
    busy_s: list[float]
    counters: dict[str, int]
    disk_rate: float
    peer_rate: float
    foreign_cpus: float = 0.0
    """CPUs that other programs used meanwhile."""


def working_set(jobs: Sequence[Job]) -> int:
    """Number of different prompt tokens."""
    longest: dict[int, int] = {}
    for segment, length in (entry for job in jobs for entry in job.segments):
        longest[segment] = max(longest.get(segment, 0), length)
    return sum(longest.values())


def real_tokens(job: Job) -> list[int]:
    """The tokens of a prompt. Equal segments have equal tokens."""
    tokens: list[int] = []
    for segment, length in job.segments:
        tokens += random.Random(segment).choices(VOCABULARY, k=length)
    return tokens


def request_of(prompt: Sequence[int], num_output_tokens: int) -> bytes:
    """A greedy request for exactly this many tokens."""
    request = inference_pb2.GenerateRequest(token_ids=prompt)
    request.sampling.temperature = 0.0
    request.sampling.max_tokens = num_output_tokens
    request.sampling.ignore_eos = True
    return request.SerializeToString()


class Fleet:
    """The processes, and a channel to the router."""

    def __init__(self, directory: Path, model: Path, num_workers: int, flags: Callable[[int], Sequence[str]]) -> None:
        """`flags` are those of each worker, by its number."""
        router = f"unix:{directory}/router.sock"
        self._num_workers = num_workers
        # They end with this process, however it ends.
        launched = ("headrace.common.launch", str(os.getpid()), "", sys.executable, "-m")
        self.processes = [Process(*launched, "headrace.router", "--listen", router)]
        self.processes += [
            Process(
                *(*launched, "headrace.worker", "--model", str(model), "--worker-id", f"worker-{number}"),
                *("--listen", f"unix:{directory}/worker-{number}.sock", "--router", router, "--threads", "1"),
                *("--speculation", "off", "--max-num-batched-tokens", str(MAX_BATCHED_TOKENS), *flags(number)),
            )
            for number in range(num_workers)
        ]
        self._address = f"unix:{directory}/worker-0.sock"
        channel = grpc.aio.insecure_channel(router, options=CHANNEL_OPTIONS)
        self._stub: Any = router_pb2_grpc.RouterStub(channel)  # type: ignore[no-untyped-call]
        self.client = SessionClient(channel)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run all processes until the end of the block. If it fails, show what they said."""
        with ExitStack() as ends:
            for process in self.processes:
                process.start()
                ends.callback(process.end)
            try:
                yield
            except BaseException:
                for process in self.processes:
                    sys.stderr.writelines(process.lines[-10:])
                raise

    def foreign_cpu_s(self) -> float:
        """CPU seconds of everything but these processes, since the machine's start."""
        ticks = [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]
        own_s = time.process_time() + sum(cpu_s(process.pid) for process in self.processes)
        return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK") - own_s

    async def until_ready(self) -> None:
        """Wait until the router has all workers, and they are idle."""
        async with asyncio.timeout(BOUND_S):
            while True:
                if await self._is_ready():
                    return
                await asyncio.sleep(0.1)

    async def _is_ready(self) -> bool:
        try:
            workers = await self.workers()
        except grpc.aio.AioRpcError:
            return False
        ready = [w.state == router_pb2.WORKER_STATE_READY and not w.load.num_running for w in workers]
        return len(ready) == self._num_workers and all(ready)

    async def workers(self) -> Sequence[router_pb2.WorkerInfo]:
        """What the router knows of the workers, by name."""
        found = (await self._stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=5)).workers
        return sorted(found, key=lambda worker: worker.worker_id)

    async def block_size(self) -> int:
        """Tokens of a block."""
        async with grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS) as channel:
            stub: Any = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            return int((await stub.GetModelCard(worker_pb2.GetModelCardRequest())).card.block_size)

    async def ask(self, raw: bytes, answer: Answer, began_s: float) -> None:
        """Send a request and read its answer. Times count from `began_s`, on time.perf_counter."""
        answer.asked_s = time.perf_counter() - began_s
        call = self.client.generate(raw, timeout=BOUND_S)
        while (message := await call.read()) is not grpc.aio.EOF:
            response = inference_pb2.GenerateResponse.FromString(message)
            answer.ended_s = time.perf_counter() - began_s
            if answer.num_tokens == 0:
                answer.first_s = answer.ended_s
                answer.cached_tokens = response.num_cached_tokens
                answer.disk_tokens, answer.peer_tokens = response.num_disk_tokens, response.num_peer_tokens
            answer.num_tokens += len(response.token_ids)
            if response.HasField("finish"):
                timings = response.finish.timings
                answer.queue_s, answer.prefill_s = timings.queue_us / 1e6, timings.prefill_us / 1e6
                answer.decode_s = timings.decode_us / 1e6


async def overheads(model: Path, cost: StepCost, flags: Sequence[str]) -> tuple[Overheads, KvFacts]:
    """Ask an idle worker behind a router for one answer after the other, and compare with the cost of their steps."""
    with tempfile.TemporaryDirectory() as directory:
        fleet = Fleet(Path(directory), model, 1, lambda number: ["--kv-cache-gb", "0.25", *flags])
        with fleet.running():
            await fleet.until_ready()
            first_s, step_s = [], []
            for number in range(LONE_REQUESTS):
                prompt = real_tokens(Job(number, 0.0, ((number, LONE_PROMPT),), LONE_ANSWER))
                answer = Answer(number, 0.0)
                await fleet.ask(request_of(prompt, LONE_ANSWER), answer, time.perf_counter())
                prompt_s, decode_s = (
                    cost.milliseconds(StepShape.of([step], changed=step[0] == 0)) / 1000
                    for step in ((0, LONE_PROMPT), (LONE_PROMPT + LONE_ANSWER // 2, 1))
                )
                first_s.append(answer.first_s - answer.asked_s - prompt_s)
                step_s.append((answer.ended_s - answer.first_s) / (LONE_ANSWER - 1) - decode_s)
                await asyncio.sleep(LONE_GAP_S)
            size, num_blocks = await fleet.block_size(), (await fleet.workers())[0].load.num_blocks
    around_s = max(0.0, _fastest(step_s))
    hop_s = max(0.0, _fastest(first_s) - around_s) / 4
    return Overheads(around_s, hop_s), KvFacts(size, 0.25 * GIB / (num_blocks + 1), num_blocks)


def _fastest(seconds: Sequence[float]) -> float:
    """The lowest decile: other programs only add time."""
    return statistics.quantiles(seconds, n=10)[0]


def worker_flags(case: Case, kv: KvFacts, jobs: Sequence[Job], directory: Path) -> list[str]:
    """The flags of a worker with a disk in `directory`, which holds all blocks of all prompts."""
    longest = max(job.num_prompt_tokens + job.num_output_tokens for job in jobs)
    memory_gb = ((kv.num_blocks + 1) * kv.block_bytes + 1024) / GIB
    flags = ["--kv-cache-gb", f"{memory_gb:.9f}", "--max-context-tokens", str(longest + 1)]
    if not case.has_peers:
        flags.append("--no-kv-peers")
    if case.has_disk:
        disk_gb = max(0.1, 1.5 * working_set(jobs) / kv.block_size * (kv.block_bytes + 8192) / GIB)
        flags += ["--kv-disk", str(directory), "--kv-disk-gb", f"{disk_gb:.3f}"]
    return flags


async def measured(
    model: Path, jobs: Sequence[Job], kv: KvFacts, case: Case, disk_dir: Path, more_flags: Sequence[str]
) -> Round:
    """A round with new processes."""
    with tempfile.TemporaryDirectory(dir=disk_dir) as directory:
        path = Path(directory)

        def flags(number: int) -> list[str]:
            disk = path / ("disk" if case.is_disk_shared else f"disk-{number}")
            return [*worker_flags(case, kv, jobs, disk), *more_flags]

        fleet = Fleet(path, model, NUM_WORKERS, flags)
        with fleet.running():
            await fleet.until_ready()
            return await replay(fleet, jobs, kv)


async def replay(fleet: Fleet, jobs: Sequence[Job], kv: KvFacts) -> Round:
    """Send the requests at their times, and read the answers."""
    raws = [request_of(real_tokens(job), job.num_output_tokens) for job in jobs]
    answers = [Answer(number, 0.0) for number in range(len(jobs))]
    before, rates = await fleet.workers(), []
    foreign_s, began_s = fleet.foreign_cpu_s(), time.perf_counter()

    async def watch() -> None:
        while True:
            await asyncio.sleep(1.0)
            rates.append([(w.load.disk_bytes_per_s, w.load.transfer_bytes_per_s) for w in await fleet.workers()])

    watching = asyncio.create_task(watch())
    async with asyncio.TaskGroup() as group:
        for job, raw, answer in zip(jobs, raws, answers, strict=True):
            await asyncio.sleep(max(0.0, job.arrival_s - (time.perf_counter() - began_s)))
            group.create_task(fleet.ask(raw, answer, began_s))
        at_end = await fleet.workers()
        foreign = (fleet.foreign_cpu_s() - foreign_s) / (time.perf_counter() - began_s)
    watching.cancel()
    await fleet.until_ready()
    after = await fleet.workers()
    for job, answer in zip(jobs, answers, strict=True):
        assert answer.num_tokens == job.num_output_tokens, "an answer was cut"

    def counted(which: Sequence[router_pb2.WorkerInfo], name: str) -> list[int]:
        return [
            getattr(now.load.counters, name) - getattr(then.load.counters, name)
            for now, then in zip(which, before, strict=True)
        ]

    busy_s = [
        (inside + around) / 1e6
        for inside, around in zip(counted(at_end, "infer_us"), counted(at_end, "overhead_us"), strict=True)
    ]
    per_byte = kv.block_size / kv.block_bytes
    disk, peer = (typical([pair[kind] for pairs in rates for pair in pairs]) * per_byte for kind in (0, 1))
    return Round(answers, busy_s, {name: sum(counted(after, name)) for name in COUNTERS}, disk, peer, foreign)


def typical(rates: Sequence[float]) -> float:
    """The median of those that are known; 0 if none is."""
    known = [rate for rate in rates if rate > 0]
    return statistics.median(known) if known else 0.0
