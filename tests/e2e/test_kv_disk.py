"""Cached prefixes on a disk, with real workers: evicted blocks are read back, and tokens equal those of a cold run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.fleet import Fleet, fleet
from tests.e2e.serving import until
from tests.e2e.streams import http_client
from tests.e2e.test_warm_restart import body, complete

pytestmark = pytest.mark.e2e

SEED = 1


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Fleet]:
    """Two workers with so small a KV cache that prompts drive out one another, and one disk."""
    flags = ["--execution-mode", "accuracy", "--kv-cache-gb", "0.004", "--max-context-tokens", "1024"]
    flags += ["--kv-disk", str(tmp_path / "disk"), "--kv-disk-gb", "0.1"]
    with fleet(tmp_path, num_workers=2, worker_flags=flags) as made:
        yield made


def counter(system: Fleet, name: str) -> int:
    return sum(getattr(worker.load.counters, name) for worker in system.list_workers())


@pytest.mark.timeout(400)
async def test_prompts_that_left_memory_come_back_from_the_disk(on_disk: Fleet) -> None:
    rng = random.Random(SEED)
    prompts = [[rng.randrange(100, 40_000) for _ in range(rng.randint(300, 800))] for _ in range(8)]
    async with http_client() as client:
        expected = [
            (await complete(client, on_disk.base_url, body(prompt, 8, cache_salt=f"cold {number}")))[0]
            for number, prompt in enumerate(prompts)
        ]
        num_cached = 0
        for _ in range(4):
            for number in rng.sample(range(8), 8):
                tokens, cached = await complete(client, on_disk.base_url, body(prompts[number], 8))
                assert tokens == expected[number]
                num_cached += cached
        assert counter(on_disk, "blocks_written") > 0
        assert counter(on_disk, "blocks_read") > 0
        assert num_cached > 0
        on_disk.until_idle()
        until(lambda: any(map(on_disk.num_disk_tokens, prompts)), "the router knows what is on the disk")
        # Deaths while blocks are written and read; the other worker continues.
        for number in range(3):
            tasks = [asyncio.create_task(complete(client, on_disk.base_url, body(prompt, 8))) for prompt in prompts]
            await asyncio.sleep(rng.uniform(0.05, 0.5))
            victim = on_disk.workers[number % 2]
            victim.kill()
            victim.gone()
            victim.start()
            assert [tokens for tokens, _ in await asyncio.gather(*tasks)] == expected
            on_disk.until_whole(120)
        on_disk.until_idle()


@pytest.mark.timeout(400)
async def test_a_damaged_disk_gives_no_wrong_token(on_disk: Fleet, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    prompts = [[rng.randrange(100, 40_000) for _ in range(600)] for _ in range(6)]
    async with http_client() as client:
        expected = [(await complete(client, on_disk.base_url, body(prompt, 8)))[0] for prompt in prompts]
        index = next((tmp_path / "disk").glob("*.index"))
        # Counters are reported with steps, and blocks are written behind the last one.
        until(lambda: np.count_nonzero(np.fromfile(index, "<u8")[::2]) > 20, "blocks are written", 120)
        path = next((tmp_path / "disk").glob("*.blocks"))
        with path.open("r+b") as file:
            for place in range(0, path.stat().st_size, 4096):
                file.seek(place + rng.randrange(4096))
                file.write(rng.randbytes(1))
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert (await complete(client, on_disk.base_url, body(prompt, 8)))[0] == tokens
        on_disk.until_idle()
