"""Measures real router processes with many fake workers: `python -m benchmarks.router.real_fleet [--workers 64 512]`.

For each number of workers it starts two routers that know them all, and prints for the routers: the time until all
workers are ready and its CPU, the CPU time of a report, of a request with one token, and of each further token, and
the time of a decision (`headrace_router_decision_seconds`). It also prints the time of a message between two processes:
half of what a request with one token takes without a router.

CPU times are those of the routers, from /proc, without what they take between requests. With --out, the costs are
written for `headrace sim`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import grpc
import msgspec
import uvloop

from benchmarks.machine import describe
from benchmarks.router.overhead import cpu_s, free_address, process
from headrace.common.transport.session_client import SessionClient
from headrace.protos import inference_pb2
from headrace.sim.process_cost import ProcessCost

NUM_ROUTERS, NUM_PROCESSES = 2, 2
# Intervals of a worker's reports: the quiet one, and the busy one for so many reports a second at most.
QUIET_S, BUSY_S, MOST_PER_S = 1.0, 0.08, 2000
PROMPT_TOKENS = 1400
NUM_TOKENS = 40
AT_ONCE = 16


class FakeFleet:
    """The processes of the workers."""

    def __init__(self, processes: ExitStack, directory: str, num_workers: int) -> None:
        self.addresses = [f"unix:{directory}/w{number}.sock" for number in range(num_workers)]
        self._processes = []
        share = num_workers // NUM_PROCESSES
        for first in range(0, num_workers, share):
            command = [sys.executable, "-m", "benchmarks.router.fake_fleet", directory, str(first), str(share)]
            started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            processes.callback(started.wait, 30)
            assert started.stdin is not None
            processes.callback(started.stdin.close)
            self._processes.append(started)
        for started in self._processes:
            assert started.stdout is not None
            assert started.stdout.readline() == "ready\n"

    def order(self, interval_s: float, num_tokens: int = 1) -> int:
        """Set the interval of reports, and the tokens of answers. Returns the number of reports sent so far."""
        num_sent = 0
        for started in self._processes:
            assert started.stdin is not None
            assert started.stdout is not None
            started.stdin.write(json.dumps({"interval_s": interval_s, "num_tokens": num_tokens}) + "\n")
            started.stdin.flush()
            num_sent += int(started.stdout.readline())
        return num_sent


class Own(NamedTuple):
    """What a router takes without requests: for a report, and each second."""

    report_us: float
    idle_us_per_s: float


class Measured(msgspec.Struct):
    """The costs with a number of workers. Times of a process are means over the routers."""

    num_workers: int
    ready_s: float
    ready_cpu_ms: float
    report_us: float
    request_us: float
    token_us: float
    decision_us: float
    hop_ms: float


def metric(address: str, name: str) -> float:
    """The sum of a metric's series."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def background_us(pids: Sequence[int], fleet: FakeFleet, interval_s: float, seconds: float) -> tuple[float, float]:
    """The CPU microseconds a second of a router, and its reports a second, with reports at this interval."""
    fleet.order(interval_s)
    time.sleep(1.0)
    sent, began, cpu = fleet.order(interval_s), time.perf_counter(), sum(map(cpu_s, pids))
    time.sleep(seconds)
    passed_s = time.perf_counter() - began
    num_sent = fleet.order(interval_s) - sent
    per_s = 1e6 * (sum(map(cpu_s, pids)) - cpu) / passed_s
    return per_s / len(pids), num_sent / passed_s / len(pids)


def _request(rng: random.Random) -> bytes:
    request = inference_pb2.GenerateRequest(token_ids=[rng.randrange(900) for _ in range(PROMPT_TOKENS)])
    request.sampling.max_tokens = NUM_TOKENS
    return request.SerializeToString()


async def stream_all(address: str, num_requests: int, at_once: int) -> list[float]:
    """Read so many answers. Returns the milliseconds to the first message of each."""
    rng = random.Random(1)
    requests = iter([_request(rng) for _ in range(num_requests)])
    channel = grpc.aio.insecure_channel(address)
    client = SessionClient(channel)
    first_ms: list[float] = []

    async def row() -> None:
        for raw in requests:
            began, call, has_begun = time.perf_counter(), client.generate(raw), False
            while await call.read() is not grpc.aio.EOF:
                if not has_begun:
                    first_ms.append(1000 * (time.perf_counter() - began))
                has_begun = True

    await asyncio.gather(*(row() for _ in range(at_once)))
    await channel.close()
    assert len(first_ms) == num_requests, "an answer did not begin"
    return first_ms


def streams_us(
    runner: asyncio.Runner, fleet: FakeFleet, pid: int, address: str, num_requests: int, *, num_tokens: int, own: Own
) -> float:
    """The CPU microseconds of a router for a request with so many tokens, beside what it takes for reports and for
    nothing."""
    sent, cpu, began = fleet.order(QUIET_S, num_tokens), cpu_s(pid), time.perf_counter()
    runner.run(stream_all(address, num_requests, AT_ONCE))
    cpu, passed_s = cpu_s(pid) - cpu, time.perf_counter() - began
    num_reports = (fleet.order(QUIET_S) - sent) / NUM_ROUTERS
    return (1e6 * cpu - own.report_us * num_reports - own.idle_us_per_s * passed_s) / num_requests


def measure(runner: asyncio.Runner, num_workers: int, seconds: float, num_requests: int) -> Measured:
    """Start everything, and measure with so many workers."""
    with ExitStack() as processes, tempfile.TemporaryDirectory() as directory:
        fleet = FakeFleet(processes, directory, num_workers)
        workers = [argument for address in fleet.addresses for argument in ("--worker", address)]
        began = time.perf_counter()
        pids, addresses, metrics = [], [], []
        for _ in range(NUM_ROUTERS):
            listen, metrics_address = free_address(), free_address()
            flags = ("--listen", listen, "--metrics", metrics_address, "--log-level", "warning", *workers)
            pids.append(processes.enter_context(process("headrace.router", *flags)))
            addresses.append(listen)
            metrics.append(metrics_address)
        for address in metrics:
            while True:
                try:
                    if metric(address, "headrace_router_workers_ready") == num_workers:
                        break
                except OSError:
                    pass
                time.sleep(0.1)
        ready_s, ready_cpu_s = time.perf_counter() - began, sum(map(cpu_s, pids)) / NUM_ROUTERS
        quiet_us, quiet_per_s = background_us(pids, fleet, QUIET_S, seconds)
        busy_us, busy_per_s = background_us(pids, fleet, max(BUSY_S, num_workers / MOST_PER_S), seconds)
        report_us = (busy_us - quiet_us) / (busy_per_s - quiet_per_s)
        own = Own(report_us, quiet_us - report_us * quiet_per_s)

        def streams(num_tokens: int, num_requests: int = num_requests) -> float:
            return streams_us(runner, fleet, pids[0], addresses[0], num_requests, num_tokens=num_tokens, own=own)

        streams(1, AT_ONCE)  # the first ones open connections
        names = ("headrace_router_decision_seconds_sum", "headrace_router_decision_seconds_count")
        before = [metric(metrics[0], name) for name in names]
        request_us = streams(1)
        took_s, count = (metric(metrics[0], name) - old for name, old in zip(names, before, strict=True))
        answer_us = streams(NUM_TOKENS)
        straight_ms = runner.run(stream_all(fleet.addresses[0], 200, 1))
        return Measured(
            num_workers,
            ready_s,
            1000 * ready_cpu_s,
            report_us,
            request_us,
            (answer_us - request_us) / (NUM_TOKENS - 1),
            1e6 * took_s / count,
            statistics.median(straight_ms) / 2,
        )


def cost_of(measured: Sequence[Measured]) -> ProcessCost:
    """The costs for simulations, of the smallest and the largest fleet."""
    least, most = measured[0], measured[-1]
    per_worker_us = 0.0
    if most.num_workers > least.num_workers:
        per_worker_us = max(0.0, most.request_us - least.request_us) / (most.num_workers - least.num_workers)
    return ProcessCost(
        request_us=most.request_us - per_worker_us * most.num_workers,
        per_worker_us=per_worker_us,
        report_us=most.report_us,
        token_us=most.token_us,
        hop_ms=least.hop_ms,
        machine=describe(),
    )


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--seconds", type=float, default=10.0, help="Time of each measurement of reports.")
    parser.add_argument("--requests", type=int, default=400, help="Requests of each measurement of placements.")
    parser.add_argument("--out", type=Path, help="Write the costs to this file.")
    args = parser.parse_args()
    measured = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for num_workers in sorted(args.workers):
            found = measure(runner, num_workers, args.seconds, args.requests)
            measured.append(found)
            print(
                f"{num_workers:5d} workers: ready after {found.ready_s:.1f} s and {found.ready_cpu_ms:,.0f} ms of CPU; "
                f"a report {found.report_us:.0f} us, a request {found.request_us:.0f} us (a decision "
                f"{found.decision_us:.0f}), a token {found.token_us:.0f} us; a message {found.hop_ms:.2f} ms",
                flush=True,
            )
    if args.out is not None:
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(cost_of(measured)), indent=2) + b"\n")


if __name__ == "__main__":
    main()
