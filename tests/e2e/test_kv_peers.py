"""Cached prefixes of other workers, with real workers: they are fetched, and tokens equal those of a cold run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.common.transport.channels import PLAIN
from headrace.protos import router_pb2, worker_pb2, worker_pb2_grpc
from tests.e2e.fleet import Fleet, fleet
from tests.e2e.serving import until
from tests.e2e.streams import http_client
from tests.e2e.test_warm_restart import body, complete

pytestmark = pytest.mark.e2e

SEED = 1


@pytest.fixture(params=["shared memory", "sockets"])
def peers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Two workers that keep their KV cache in files in memory, or for themselves."""
    flags = ["--execution-mode", "accuracy", "--kv-cache-gb", "0.05", "--max-context-tokens", "2048"]
    if request.param == "shared memory":
        memory = tmp_path / "memory"
        memory.mkdir()
        flags += ["--kv-memory", str(memory)]
    with fleet(tmp_path, num_workers=2, worker_flags=flags) as made:
        yield made


def drain(worker: router_pb2.WorkerInfo, *, undo: bool) -> None:
    with PLAIN.blocking_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        stub.Drain(worker_pb2.DrainRequest(undo=undo), timeout=10)


@pytest.mark.timeout(400)
async def test_a_draining_worker_hands_its_prefixes_over(peers: Fleet) -> None:
    rng = random.Random(SEED)
    prompts = [[rng.randrange(100, 40_000) for _ in range(rng.randint(600, 1200))] for _ in range(4)]
    async with http_client() as client:
        expected = [
            (await complete(client, peers.base_url, body(prompt, 8, cache_salt=f"cold {number}")))[0]
            for number, prompt in enumerate(prompts)
        ]
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert (await complete(client, peers.base_url, body(prompt, 8)))[0] == tokens
        for number in range(2):
            worker = peers.list_workers()[number]
            drain(worker, undo=False)
            until(lambda: peers.num_ready() == 1, "one worker drains")
            for prompt, tokens in zip(prompts, expected, strict=True):
                assert (await complete(client, peers.base_url, body(prompt, 8)))[0] == tokens
            drain(worker, undo=True)
            until(lambda: peers.num_ready() == 2, "it is back")
        peers.until_idle()
        counters = [worker.load.counters for worker in peers.list_workers()]
        # Where computing is expected to be faster, prompts are computed; this model is small.
        num_received = sum(each.blocks_received for each in counters)
        assert num_received > 15
        assert 0 < sum(each.prompt_tokens_from_peers for each in counters) <= num_received * 32
        # A source that is killed while others fetch from it.
        for number in range(2):
            victim = peers.workers[number]
            drain(peers.list_workers()[number], undo=False)
            until(lambda: peers.num_ready() == 1, "one worker drains")
            tasks = [asyncio.create_task(complete(client, peers.base_url, body(prompt, 8))) for prompt in prompts]
            await asyncio.sleep(rng.uniform(0.0, 0.1))
            victim.kill()
            assert [tokens for tokens, _ in await asyncio.gather(*tasks)] == expected
            victim.gone()
            victim.start()
            peers.until_whole(120)
        peers.until_idle()
