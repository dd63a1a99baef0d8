"""Cached prefixes of other workers, with real workers: they are fetched, and tokens equal those of a cold run. Prefixes
of a worker that stops are handed over."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from headrace.common.transport.channels import PLAIN
from headrace.protos import router_pb2, worker_pb2, worker_pb2_grpc
from tests.e2e.fleet import Fleet, fleet
from tests.e2e.groups import IS_SOAK
from tests.e2e.serving import until
from tests.e2e.streams import http_client
from tests.e2e.test_warm_restart import body, complete
from tests.patience import patience

pytestmark = pytest.mark.e2e

SEED = 1


@pytest.fixture(params=["shared memory", "sockets", *(["ranks"] if IS_SOAK else [])])
def peers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Two workers that keep their KV cache in files in memory, or for themselves. They hand nothing over unasked. In a
    soak, both are divided among ranks too."""
    flags = ["--execution-mode", "accuracy", "--kv-cache-gb", "0.05", "--max-context-tokens", "2048"]
    flags += ["--kv-handover-gb", "0"]
    if request.param == "ranks":
        flags += ["--tensor-parallel", "2"]
    if request.param != "sockets":
        memory = tmp_path / "memory"
        memory.mkdir()
        flags += ["--kv-memory", str(memory)]
    with fleet(tmp_path, num_workers=2, worker_flags=flags) as made:
        yield made


def drain(worker: router_pb2.WorkerInfo, *, undo: bool) -> None:
    with PLAIN.blocking_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        stub.Drain(worker_pb2.DrainRequest(undo=undo), timeout=patience(10))


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


NUM_PREFIXES = 24
PREFIX_TOKENS = 512
ROUTER_PAUSE_S = 1.0


async def hit_rate(client: httpx.AsyncClient, base_url: str, prefixes: list[list[int]], rng: random.Random) -> float:
    """The share of the prefixes' tokens that is cached, a request each, several at a time."""
    at_once = asyncio.Semaphore(4)

    async def ask(prefix: list[int]) -> int:
        async with at_once:
            tail = [rng.randrange(100, 40_000) for _ in range(20)]
            return (await complete(client, base_url, body(prefix + tail, 4)))[1]

    num_cached = sum(await asyncio.gather(*map(ask, rng.sample(prefixes, len(prefixes)))))
    return num_cached / (len(prefixes) * PREFIX_TOKENS)


async def restart_in_turn(made: Fleet, client: httpx.AsyncClient, rng: random.Random) -> int:
    """Restart all workers one after another while other prompts are answered. The router stands still when each begins
    to stop, as on a crowded host, so it hears late of it. Returns the number of answered prompts."""
    is_over, num_answers = asyncio.Event(), 0

    async def ask_others() -> None:
        nonlocal num_answers
        while not is_over.is_set():
            prompt = [rng.randrange(100, 40_000) for _ in range(100)]
            await complete(client, made.base_url, body(prompt, 16, cache_salt="others"))
            num_answers += 1

    load = [asyncio.create_task(ask_others()) for _ in range(3)]
    (router,) = made.routers
    for worker in made.workers:
        router.signal(signal.SIGSTOP)
        worker.terminate()
        await asyncio.sleep(ROUTER_PAUSE_S)
        router.signal(signal.SIGCONT)
        assert await asyncio.to_thread(worker.gone) == 0
        worker.start()
        await asyncio.to_thread(made.until_whole, 120)
    is_over.set()
    await asyncio.gather(*load)
    return num_answers


@pytest.mark.timeout(400)
async def test_prefixes_survive_the_restart_of_all_workers(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    prefixes = [[rng.randrange(100, 40_000) for _ in range(PREFIX_TOKENS)] for _ in range(NUM_PREFIXES)]
    flags = ["--kv-cache-gb", "0.05", "--max-context-tokens", "2048", "--drain-timeout", "20"]
    with fleet(tmp_path, num_workers=4, worker_flags=flags) as made:
        async with http_client() as client:
            await hit_rate(client, made.base_url, prefixes, rng)
            before = await hit_rate(client, made.base_url, prefixes, rng)
            assert await restart_in_turn(made, client, rng) > 4
            taken_over = sum(worker.load.counters.blocks_taken_over for worker in made.list_workers())
            after = await hit_rate(client, made.base_url, prefixes, rng)
        print(f"hit rate {before:.3f} before the restarts and {after:.3f} after; {taken_over} blocks taken over")
        assert after >= 0.9 * before > 0.8
        made.until_idle()
