"""Measures cached prefixes of other workers, and streams beside reads from a disk.

    python -m benchmarks.cache.tiers peers MODEL_DIR [--rounds 2]     milliseconds to the first token of a prompt whose
                                                                   prefix another worker has: through its memory, and
                                                                   over TCP on loopback
    python -m benchmarks.cache.tiers beside MODEL_DIR --disk DIR      gaps between the tokens of streams, while prompts
                                                                   come whose prefixes are on the disk, or in memory

The workers are asked directly, without a router. The prefix has --tokens tokens, the tails have 24. In `beside`, blocks
of --seconds alternate; each pair gives a ratio. Unknown flags are passed to the workers. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import numpy as np
import uvloop

from benchmarks.cache.restart import SEAL_S, SETTLE_S, TAIL_TOKENS, TOKENS, Worker, spread
from headrace.common.transport.channels import CHANNEL_OPTIONS
from headrace.common.transport.session_client import SessionClient
from headrace.protos import inference_pb2

NUM_STREAMS = 4
# The KV cache has to hold the streams and some prefixes, but not all.
STREAM_TOKENS = 1500
NUM_PREFIXES = 6
# Time between two prompts beside the streams.
EVERY_S = 1.5
PORTS = range(52_361, 52_363)


async def peers(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """A prefix computed at one worker, fetched by a second through memory, and by a third from the second over TCP."""
    rng = random.Random(args.seed)
    prefix = rng.choices(TOKENS, k=args.tokens)
    with contextlib.ExitStack() as stack:
        directories = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(3)]
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        first = Worker(args.model, directories[0], memory, flags)
        second, third = (
            Worker(args.model, directory, None, flags, f"127.0.0.1:{port}")
            for directory, port in zip(directories[1:], PORTS, strict=True)
        )

        async def ask(worker: Worker, source: str = "", *, is_cached: bool = True) -> float:
            taken, num_cached = await worker.ttft_ms([*prefix, *rng.choices(TOKENS, k=TAIL_TOKENS)], source)
            assert (num_cached > args.tokens - 64) == is_cached, f"{num_cached} tokens were cached"
            return taken

        await first.start()
        stack.callback(first.kill)
        cold = await ask(first, is_cached=False)
        warm = await ask(first)
        taken: dict[str, list[float]] = {"memory": [], "TCP": []}
        for _ in range(args.rounds):
            with contextlib.ExitStack() as running:
                for case, worker, source in (("memory", second, first), ("TCP", third, second)):
                    await worker.start()
                    running.callback(worker.kill)
                    await worker.ttft_ms(rng.choices(TOKENS, k=2 * TAIL_TOKENS))
                    taken[case].append(await ask(worker, source.address))
    print(f"{args.model.name}, {args.tokens} tokens, {args.rounds} rounds: cold {cold:.0f} ms, warm {warm:.0f} ms")
    for case, values in taken.items():
        print(f"  {case}: {spread(values, 1)} ms")
        print(f"  {case}, without what a warm prefix takes / cold: {spread([(v - warm) / cold for v in values], 4)}")
        print(f"  {case} / cold: {spread([value / cold for value in values], 4)}", flush=True)


class Streams:
    """Some endless streams of a worker, which note the gaps between their tokens in `gaps_ms`."""

    def __init__(self) -> None:
        self.gaps_ms: list[float] = []

    @contextlib.asynccontextmanager
    async def run(self, worker: Worker, rng: random.Random) -> AsyncIterator[None]:
        """Run them."""
        async with grpc.aio.insecure_channel(worker.address, options=CHANNEL_OPTIONS) as channel:
            await channel.channel_ready()
            client = SessionClient(channel)
            tasks = [asyncio.create_task(self._read(client, rng)) for _ in range(NUM_STREAMS)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, client: SessionClient, rng: random.Random) -> None:
        while True:
            request = inference_pb2.GenerateRequest(token_ids=rng.choices(TOKENS, k=40))
            request.sampling.temperature = 0.0
            request.sampling.max_tokens = STREAM_TOKENS
            request.sampling.ignore_eos = True
            call = client.generate(request.SerializeToString(), timeout=1000.0)
            before_s = 0.0
            while await call.read() is not grpc.aio.EOF:
                now_s = time.perf_counter()
                if before_s:
                    self.gaps_ms.append(1000 * (now_s - before_s))
                before_s = now_s


async def beside(args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Gaps of streams beside prompts from the disk, and beside prompts in memory."""
    rng = random.Random(args.seed)
    prefixes = [rng.choices(TOKENS, k=args.tokens) for _ in range(NUM_PREFIXES)]
    with tempfile.TemporaryDirectory() as directory:
        worker = Worker(args.model, Path(directory), None, [*flags, "--kv-disk", str(args.disk)])
        await worker.start()
        try:
            for prefix in prefixes * 2:  # twice, so that all have been evicted
                await worker.ttft_ms([*prefix, *rng.choices(TOKENS, k=TAIL_TOKENS)])
            await asyncio.sleep(SETTLE_S + SEAL_S)
            streams = Streams()
            async with streams.run(worker, rng):
                ratios = []
                for number in range(args.rounds):
                    p99, cached = {}, {}
                    for case in ("disk", "memory") if number % 2 else ("memory", "disk"):
                        chosen = prefixes if case == "disk" else prefixes[:1]
                        await worker.ttft_ms([*chosen[-1], *rng.choices(TOKENS, k=TAIL_TOKENS)])
                        p99[case], cached[case] = await _block(worker, streams, chosen, rng, args.seconds)
                    ratios.append(p99["disk"] / p99["memory"])
                    print(f"  p99 {p99['disk']:.1f} ms beside the disk, {p99['memory']:.1f} ms beside memory; {cached}")
            print(f"{args.model.name}, {NUM_STREAMS} streams: p99 gap, disk / memory: {spread(ratios, 3)}", flush=True)
        finally:
            worker.kill()


async def _block(
    worker: Worker, streams: Streams, prefixes: Sequence[Sequence[int]], rng: random.Random, seconds: float
) -> tuple[float, float]:
    """p99 of the gaps while prompts with these prefixes come, in milliseconds, and the mean of their cached tokens."""
    streams.gaps_ms.clear()
    cached = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        for prefix in prefixes:
            begun_s = time.perf_counter()
            cached.append((await worker.ttft_ms([*prefix, *rng.choices(TOKENS, k=TAIL_TOKENS)]))[1])
            await asyncio.sleep(max(0.0, EVERY_S - (time.perf_counter() - begun_s)))
            if time.perf_counter() > end_s:
                break
    return float(np.percentile(streams.gaps_ms, 99)), statistics.mean(cached)


def main() -> None:
    """Parse the flags and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["peers", "beside"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--disk", type=Path)
    args, flags = parser.parse_known_args()
    if args.case == "beside" and args.disk is None:
        parser.error("beside needs --disk")
    uvloop.run((peers if args.case == "peers" else beside)(args, flags))


if __name__ == "__main__":
    main()
