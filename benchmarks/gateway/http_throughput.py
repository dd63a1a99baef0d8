"""Compares headrace over HTTP with the plain loop around the same kernels, alternating in one run.

    python -m benchmarks.gateway.http_throughput MODEL_DIR [--concurrency 32] [--pairs 5]

Each side gets the same number of requests with random tokens, 128 in and 64 out, greedy, ignoring end tokens. The plain
loop gets all of them at once; headrace gets them as HTTP streams. Both processes run all the time, but only one works.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np

from benchmarks.gateway.http_load import Answer, closed_loop

if TYPE_CHECKING:
    from collections.abc import Callable


def plain_loop_process(pipe: Connection, model_dir: Path, requests: int, prompt: int, output: int) -> None:
    """Answer each received seed with the seconds that a batch took."""
    from benchmarks.engine.plain_loop import BLOCK, PlainLoop

    loop = PlainLoop(model_dir, max_tokens=requests * (prompt + output + BLOCK))
    pipe.send(loop.vocab_size)
    while (seed := pipe.recv()) is not None:
        prompts = prompts_of(seed, loop.vocab_size, requests, prompt)
        start = time.perf_counter()
        loop.run(prompts, output, 256)
        pipe.send(time.perf_counter() - start)


def prompts_of(seed: int, vocab_size: int, requests: int, prompt: int) -> list[list[int]]:
    """Random prompts `[requests][prompt]`."""
    rows: list[list[int]] = np.random.default_rng(seed).integers(100, vocab_size, (requests, prompt)).tolist()
    return rows


class Serving:
    """A `headrace serve` process that runs until `stop`."""

    def __init__(self, model_dir: Path, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "headrace.cli", "serve", str(model_dir), "--port", "0", *arguments]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        url = urlsplit(self._process.stdout.readline().removeprefix("ready: ").strip())
        if url.hostname is None or url.port is None:
            raise RuntimeError("headrace serve did not become ready; run it by hand to see why")
        self.host, self.port, self.pid = url.hostname, url.port, self._process.pid

    def run(self, prompts: list[list[int]], output: int) -> tuple[float, list[Answer]]:
        """Run all prompts at once. Returns the seconds and the answers."""
        bodies: list[dict[str, object]] = [
            {"prompt": prompt, "max_tokens": output, "temperature": 0, "repetition_penalty": 1, "ignore_eos": True}
            for prompt in prompts
        ]
        start = time.perf_counter()
        answers = asyncio.run(closed_loop(self.host, self.port, bodies, len(bodies)))
        seconds = time.perf_counter() - start
        assert all(answer.num_tokens == output for answer in answers)
        return seconds, answers

    def stop(self) -> None:
        """Stop the process and wait for its end."""
        self._process.terminate()
        self._process.wait(10)


def measure(args: argparse.Namespace, report: Callable[[str], None]) -> None:
    """Run the pairs, and print each pair and the medians."""
    context = get_context("spawn")
    pipe, other_end = context.Pipe()
    sizes = (args.concurrency, args.prompt, args.output)
    peer = context.Process(target=plain_loop_process, args=(other_end, args.model_dir, *sizes), daemon=True)
    peer.start()
    serving = Serving(args.model_dir, args.serve_argument)
    vocab_size = pipe.recv()
    tokens = args.concurrency * args.output
    ratios, rates, peer_rates, ttfts = [], [], [], []
    for pair in range(args.pairs + 1):
        pipe.send(2 * pair)
        peer_s = pipe.recv()
        seconds, answers = serving.run(prompts_of(2 * pair + 1, vocab_size, args.concurrency, args.prompt), args.output)
        if pair == 0:
            continue
        rates.append(tokens / seconds)
        peer_rates.append(tokens / peer_s)
        ratios.append(peer_s / seconds)
        ttfts += [answer.ttft_s for answer in answers]
        report(f"pair {pair}: headrace {rates[-1]:.0f}, plain loop {peer_rates[-1]:.0f} output tokens/s")
    serving.stop()
    pipe.send(None)
    report(
        f"concurrency {args.concurrency}, {args.prompt}/{args.output} tokens, {args.pairs} pairs: "
        f"headrace {statistics.median(rates):.0f}, plain loop {statistics.median(peer_rates):.0f} output tokens/s, "
        f"ratio {statistics.median(ratios):.3f} (min {min(ratios):.3f}, max {max(ratios):.3f}), "
        f"TTFT p50 {1000 * statistics.median(ttfts):.0f} ms"
    )


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--serve-argument", action="append", default=[], help="passed to headrace serve")
    measure(parser.parse_args(), print)


if __name__ == "__main__":
    main()
