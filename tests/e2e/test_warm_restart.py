"""A worker that is killed has its cached prefixes when it is back, and never a wrong token.

`make test` kills a few times; with `python -m tests.soak survival` it is 1,000 times.
HEADRACE_SEED repeats the choices.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.fleet import Fleet, fleet
from tests.e2e.serving import MODEL, Serve, serving, until
from tests.e2e.small_model import small_model
from tests.e2e.streams import STREAM_BOUND_S, http_client
from tests.patience import patience

pytestmark = pytest.mark.e2e

NUM_DEATHS = 1000 if os.environ.get("HEADRACE_SOAK") == "1" else 4
SEED = int(os.environ.get("HEADRACE_SEED", "1"))
BLOCK = 32
MAX_TOKENS = 40


def body(prompt: list[int], max_tokens: int = MAX_TOKENS, **fields: Any) -> dict[str, Any]:
    """A completion of token ids."""
    asked = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {**asked, "return_token_ids": True, **fields}


async def complete(client: httpx.AsyncClient, base_url: str, asked: dict[str, Any]) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of the prompt's were cached. A gateway without workers is asked again."""
    deadline_s = time.monotonic() + patience(STREAM_BOUND_S)
    while True:
        response = await client.post(f"{base_url}/v1/completions", json=asked)
        if response.status_code != 503 or time.monotonic() > deadline_s:
            break
        await asyncio.sleep(0.1)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def one_worker() -> Iterator[Serve]:
    """`headrace serve` with one worker, as a user starts it, in the mode in which the same tokens are the same bits."""
    with serving("--workers", "1", "--threads", "1", "--execution-mode", "accuracy", model=small_model()) as system:
        yield system


def kill_worker(system: Serve) -> None:
    """Kill the worker and wait until another process serves in its place."""
    before = system.process_of("worker-0")["pid"]
    os.kill(before, signal.SIGKILL)

    def is_back() -> bool:
        row = system.process_of("worker-0")
        return row["pid"] not in (None, before) and row["state"] == "ready"

    until(is_back, "the worker is back")
    until(system.is_ready, "the gateway is ready")


async def test_a_user_who_sets_nothing_keeps_the_cache_of_a_killed_worker(one_worker: Serve) -> None:
    prefix = [7 + number % 5000 for number in range(64 * BLOCK)]
    tails = [[11, 12, 13, 14, 15], [21, 22, 23, 24, 25]]
    async with http_client() as client:
        cold = [await complete(client, one_worker.base_url, body(prefix + tail, cache_salt="cold")) for tail in tails]
        assert cold[0][1] == 0
        assert (await complete(client, one_worker.base_url, body(prefix + tails[0])))[0] == cold[0][0]
        kill_worker(one_worker)
        for tail, (expected, _) in zip(tails, cold, strict=True):
            tokens, num_cached = await complete(client, one_worker.base_url, body(prefix + tail))
            assert tokens == expected
            assert num_cached == len(prefix)

    def is_idle() -> bool:
        row = one_worker.process_of("worker-0")
        return bool(row["kv_blocks_free"] == row["kv_blocks"])

    until(is_idle, "all blocks are free")
    assert one_worker.process_of("worker-0")["kv_blocks_restored"] >= 64
    assert any(re.search(r"restored \d+ of \d+ KV blocks", line) for line in one_worker.logs)


async def test_the_cache_of_one_salt_is_no_other_salts_after_a_death(one_worker: Serve) -> None:
    prompt = [9 + number % 3000 for number in range(8 * BLOCK)]
    async with http_client() as client:
        await complete(client, one_worker.base_url, body(prompt, cache_salt="mine"))
        kill_worker(one_worker)
        assert (await complete(client, one_worker.base_url, body(prompt, cache_salt="another's")))[1] == 0
        assert (await complete(client, one_worker.base_url, body(prompt, cache_salt="mine")))[1] > 0


@pytest.fixture
def in_a_directory() -> Iterator[tuple[Fleet, Path]]:
    """A worker whose KV cache is a file, behind router and gateway. The cache is so small that prompts evict one
    another."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory() as directory:
        flags = ["--execution-mode", "accuracy", "--kv-cache-gb", "0.004", "--max-context-tokens", "1024"]
        flags += ["--kv-memory", memory]
        with fleet(Path(directory), num_workers=1, worker_flags=flags) as made:
            yield made, Path(memory)


@pytest.mark.timeout(180 + 10 * NUM_DEATHS)
async def test_no_death_gives_a_wrong_token_or_loses_a_block(in_a_directory: tuple[Fleet, Path]) -> None:
    system, _ = in_a_directory
    rng = random.Random(SEED)
    stems = [[rng.randrange(100, 40_000) for _ in range(rng.randint(60, 400))] for _ in range(4)]
    prompts = [
        [
            *(stem := rng.choice(stems))[: rng.randint(40, len(stem))],
            *rng.sample(range(100, 40_000), rng.randint(2, 40)),
        ]
        for _ in range(16)
    ]
    worker, num_cached = system.workers[0], 0
    async with http_client() as client:
        expected = [
            (await complete(client, system.base_url, body(prompt, cache_salt=f"cold {number}")))[0]
            for number, prompt in enumerate(prompts)
        ]
        for _ in range(NUM_DEATHS):
            chosen = rng.sample(range(len(prompts)), 5)
            tasks = [asyncio.create_task(complete(client, system.base_url, body(prompts[i]))) for i in chosen]
            await asyncio.sleep(rng.uniform(0.0, 0.6))
            worker.kill()
            worker.gone()
            worker.start()
            while rng.random() < 0.3:  # while it loads, checks or restores
                await asyncio.sleep(rng.uniform(0.0, 1.5))
                worker.kill()
                worker.gone()
                worker.start()
            for number, (tokens, cached) in zip(chosen, await asyncio.gather(*tasks), strict=True):
                assert tokens == expected[number], f"prompt {number}"
                num_cached += cached
        system.until_idle()
    assert num_cached > 0


async def test_an_orderly_stop_removes_the_file_and_a_death_does_not(in_a_directory: tuple[Fleet, Path]) -> None:
    system, memory = in_a_directory
    worker = system.workers[0]
    assert [path.stat().st_mode & 0o777 for path in memory.iterdir()] == [0o600]
    worker.kill()
    worker.gone()
    assert len(list(memory.iterdir())) == 1
    worker.start()
    system.until_whole()
    worker.terminate()
    assert worker.gone() == 0
    assert not list(memory.iterdir())
    worker.start()
    system.until_whole()
