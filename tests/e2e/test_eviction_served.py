"""Eviction from client to kernels: by the workers' default and by request, beyond the pool, and through a death."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fleet import Fleet, fleet
from tests.e2e.serving import until
from tests.e2e.streams import http_client
from tests.e2e.test_warm_restart import body, complete

pytestmark = pytest.mark.e2e

# The pools have room for about 650 tokens.
POOL = ("--kv-cache-gb", "0.003", "--max-context-tokens", "4000")
RULE = "max_cache_size=192,recent_size=64"
PROMPT = list(range(100, 200))


@pytest.fixture(scope="module")
def evicting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two workers whose requests keep few tokens."""
    directory: Path = tmp_path_factory.mktemp("evicting")
    flags = ["--execution-mode", "accuracy", *POOL, "--cache-eviction", RULE]
    with fleet(directory, num_workers=2, worker_flags=flags) as made:
        yield made


@pytest.mark.timeout(240)
async def test_answers_longer_than_the_pool_survive_the_death_of_their_worker(evicting: Fleet) -> None:
    asked = body(PROMPT, 900, prompt_cache_key="s")
    async with http_client() as client:
        tokens, _ = await complete(client, evicting.base_url, asked)
        assert len(tokens) == 900
        workers = evicting.list_workers()
        assert max(worker.load.num_blocks for worker in workers) * 32 < 800
        assert sum(worker.load.counters.blocks_given_up for worker in workers) >= (1000 - 192) // 32 - 1
        again = asyncio.create_task(complete(client, evicting.base_url, asked))
        busy = await _until_busy(evicting)
        evicting.workers[busy].kill()
        assert (await again)[0] == tokens
        evicting.workers[busy].start()
        until(lambda: evicting.num_ready() == 2, "both workers are back")


async def _until_busy(system: Fleet) -> int:
    """The number of the worker that computes an answer, when it has a good part of it."""
    before = {worker.worker_id: worker.load.counters.blocks_given_up for worker in system.list_workers()}
    for _ in range(3000):
        await asyncio.sleep(0.01)
        for worker in system.list_workers():
            if worker.load.counters.blocks_given_up > before[worker.worker_id] + 4:
                ids = sorted(before)
                return ids.index(worker.worker_id)
    raise AssertionError("no worker computes the answer")


@pytest.mark.timeout(120)
async def test_requests_have_rules_of_their_own(evicting: Fleet) -> None:
    async with http_client() as client:
        of_server, _ = await complete(client, evicting.base_url, body(PROMPT, 300))
        named = {"max_cache_size": 192, "start_size": 32, "recent_size": 64, "aggregation_mode": "NORM_SUM"}
        same, _ = await complete(client, evicting.base_url, body(PROMPT, 300, cache_eviction=named))
        wide, _ = await complete(client, evicting.base_url, body(PROMPT, 300, cache_eviction=False))
        assert same == of_server
        assert len(wide) == 300
        for fields, field, problem in (
            ({"cache_eviction": False, "max_tokens": 900}, "prompt", "maximum context length"),
            ({"cache_eviction": {"max_cache_size": 200}}, "cache_eviction.max_cache_size", "multiple of the KV block"),
            ({"cache_eviction": {"max_cache_size": 4096}}, "cache_eviction.max_cache_size", "must be at most"),
            ({"cache_eviction": {"apply_rotation": True}}, "cache_eviction.apply_rotation", "not supported"),
            ({"prompt": PROMPT * 9}, "prompt", "maximum context length"),
        ):
            refused = await client.post(f"{evicting.base_url}/v1/completions", json={**body(PROMPT, 300), **fields})
            assert refused.status_code == 400, fields
            error = refused.json()["error"]
            assert problem in error["message"]
            assert error["param"] in (field, None), error
