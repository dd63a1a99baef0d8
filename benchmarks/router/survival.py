"""Measures the effect of a worker's death on clients:
`python -m benchmarks.router.survival MODEL_DIR [--rounds 4] [--seed 1]
[--hang]`.

Two workers with one thread each run behind a router. In each round, 32 greedy streams are read. After some tokens, one
of the workers (in turn) is killed with SIGKILL, or stopped with SIGSTOP. The pause of a stream on that worker is the
time between its last token before the death and its first one after.

The lost tokens must be computed again in any case, so each round has a control on the surviving worker. Its own streams
are run to the same point as in the experiment. Then the resumed streams are sent as fresh requests, with prompt and
delivered tokens together, all at once and with another cache salt. The control is their time to the first token.

It prints pause, control, and the excess of each stream's pause over its control; the time at which the router noticed;
and the CPU time of the surviving worker until the last of these streams had its token, which separates a slow machine
from a slow system.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import uvloop

from benchmarks.router.overhead import cpu_s
from headrace.common.transport.channels import CHANNEL_OPTIONS
from headrace.common.transport.session_client import SessionClient
from headrace.protos import inference_pb2, router_pb2, router_pb2_grpc

NUM_STREAMS = 32
MAX_TOKENS = 160
PROMPT_TOKENS = (64, 192)
TOKENS_BEFORE = (8, 40)
BOUND_S = 120.0
_NOTICED = re.compile(r"worker (\S+) at .*READY -> (SUSPECT|UNREACHABLE)")


class Process:
    """A process of the fleet; it can be started again. `noticed_s` has the times at which it reported lost workers."""

    def __init__(self, *args: str) -> None:
        self._args = args
        self._popen: subprocess.Popen[str] | None = None
        self.noticed_s: dict[str, float] = {}
        self.lines: list[str] = []

    def start(self) -> None:
        """Start it."""
        self._popen = subprocess.Popen([sys.executable, "-m", *self._args], stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=(self._popen,), daemon=True).start()

    @property
    def pid(self) -> int:
        """The id of the running process."""
        assert self._popen is not None
        return self._popen.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def end(self) -> None:
        """Kill the process if it is still running."""
        if self._popen is not None and self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait(BOUND_S)

    def _read(self, popen: subprocess.Popen[str]) -> None:
        assert popen.stderr is not None
        for line in popen.stderr:
            self.lines.append(line)
            if found := _NOTICED.search(line):
                self.noticed_s.setdefault(found[1], time.perf_counter())


@dataclass
class Stream:
    """The result of one request. Times are from time.perf_counter. `resumed_at` is the index in `token_ids` of the
    first token from a second worker."""

    prompt: Sequence[int]
    asked_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    resumed_at: int | None = None
    is_finished: bool = False

    @property
    def pause_s(self) -> float:
        """The pause of a resumed stream."""
        assert self.resumed_at
        return self.arrivals_s[self.resumed_at] - self.arrivals_s[self.resumed_at - 1]

    @property
    def ttft_s(self) -> float:
        """The time to the first token of a stream that has one."""
        return self.arrivals_s[0] - self.asked_s

    async def run(self, client: SessionClient, salt: str, max_tokens: int) -> None:
        """Send the request and read the answer."""
        request = inference_pb2.GenerateRequest(token_ids=self.prompt, cache_salt=salt)
        request.sampling.temperature = 0.0
        request.sampling.max_tokens = max_tokens
        request.sampling.ignore_eos = True
        self.asked_s = time.perf_counter()
        call = client.generate(request.SerializeToString(), timeout=BOUND_S)
        try:
            while (raw := await call.read()) is not grpc.aio.EOF:
                self._take(inference_pb2.GenerateResponse.FromString(raw))
        finally:
            call.cancel()
        assert self.is_finished, "the stream was cut"

    def _take(self, message: inference_pb2.GenerateResponse) -> None:
        assert message.start_pos == len(self.token_ids), "a token is missing, or came twice"
        # The first message of each attempt tells what was cached.
        if message.HasField("num_cached_tokens") and self.token_ids:
            self.resumed_at = len(self.token_ids)
        self.token_ids.extend(message.token_ids)
        self.arrivals_s.extend([time.perf_counter()] * len(message.token_ids))
        self.is_finished = message.HasField("finish")


@dataclass(frozen=True)
class Round:
    """Milliseconds of one round, of the streams that were resumed; `noticed` since the signal."""

    pauses: list[float]
    controls: list[float]
    excesses: list[float]
    noticed: float
    cpu: float
    control_cpu: float


class Fleet:
    """The processes, and channels to them."""

    def __init__(self, directory: Path, model: Path, worker_flags: Sequence[str]) -> None:
        router = f"unix:{directory}/router.sock"
        workers = [f"unix:{directory}/worker-{index}.sock" for index in range(2)]
        self.workers = [
            Process("headrace.worker", "--model", str(model), "--worker-id", f"worker-{index}", "--listen", address,
                    "--router", router, "--threads", "1", "--kv-cache-gb", "1", *worker_flags)
            for index, address in enumerate(workers)
        ]  # fmt: skip
        self.router = Process("headrace.router", "--listen", router)
        channel = grpc.aio.insecure_channel(router, options=CHANNEL_OPTIONS)
        self._stub: Any = router_pb2_grpc.RouterStub(channel)  # type: ignore[no-untyped-call]
        self.through_router = SessionClient(channel)
        self._addresses = workers

    def straight(self, index: int) -> tuple[grpc.aio.Channel, SessionClient]:
        """Send a request directly to one worker."""
        channel = grpc.aio.insecure_channel(self._addresses[index], options=CHANNEL_OPTIONS)
        return channel, SessionClient(channel)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run all processes until the end of the block."""
        with ExitStack() as ends:
            for process in (self.router, *self.workers):
                process.start()
                ends.callback(process.end)
            yield

    async def until_whole(self) -> None:
        """Wait until the router has both workers and they hold nothing."""
        async with asyncio.timeout(BOUND_S):
            while True:
                if await self._is_whole():
                    return
                await asyncio.sleep(0.1)

    async def _is_whole(self) -> bool:
        try:
            workers = (await self._stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=5)).workers
        except grpc.aio.AioRpcError:
            return False
        idle = [w.state == router_pb2.WORKER_STATE_READY and not w.load.num_running for w in workers]
        return len(idle) == 2 and all(idle)


async def until(is_true: Callable[[], bool]) -> None:
    """Wait until the condition holds, while the event loop runs."""
    async with asyncio.timeout(BOUND_S):
        while True:
            if is_true():
                return
            await asyncio.sleep(0.001)


async def play(fleet: Fleet, number: int, rng: random.Random, how: signal.Signals) -> Round:
    """Run one round and its control."""
    await fleet.until_whole()
    victim, survivor = number % 2, 1 - number % 2
    prompts = [[rng.randrange(100, 40_000) for _ in range(rng.randint(*PROMPT_TOKENS))] for _ in range(NUM_STREAMS)]
    num_before = rng.randint(*TOKENS_BEFORE)
    streams = [Stream(prompt) for prompt in prompts]
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(stream.run(fleet.through_router, f"round {number}", MAX_TOKENS))
        await until(lambda: min(len(stream.token_ids) for stream in streams) >= num_before)
        assert not any(stream.is_finished for stream in streams), "all are in flight"
        counts = [len(stream.token_ids) for stream in streams]
        fleet.router.noticed_s.clear()
        began_s, cpu_before_s = time.perf_counter(), cpu_s(fleet.workers[survivor].pid)
        fleet.workers[victim].signal(how)
        # Half of them were there, as the router had placed them.
        await until(lambda: sum(stream.resumed_at is not None for stream in streams) == NUM_STREAMS // 2)
        used_s = cpu_s(fleet.workers[survivor].pid) - cpu_before_s
    resumed = [stream for stream in streams if stream.resumed_at is not None]
    rest = [(stream, count) for stream, count in zip(streams, counts, strict=True) if stream.resumed_at is None]
    controls, control_used_s = await control(fleet, survivor, rest, resumed, f"control {number}")
    fleet.workers[victim].end()
    fleet.workers[victim].start()
    pauses = [1000 * stream.pause_s for stream in resumed]
    noticed_s = fleet.router.noticed_s[f"worker-{victim}"] - began_s
    excesses = [pause - cost for pause, cost in zip(pauses, controls, strict=True)]
    return Round(pauses, controls, excesses, 1000 * noticed_s, 1000 * used_s, 1000 * control_used_s)


async def control(
    fleet: Fleet, survivor: int, rest: Sequence[tuple[Stream, int]], resumed: Sequence[Stream], salt: str
) -> tuple[list[float], float]:
    """Milliseconds to the first token of the resumed streams when sent as fresh requests next to the surviving streams,
    and the worker's CPU seconds until all of them had it."""
    channel, client = fleet.straight(survivor)
    async with channel:
        beside = [Stream(stream.prompt) for stream, _ in rest]
        again = [Stream([*stream.prompt, *stream.token_ids[: stream.resumed_at]]) for stream in resumed]
        tasks = [asyncio.create_task(stream.run(client, salt, MAX_TOKENS)) for stream in beside]
        await until(lambda: all(len(s.token_ids) >= count for s, (_, count) in zip(beside, rest, strict=True)))
        cpu_before_s = cpu_s(fleet.workers[survivor].pid)
        for stream, original in zip(again, resumed, strict=True):
            left = MAX_TOKENS - (original.resumed_at or 0)
            tasks.append(asyncio.create_task(stream.run(client, salt, left)))
        await until(lambda: all(stream.token_ids for stream in again))
        used_s = cpu_s(fleet.workers[survivor].pid) - cpu_before_s
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [1000 * stream.ttft_s for stream in again], used_s


def line(what: str, values: Sequence[float]) -> str:
    """Median and range, in milliseconds."""
    return f"{what} p50 {statistics.median(values):6.0f} max {max(values):6.0f}"


def report(rounds: Sequence[Round]) -> None:
    """Print the results of all rounds."""
    for what in ("pauses", "controls", "excesses"):
        values = sorted(value for one in rounds for value in getattr(one, what))
        print(f"{what:9} ms: p50 {statistics.median(values):.0f}, p90 {values[int(0.9 * len(values))]:.0f}, "
              f"max {values[-1]:.0f} ({len(values)} streams)")  # fmt: skip
    worst = [max(one.pauses) - max(one.controls) for one in rounds]
    print(f"longest pause of a round over longest control: p50 {statistics.median(worst):.0f}, max {max(worst):.0f} ms")
    noticed = [one.noticed for one in rounds]
    print(f"noticed after p50 {statistics.median(noticed):.0f}, max {max(noticed):.0f} ms")


async def measure(model: Path, args: argparse.Namespace, worker_flags: Sequence[str]) -> None:
    """Run all rounds."""
    how = signal.SIGSTOP if args.hang else signal.SIGKILL
    rng = random.Random(args.seed)
    rounds = []
    with tempfile.TemporaryDirectory() as directory:
        fleet = Fleet(Path(directory), model, worker_flags)
        with fleet.running():
            for number in range(args.rounds):
                played = await play(fleet, number, rng, how)
                rounds.append(played)
                parts = (
                    line("pause", played.pauses),
                    line("control", played.controls),
                    line("excess", played.excesses),
                )
                cpu = f"CPU {played.cpu:.0f}, control {played.control_cpu:.0f}"
                print(f"round {number}: {', '.join(parts)}; noticed after {played.noticed:.0f}; {cpu} ms; "
                      f"load {os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip
    report(rounds)


def main() -> None:
    """Parse the flags and measure. Unknown flags are passed to the workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hang", action="store_true")
    args, worker_flags = parser.parse_known_args()
    uvloop.run(measure(args.model, args, worker_flags))


if __name__ == "__main__":
    main()
