"""Measures the cost of a router for a stream: `python -m benchmarks.router.overhead [--streams 64] [--rounds 8]`.

It reads streams of 40 tokens from a scripted worker in a separate process (see router_processes) in three ways in turn:
directly from the worker and through `python -m headrace.router`, both in one session as a gateway does, and as separate
calls through a bare grpc.aio pass-through. The number of open streams is constant: each is followed by another. It
prints TTFT and its difference from the direct way, and the CPU time per message of the process in between, from
/proc/PID/stat.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import grpc
import uvloop

from benchmarks.router.processes import NUM_TOKENS
from headrace.bench.process_tree import cpu_s
from headrace.common.ports import free_port
from headrace.common.transport.session_client import GENERATE, SessionClient
from headrace.common.transport.sessions import Call
from headrace.protos import inference_pb2

WAYS = ("straight", "pass-through", "router")
# Streams that one place reads one after the other in a round.
STREAMS_IN_A_ROW = 4
MESSAGES_OF_A_STREAM = NUM_TOKENS + 1


def free_address() -> str:
    """A free local address."""
    return f"127.0.0.1:{free_port('127.0.0.1')}"


@contextmanager
def process(*args: str) -> Iterator[int]:
    """A Python process for as long as the context lasts; its pid."""
    started = subprocess.Popen([sys.executable, "-m", *args])
    try:
        yield started.pid
    finally:
        started.terminate()
        started.wait(10)


class Way:
    """One way to the worker: a channel, and the process in between if there is one."""

    def __init__(self, address: str, pid: int | None, *, in_session: bool) -> None:
        self.pid = pid
        self._channel = grpc.aio.insecure_channel(address)
        self._call: Callable[[bytes], Call] = (
            SessionClient(self._channel).generate if in_session else self._channel.unary_stream(GENERATE)
        )
        self.ttft_ms: list[float] = []
        self.cpu_us: list[float] = []

    async def until_ready(self) -> None:
        """Return when a stream came through. Raises TimeoutError."""
        async with asyncio.timeout(30):
            while True:
                try:
                    await self._stream(_request(0))
                    return
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.1)

    async def round(self, streams: int, number: int) -> None:
        """Run this many streams at a time; record the median TTFT and the CPU time per message."""
        began_s = 0.0 if self.pid is None else cpu_s(self.pid)
        rows = await asyncio.gather(*(self._row(number * streams + place) for place in range(streams)))
        if self.pid is not None:
            num_messages = streams * STREAMS_IN_A_ROW * MESSAGES_OF_A_STREAM
            self.cpu_us.append((cpu_s(self.pid) - began_s) / num_messages * 1e6)
        self.ttft_ms.append(statistics.median(ttft for row in rows for ttft in row))

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def _row(self, number: int) -> list[float]:
        # Not all in the same moment, as clients are not.
        await asyncio.sleep(number % 64 / 64)
        return [await self._stream(_request(number * STREAMS_IN_A_ROW + turn)) for turn in range(STREAMS_IN_A_ROW)]

    async def _stream(self, raw: bytes) -> float:
        """Read a whole stream. Returns the milliseconds to its first message."""
        began = time.perf_counter()
        call = self._call(raw)
        num_messages, ttft_ms = 0, 0.0
        while await call.read() is not grpc.aio.EOF:
            if num_messages == 0:
                ttft_ms = 1000 * (time.perf_counter() - began)
            num_messages += 1
        if num_messages != MESSAGES_OF_A_STREAM:
            raise AssertionError(f"{num_messages} messages came instead of {MESSAGES_OF_A_STREAM}")
        return ttft_ms


def _request(number: int) -> bytes:
    request = inference_pb2.GenerateRequest(token_ids=[number % 40_000 + 1, *range(100, 163)])
    request.sampling.max_tokens = NUM_TOKENS
    return request.SerializeToString()


def report(ways: dict[str, Way], streams: int) -> None:
    """Print medians over the rounds with their spread."""
    straight = ways["straight"].ttft_ms
    print(f"{streams} streams, {len(straight)} rounds of {streams * STREAMS_IN_A_ROW} streams of {NUM_TOKENS} tokens")
    for name, way in ways.items():
        added = sorted(mine - base for mine, base in zip(way.ttft_ms, straight, strict=True))
        line = f"{name:13} TTFT p50 {statistics.median(way.ttft_ms):6.2f} ms"
        if way.cpu_us:
            cpu = sorted(way.cpu_us)
            line += f", added {statistics.median(added):5.2f} ms (min {added[0]:.2f}, max {added[-1]:.2f})"
            line += f"; CPU a message {statistics.median(cpu):5.1f} us (min {cpu[0]:.1f}, max {cpu[-1]:.1f})"
        print(line)
    ratios = sorted(mine / base for mine, base in zip(ways["router"].cpu_us, ways["pass-through"].cpu_us, strict=True))
    print(f"CPU, router to pass-through: {statistics.median(ratios):.2f} (min {ratios[0]:.2f}, max {ratios[-1]:.2f})")


async def measure(addresses: dict[str, str], pids: dict[str, int | None], streams: int, rounds: int) -> None:
    """Run all rounds, with the ways in turn."""
    ways = {name: Way(addresses[name], pids[name], in_session=name != "pass-through") for name in WAYS}
    for way in ways.values():
        await way.until_ready()
        await way.round(streams, 0)
        way.ttft_ms.clear()
        way.cpu_us.clear()
    for number in range(1, rounds + 1):
        for name in WAYS[:: 1 if number % 2 else -1]:
            await ways[name].round(streams, number)
    report(ways, streams)
    for way in ways.values():
        await way.close()


def main() -> None:
    """Parse, start the processes, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    addresses = {name: free_address() for name in WAYS}
    worker = addresses["straight"]
    router = ("headrace.router", "--listen", addresses["router"], "--worker", worker, "--log-level", "warning")
    with ExitStack() as processes:
        processes.enter_context(process("benchmarks.router.processes", "worker", worker))
        pids = {
            "straight": None,
            "pass-through": processes.enter_context(
                process("benchmarks.router.processes", "pass", addresses["pass-through"], worker)
            ),
            "router": processes.enter_context(process(*router)),
        }
        uvloop.run(measure(addresses, pids, args.streams, args.rounds))


if __name__ == "__main__":
    main()
