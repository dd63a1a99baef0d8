"""Measures the cost of a gateway: CPU per streamed token, idle streams, open connections.

    python -m benchmarks.gateway.tokens [MODEL_DIR] [--streams 64] [--seconds 10] [--idle 1000] [--connections 5000]

A scripted worker (see gateway_processes) sends one token to each stream every 25 ms. CPU is the user and system time of
the gateway's process, from /proc, over a window in which no stream begins or ends. In the same run, processes that do
nothing else measure the cost of reading the tokens and of writing the events, and this process measures the gateway's
own code. The rest is the cost of connecting them: generators, timers, the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx

from benchmarks.gateway.processes import NUM_STREAMS, TOKEN_IDS
from benchmarks.machine import describe
from headrace.bench.process_tree import cpu_s
from headrace.cli.models.model_cache import model_directory
from headrace.common.ports import free_port
from headrace.gateway.chat.choice import Choice
from headrace.gateway.chat.output import ChatChoice
from headrace.gateway.chat.sampling import Sampling
from headrace.gateway.openai.answers import Identity, Shown
from headrace.gateway.openai.streams import ChatStream
from headrace.protos.inference_pb2 import GenerateResponse

WHO = Identity("chatcmpl-" + "0" * 32, "chat.completion", 1, "benchmark", "fp_0123456789ab")
MODEL = "smollm2-135m"
LIMIT_US = 40.0
_READY_BOUND_S = 60.0


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run `python -m ARGUMENTS` until the end of the block. Processes of gateway_processes are ready when the block
    begins."""
    child = subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True)
    try:
        if arguments[0] == "benchmarks.gateway.processes":
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()


class Streams:
    """Open HTTP streams of one client, whose events are counted."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self._readers: list[asyncio.Task[None]] = []
        self.num_events = 0

    async def open(self, path: str, body: dict[str, object] | None = None) -> None:
        """Send one request and read its answer on and on."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        payload = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        self._writers.append(writer)
        self._readers.append(asyncio.create_task(self._read(reader)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while chunk := await reader.read(1 << 16):
            self.num_events += chunk.count(b"data: ")

    async def until(self, num_events: int) -> None:
        """Wait until `count` events have arrived. Raises RuntimeError after a time limit."""
        deadline_s = time.monotonic() + _READY_BOUND_S
        while self.num_events < num_events:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{self.num_events} events came of {num_events}")
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Hang up."""
        for task in self._readers:
            task.cancel()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*self._readers, return_exceptions=True)


def chat(max_tokens: int, salt: str = "") -> dict[str, object]:
    """A streamed chat."""
    message = {"role": "user", "content": "How does a mill work?"}
    return {"messages": [message], "stream": True, "max_tokens": max_tokens, "cache_salt": salt}


@contextlib.asynccontextmanager
async def serving(model_dir: Path) -> AsyncIterator[tuple[int, int, str]]:
    """A gateway in front of a scripted worker: its process id, its port, the worker's address."""
    upstream, port = f"127.0.0.1:{free_port('127.0.0.1')}", free_port("127.0.0.1")
    with (
        process("benchmarks.gateway.processes", "upstream", upstream, str(model_dir)),
        process("headrace.gateway", "--port", str(port), "--router", upstream, "--log-level", "warning") as gateway,
    ):
        deadline_s = time.monotonic() + _READY_BOUND_S
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get("/health/ready")).status_code == 200:
                        break
                if time.monotonic() > deadline_s:
                    raise RuntimeError("the gateway does not get ready")
                await asyncio.sleep(0.1)
        yield gateway.pid, port, upstream


async def window(pid: int, seconds: float, streams: Streams | None = None) -> tuple[float, int]:
    """CPU seconds of a process and events of some streams within a window."""
    num_events, used_s = (0 if streams is None else streams.num_events), cpu_s(pid)
    await asyncio.sleep(seconds)
    return cpu_s(pid) - used_s, (0 if streams is None else streams.num_events) - num_events


async def per_token(pid: int, port: int, num_streams: int, seconds: float) -> tuple[float, float]:
    """Microseconds of CPU per streamed token, and tokens per second."""
    streams = Streams(port)
    for _ in range(num_streams):
        await streams.open("/v1/chat/completions", chat(8000))
    await streams.until(num_streams * 10)
    used_s, num_tokens = await window(pid, seconds, streams)
    await streams.close()
    return used_s / num_tokens * 1e6, num_tokens / seconds


async def receiving(upstream: str, seconds: float) -> float:
    """Microseconds per token of reading alone; streams are as even as the gateway's."""
    with process("benchmarks.gateway.processes", "receive", upstream) as child:
        await asyncio.sleep(1.0)
        used_s, _ = await window(child.pid, seconds)
    return used_s / (NUM_STREAMS * seconds / 0.025) * 1e6


async def writing(seconds: float) -> float:
    """Microseconds per event of uvicorn alone."""
    port = free_port("127.0.0.1")
    with process("benchmarks.gateway.processes", "write", str(port)) as child:
        await asyncio.sleep(1.0)
        streams = Streams(port)
        for _ in range(NUM_STREAMS):
            await streams.open("/")
        await streams.until(NUM_STREAMS * 10)
        used_s, num_events = await window(child.pid, seconds, streams)
        await streams.close()
    return used_s / num_events * 1e6


def own_code(num_tokens: int = 20_000) -> float:
    """Microseconds per token from a message to the bytes of its event."""
    table = [b" water"] * (TOKEN_IDS[-1] + 1)
    choice, reader = Choice(table, frozenset({2}), Sampling()), ChatChoice(None)
    stream = ChatStream(WHO, None, Shown())
    messages = [GenerateResponse(start_pos=i, token_ids=[TOKEN_IDS[i % 400]]) for i in range(num_tokens)]
    start_s = time.process_time()
    for message in messages:
        stream.piece(0, reader.push(choice.push(message)))
    return (time.process_time() - start_s) / num_tokens * 1e6


async def idle(pid: int, port: int, num_streams: int, seconds: float) -> tuple[float, float]:
    """CPU, in percent of a core, of a gateway with idle streams, and with none."""
    without_s, _ = await window(pid, seconds)
    streams = Streams(port)
    for _ in range(num_streams):
        await streams.open("/v1/chat/completions", chat(100, "idle"))
    await streams.until(2 * num_streams)
    await asyncio.sleep(1.0)
    used_s, _ = await window(pid, seconds)
    await streams.close()
    return 100 * used_s / seconds, 100 * without_s / seconds


async def connections(port: int, num: int) -> int:
    """How many of `num` connections get two responses while all others are open."""
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    request = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    num_good = 0
    for position in range(num):
        opened.append(await asyncio.open_connection("127.0.0.1", port))
        opened[-1][1].write(request)
        if position % 100 == 99:
            await asyncio.sleep(0)
    for is_last in (False, True):
        for reader, writer in opened:
            async with asyncio.timeout(_READY_BOUND_S):
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(len(b'{"status":"live"}'))
            num_good += is_last and head.startswith(b"HTTP/1.1 200")
            if not is_last:
                writer.write(request)
    for _, writer in opened:
        writer.close()
    return num_good


async def measure(arguments: argparse.Namespace) -> bool:
    """Measure and print; whether everything is as promised."""
    seconds = arguments.seconds
    async with serving(arguments.model_dir) as (pid, port, upstream):
        whole_us, tokens_per_s = await per_token(pid, port, arguments.streams, seconds)
        read_us, own_us, write_us = await receiving(upstream, seconds), own_code(), await writing(seconds)
        rest_us = whole_us - read_us - own_us - write_us
        rate = f"{arguments.streams} streams, {tokens_per_s:.0f} tokens/s"
        parts = f"reading alone {read_us:.1f}, own code {own_us:.1f}, writing alone {write_us:.1f}, rest {rest_us:.1f}"
        print(f"{rate}: {whole_us:.1f} us of CPU a token (limit {LIMIT_US:.0f}); {parts}", flush=True)
        idle_percent, none_percent = await idle(pid, port, arguments.idle, seconds)
        print(
            f"{arguments.idle} idle streams: {idle_percent:.1f} % of a core; without any {none_percent:.1f} %",
            flush=True,
        )
        num_good = await connections(port, arguments.connections)
        print(f"{arguments.connections} open connections: {num_good} answered", flush=True)
    return whole_us <= LIMIT_US and num_good == arguments.connections


def main() -> int:
    """Parse, measure; exit status 1 if a promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, nargs="?", default=model_directory(MODEL))
    parser.add_argument("--streams", type=int, default=NUM_STREAMS)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=5000)
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(describe(), flush=True)
    return 0 if asyncio.run(measure(arguments)) else 1


if __name__ == "__main__":
    sys.exit(main())
