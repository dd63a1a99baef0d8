"""Measures what a batch costs live streams: `python -m benchmarks.gateway.batch_beside [MODEL_DIR] [--rounds 6]`.

`headrace serve` with one worker answers `--streams` streams, each of which asks again as soon as it has its answer.
Rounds of `--seconds` alternate between none beside them and a batch whose lines have longer prompts; the order of a
pair changes from pair to pair. It prints the gaps between the tokens of the streams, over all rounds of a kind, how
many lines of the batch were answered meanwhile, and how many with nothing beside the batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.machine import describe
from headrace.cli.models.model_cache import model_directory
from headrace.common.ports import free_port

MODEL = "smollm2-135m"
URL = "/v1/chat/completions"
ANSWER_TOKENS = 200
LINE_WORDS = 300
LINE_TOKENS = 64
_READY_S = 300.0
_SETTLE_S = 2.0


def body_of(question: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """A request for a greedy answer of this length."""
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, **more}


class Site:
    """A running server, and the gaps between the tokens of streams."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model
        self.gaps_ms: list[float] = []
        self._number = 0

    async def stream(self, until_s: float) -> None:
        """Ask one question after another, and note the gaps between tokens."""
        while time.monotonic() < until_s:
            self._number += 1
            body = body_of(f"Count from {self._number}.", ANSWER_TOKENS, model=self._model, stream=True)
            last_s = 0.0
            async with self._http.stream("POST", URL, json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        now_s = time.monotonic()
                        if last_s:
                            self.gaps_ms.append(1000 * (now_s - last_s))
                        last_s = now_s

    async def live(self, num_streams: int, seconds: float) -> None:
        """Streams for this time."""
        until_s = time.monotonic() + seconds
        await asyncio.gather(*(self.stream(until_s) for _ in range(num_streams)))

    async def begin(self, num_lines: int) -> str:
        """Begin a batch of lines with prompts of their own. Returns its id."""
        rows = []
        for number in range(num_lines):
            self._number += 1
            words = " ".join(f"word{self._number * 7 + n}" for n in range(LINE_WORDS))
            body = body_of(words, LINE_TOKENS, model=self._model)
            rows.append(json.dumps({"custom_id": str(number), "method": "POST", "url": URL, "body": body}))
        files = {"file": ("in.jsonl", "\n".join(rows).encode())}
        file = await self._http.post("/v1/files", data={"purpose": "batch"}, files=files)
        asked = {"input_file_id": file.json()["id"], "endpoint": URL, "completion_window": "24h"}
        return str((await self._http.post("/v1/batches", json=asked)).raise_for_status().json()["id"])

    async def answered(self, batch_id: str) -> int:
        """How many lines of a batch have an answer."""
        counts = (await self._http.get(f"/v1/batches/{batch_id}")).raise_for_status().json()["request_counts"]
        assert not counts["failed"], counts
        return int(counts["completed"])

    async def cancel(self, batch_id: str) -> None:
        """Cancel a batch and wait for its end."""
        await self._http.post(f"/v1/batches/{batch_id}/cancel")
        status = ""
        while status != "cancelled":
            await asyncio.sleep(0.1)
            status = (await self._http.get(f"/v1/batches/{batch_id}")).json()["status"]


def shown(gaps_ms: Sequence[float]) -> str:
    """The gaps in a line."""
    cuts = statistics.quantiles(gaps_ms, n=1000)
    return f"gap p50 {cuts[499]:6.1f} ms  p99 {cuts[989]:6.1f} ms  mean {statistics.fmean(gaps_ms):6.1f} ms"


async def measure(site: Site, rounds: int, seconds: float, num_streams: int) -> None:
    """Alternate, and print."""
    gaps: dict[bool, list[float]] = {False: [], True: []}
    num_lines = 0
    await site.live(num_streams, 5.0)
    for number in range(rounds):
        for has_batch in (False, True) if number % 2 else (True, False):
            batch_id = await site.begin(2000) if has_batch else ""
            await asyncio.sleep(_SETTLE_S)
            before = await site.answered(batch_id) if has_batch else 0
            site.gaps_ms = []
            await site.live(num_streams, seconds)
            gaps[has_batch] += site.gaps_ms
            if has_batch:
                num_lines += await site.answered(batch_id) - before
                await site.cancel(batch_id)
    for has_batch, name in ((False, "alone"), (True, "beside a batch")):
        print(f"{num_streams} streams, {name:14}  {shown(gaps[has_batch])}  of {len(gaps[has_batch])}")
    ratio = [statistics.quantiles(gaps[has_batch], n=100)[98] for has_batch in (True, False)]
    print(f"p99 beside a batch / alone: {ratio[0] / ratio[1]:.3f}; {num_lines} lines of the batches meanwhile")
    batch_id = await site.begin(2000)
    await asyncio.sleep(_SETTLE_S)
    before = await site.answered(batch_id)
    await asyncio.sleep(seconds)
    print(f"nothing beside the batch: {(await site.answered(batch_id) - before) / seconds:.2f} lines a second")
    await site.cancel(batch_id)


async def run(model_dir: Path, rounds: int, seconds: float, num_streams: int) -> None:
    """Serve, and measure."""
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory() as store:
        command = [sys.executable, "-m", "headrace.cli", "serve", str(model_dir), "--name", "live", "--port", str(port)]
        command += ["--workers", "1", "--kv-cache-gb", "1", "--batch-store", store, "--log-level", "warning"]
        child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            assert child.stdout is not None
            async with asyncio.timeout(_READY_S):
                line = await child.stdout.readline()
            assert line.startswith(b"ready"), "the server does not get ready"
            url = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=300.0) as http:
                await measure(Site(http, "live"), rounds, seconds, num_streams)
        finally:
            if child.returncode is None:
                child.terminate()
            await child.wait()


def main() -> None:
    """Read the options, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path, nargs="?", default=None)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--streams", type=int, default=4)
    args = parser.parse_args()
    print(describe())
    model_dir = args.model_dir or model_directory(MODEL)
    asyncio.run(run(model_dir, args.rounds, args.seconds, args.streams))


if __name__ == "__main__":
    main()
