"""Streams of text beside a train of images: the gaps between their tokens, and whether their texts stay the same.

    python -m benchmarks.images.beside MODEL_DIR [--streams 32] [--output 200] [--pairs 3] [--size 640x480]

The streams run alone and beside chats with one new picture each, two at a time, in turns. In each pair both runs have
the same prompts, so their texts have to be equal; the prompts are computed before, so that neither run waits for them.
On CPUs whose performance mode is not exact in steps of any size,
this needs `--serve-argument=--execution-mode=accuracy`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.gateway.http_throughput import Serving
from benchmarks.images.throughput import jpeg_url, picture, question

_PATH = "/v1/chat/completions"
_IMAGES_AT_ONCE, _IMAGE_OUTPUT = 2, 8


@dataclass(frozen=True, slots=True)
class Streamed:
    """A stream's text, and the seconds between its events."""

    text: str
    gaps_s: list[float]


async def stream(host: str, port: int, body: dict[str, object]) -> Streamed:
    """Ask a chat and read its stream."""
    payload = json.dumps({**body, "stream": True}).encode()
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
    head = f"POST {_PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
    text, at_s, gaps_s = "", 0.0, []
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            if line.startswith(b'{"error"'):
                raise RuntimeError(line.decode())
            continue
        choices = json.loads(line[6:])["choices"]
        new = choices[0]["delta"].get("content") if choices else None
        if not new:
            continue
        now_s = time.perf_counter()
        if at_s:
            gaps_s.append(now_s - at_s)
        text, at_s = text + new, now_s
    writer.close()
    return Streamed(text, gaps_s)


async def train(
    host: str, port: int, rng: np.random.Generator, size: tuple[int, int], answered: list[Streamed]
) -> None:
    """Ask about new pictures without end, and note the answers."""
    while True:
        image = {"type": "image_url", "image_url": {"url": jpeg_url(picture(rng, *size))}}
        content = [image, {"type": "text", "text": question(rng)}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": _IMAGE_OUTPUT, "ignore_eos": True}
        answered.append(await stream(host, port, body))


async def run(
    serving: Serving, texts: list[str], output: int, size: tuple[int, int] | None, seed: int
) -> tuple[list[Streamed], int]:
    """Stream all texts, beside pictures of this size if there is one. Also returns how many pictures were answered."""
    host, port = serving.host, serving.port
    answered: list[Streamed] = []
    trains = []
    if size is not None:
        rng = np.random.default_rng(seed)
        trains = [asyncio.create_task(train(host, port, rng, size, answered)) for _ in range(_IMAGES_AT_ONCE)]
    bodies = [
        {"messages": [{"role": "user", "content": text}], "max_tokens": output, "temperature": 0, "ignore_eos": True}
        for text in texts
    ]
    found = await asyncio.gather(*(stream(host, port, body) for body in bodies))
    for task in trains:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return list(found), len(answered)


def p99_ms(streams: list[Streamed]) -> float:
    """The 99th percentile of all gaps, in milliseconds."""
    return 1000 * float(np.percentile(list(itertools.chain.from_iterable(one.gaps_s for one in streams)), 99))


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--output", type=int, default=200, help="tokens of each stream (default 200)")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--size", default="640x480")
    parser.add_argument("--serve-argument", action="append", default=[], help="passed to headrace serve")
    args = parser.parse_args()
    width, height = (int(part) for part in args.size.split("x"))
    serving = Serving(args.model_dir, args.serve_argument)
    ratios, same = [], 0
    try:
        for pair in range(args.pairs + 1):
            rng = np.random.default_rng(pair)
            texts = [question(rng, 40) for _ in range(args.streams)]
            asyncio.run(run(serving, texts, 1, None, 0))
            runs = {}
            for size in [None, (width, height)] if pair % 2 else [(width, height), None]:
                runs[size] = asyncio.run(run(serving, texts, args.output, size, 1000 + pair))
            if not pair:
                continue
            (alone, _), (beside, num_images) = runs[None], runs[width, height]
            equal = sum(one.text == other.text for one, other in zip(alone, beside, strict=True))
            same += equal
            ratios.append(p99_ms(beside) / p99_ms(alone))
            print(
                f"pair {pair}: p99 gap {p99_ms(alone):.1f} ms alone, {p99_ms(beside):.1f} beside {num_images} pictures"
                f", ratio {ratios[-1]:.3f}; {equal} of {len(texts)} texts equal",
                flush=True,
            )
    finally:
        serving.stop()
    print(
        f"{args.streams} streams: p99 gap beside / alone {statistics.median(ratios):.3f} "
        f"(min {min(ratios):.3f}, max {max(ratios):.3f}); {same} of {args.streams * args.pairs} texts equal"
    )


if __name__ == "__main__":
    main()
