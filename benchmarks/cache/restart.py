"""Measures the value of a cached prefix after its worker died:
`python -m benchmarks.cache.restart [MODEL_DIR...] [--rounds 5]`.

It sends requests to one worker over its socket. A prefix is computed once, with a tail (cold). Then each round has:

    restarted   the worker is killed with SIGKILL and restarted; the first request is the prefix with another tail
    warm        the prefix with another tail
    again       the same once more: how much equal requests differ
    from disk   with --disk DIR: the same, after another prompt has evicted the prefix. Choose a --kv-cache-gb that
                holds the prefix once

It prints the milliseconds to the first token (median, minimum and maximum over the rounds), and the ratios within a
round. The tails have 24 tokens. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import uvloop

from headrace.cli.models.catalogue import DEFAULT_MODEL
from headrace.cli.models.model_cache import model_directory
from headrace.common.transport.channels import CHANNEL_OPTIONS
from headrace.common.transport.session_client import SessionClient
from headrace.protos import inference_pb2, worker_pb2, worker_pb2_grpc

TAIL_TOKENS = 24
TOKENS = range(100, 40_000)
BOUND_S = 600.0
# Until the journal has the blocks of the last request.
SEAL_S = 0.5
# Until the disk has what was driven out.
SETTLE_S = 5.0


class Worker:
    """A worker that can be killed and started again; its KV cache is in `memory`, or its own."""

    def __init__(
        self, model: Path, directory: Path, memory: Path | None, flags: Sequence[str], address: str | None = None
    ) -> None:
        self.address = address or f"unix:{directory}/worker.sock"
        self._argv = [sys.executable, "-m", "headrace.worker", "--model", str(model), "--listen", self.address]
        self._argv += ["--worker-id", "worker", *([] if memory is None else ["--kv-memory", str(memory)]), *flags]
        self._log = (directory / "log").open("ab")
        self._popen: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start it, and wait until it serves."""
        self._spawn()
        async with (
            asyncio.timeout(BOUND_S),
            grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel,
        ):
            stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            await stub.GetModelCard(worker_pb2.GetModelCardRequest(), wait_for_ready=True)

    def _spawn(self) -> None:
        self._popen = subprocess.Popen(self._argv, stderr=self._log)

    def kill(self) -> None:
        """Send SIGKILL."""
        assert self._popen is not None
        os.kill(self._popen.pid, signal.SIGKILL)
        self._popen.wait(BOUND_S)

    async def ttft_ms(self, prompt: Sequence[int], source: str = "") -> tuple[float, int]:
        """Milliseconds to the first token of a prompt, and how many of its tokens were cached. The worker may fetch
        cached blocks from another one at the address `source`."""
        async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            await channel.channel_ready()
            request = inference_pb2.GenerateRequest(token_ids=prompt)
            if source:
                request.kv_source, request.kv_source_tokens = source, len(prompt)
            request.sampling.temperature = 0.0
            request.sampling.max_tokens = 1
            request.sampling.ignore_eos = True
            start_s = time.perf_counter()
            call = SessionClient(channel).generate(request.SerializeToString(), timeout=BOUND_S)
            raw = await call.read()
            took_ms = 1000 * (time.perf_counter() - start_s)
            num_cached = inference_pb2.GenerateResponse.FromString(raw).num_cached_tokens
            while await call.read() is not grpc.aio.EOF:
                pass
            return took_ms, num_cached


async def play(worker: Worker, rng: random.Random, args: argparse.Namespace) -> tuple[float, list[dict[str, float]]]:
    """Milliseconds of the prefix when it is cold, and of each round by case."""
    prefix = rng.choices(TOKENS, k=args.tokens)

    async def ask(*, is_cached: bool) -> float:
        taken, num_cached = await worker.ttft_ms([*prefix, *rng.choices(TOKENS, k=TAIL_TOKENS)])
        assert (num_cached > args.tokens - 64) == is_cached, f"{num_cached} tokens were cached"
        return taken

    cold = await ask(is_cached=False)
    rounds = []
    for _ in range(args.rounds):
        await asyncio.sleep(SEAL_S)
        worker.kill()
        await worker.start()
        taken = {case: await ask(is_cached=True) for case in ("restarted", "warm", "again")}
        if args.disk:
            await worker.ttft_ms(rng.choices(TOKENS, k=args.tokens))
            await asyncio.sleep(SETTLE_S)
            taken["from disk"] = await ask(is_cached=True)
        rounds.append(taken)
    return cold, rounds


def report(model: Path, num_tokens: int, cold: float, rounds: Sequence[dict[str, float]]) -> None:
    """Print the results of all rounds of a model."""
    print(f"{model.name}, {num_tokens} tokens, {len(rounds)} rounds")
    print(f"  cold       {cold:.0f} ms")
    for case in rounds[0]:
        print(f"  {case:10} {spread([taken[case] for taken in rounds], 1)} ms")
    for case in rounds[0]:
        if case != "warm":
            print(f"  {case} / warm: {spread([taken[case] / taken['warm'] for taken in rounds], 3)}")
        print(f"  {case} / cold: {spread([taken[case] / cold for taken in rounds], 4)}", flush=True)


def spread(values: Sequence[float], digits: int) -> str:
    """Median, and the smallest and largest."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


async def measure(model: Path, args: argparse.Namespace, flags: Sequence[str]) -> None:
    """Run all rounds of a model."""
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        disk = [] if args.disk is None else ["--kv-disk", str(args.disk)]
        worker = Worker(model, Path(directory), Path(memory), ["--kv-cache-gb", "1", *disk, *flags])
        await worker.start()
        try:
            report(model, args.tokens, *await play(worker, rng, args))
        finally:
            worker.kill()


def main() -> None:
    """Parse the flags and measure. Unknown flags are passed to the workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*", default=[model_directory(DEFAULT_MODEL)])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--disk", type=Path)
    args, flags = parser.parse_known_args()
    for model in args.models:
        uvloop.run(measure(model, args, flags))


if __name__ == "__main__":
    main()
