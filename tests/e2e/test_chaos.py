"""A fleet under random faults and random clients: every request ends once, every text is right, nothing is lost.

The workers have everything that could spoil a text: drafts, KV caches that outlive them, and so little memory that
prompts drive out one another, to a disk that all workers share. A minute in `make test`; an hour with
`python -m tests.soak chaos`. HEADRACE_SEED repeats a run's choices.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from headrace.common.tasks import end_tasks
from tests.e2e.chaos import NUM_PROMPTS, Clients, Clock, Faults, body_of
from tests.e2e.fleet import Fleet, fleet, num_fds, rss_mib
from tests.e2e.serving import until
from tests.patience import patience
from tests.redis_server import RedisServer

pytestmark = pytest.mark.e2e

SOAK = os.environ.get("HEADRACE_SOAK") == "1"
CHAOS_S = 3600.0 if SOAK else 0.0
# Of each of two sources; as many as take a minute on two cores.
NUM_FAULTS = 6
NUM_CLIENTS = 12 if SOAK else 6
# What has to happen for a run to say something, by the counters of workers.
FEATURES = ("ngram_tokens_drafted", "blocks_evicted", "blocks_written")
CALM_REQUESTS = 200 if SOAK else 60
# File descriptors that a process may have more of than before, and MiB: pools and caches that fill.
MORE_FDS, MORE_MIB = 8, 24


@pytest.fixture
def worker_flags(tmp_path: Path) -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        yield [
            *("--execution-mode", "accuracy", "--max-context-tokens", "1024", "--speculation", "ngram"),
            *("--kv-cache-gb", "0.008", "--kv-memory", memory),
            *("--kv-disk", str(tmp_path / "disk"), "--kv-disk-gb", "0.1"),
        ]


def stepping_clock(directory: Path) -> dict[str, str]:
    """The environment in which processes have a wall clock that can be stepped; without a C compiler, none."""
    source, library = Path(__file__).with_name("clock_steps.c"), directory / "clock_steps.so"
    if shutil.which("cc") is None:
        return {}
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    preloaded = " ".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
    return {"LD_PRELOAD": preloaded, "CLOCK_OFFSET_FILE": str(directory / "offset")}


@pytest.mark.timeout(600 + 1.5 * CHAOS_S)
async def test_whatever_happens_every_request_ends_once_and_nothing_is_lost(
    tmp_path: Path, redis_server: RedisServer, worker_flags: list[str]
) -> None:
    seed = int(os.environ.get("HEADRACE_SEED", "7"))
    print(f"HEADRACE_SEED={seed}")
    clock = Clock(tmp_path / "offset")
    with fleet(
        tmp_path,
        num_workers=4,
        num_routers=2,
        num_gateways=2,
        redis_url=redis_server.url,
        environment=stepping_clock(tmp_path),
        worker_flags=worker_flags,
    ) as own_fleet:
        texts = await undisturbed_texts(own_fleet)
        clients = Clients(own_fleet, random.Random(seed), texts)
        faults = Faults(clients, own_fleet, redis_server, clock, random.Random(seed + 1))
        asking = [asyncio.create_task(clients.ask_on()) for _ in range(NUM_CLIENTS)]
        seen: Counter[str] = Counter()
        watching = asyncio.create_task(watch_counters(own_fleet, seen))
        end_s = time.monotonic() + CHAOS_S
        await asyncio.gather(*(faults.go_on(NUM_FAULTS, end_s) for _ in range(2)))
        clients.is_stopping = True
        await asyncio.gather(*asking)
        print(f"{clients.ends.total()} requests: {dict(clients.ends)}; faults: {dict(faults.done)}")
        assert clients.wrong == []
        clock.step(0)
        await asyncio.to_thread(until_nothing_is_held, own_fleet)
        assert await undisturbed_texts(own_fleet) == texts
        await asyncio.to_thread(assert_nothing_grows, own_fleet, texts)
        await end_tasks(watching)
        await asyncio.to_thread(note_counters, own_fleet, seen)
        assert all(seen[name] > 0 for name in FEATURES), seen


async def watch_counters(own_fleet: Fleet, seen: Counter[str]) -> None:
    """Note again and again what the workers do: those that are killed count from zero."""
    while True:
        await asyncio.to_thread(note_counters, own_fleet, seen)
        await asyncio.sleep(1.0)


def note_counters(own_fleet: Fleet, seen: Counter[str]) -> None:
    """Note the most that any worker has counted."""
    for worker in own_fleet.list_workers():
        for name in FEATURES:
            seen[name] = max(seen[name], getattr(worker.load.counters, name))


async def undisturbed_texts(own_fleet: Fleet) -> dict[int, str]:
    """The text of each prompt while nothing happens."""
    async with httpx.AsyncClient(timeout=patience(240), trust_env=False) as http:
        url = f"{own_fleet.base_url}/v1/chat/completions"
        answers = await asyncio.gather(*(http.post(url, json=body_of(number)) for number in range(NUM_PROMPTS)))
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    return {number: answer.json()["choices"][0]["message"]["content"] for number, answer in enumerate(answers)}


def until_nothing_is_held(own_fleet: Fleet) -> None:
    """Wait until everything is there again, and no block, booking or request is left."""
    own_fleet.until_whole(60)
    own_fleet.until_idle()
    until(lambda: own_fleet.metric("headrace_requests_in_flight") == 0, "the gateways have no request")
    for index in range(len(own_fleet.routers)):
        for worker in own_fleet.list_workers(index):
            totals = worker.load.counters
            assert totals.requests_failed == 0, f"{worker.worker_id} failed requests"
            assert totals.requests_admitted == totals.requests_finished + totals.requests_cancelled


def assert_nothing_grows(own_fleet: Fleet, texts: dict[int, str]) -> None:
    """Run the same work twice: no process may have more open files or memory after the second run."""
    held = []
    for _ in range(2):
        with httpx.Client(timeout=patience(240), trust_env=False) as http:
            for number in range(CALM_REQUESTS):
                url = own_fleet.base_urls[number % len(own_fleet.gateways)]
                answer = http.post(f"{url}/v1/chat/completions", json=body_of(number % NUM_PROMPTS))
                assert answer.json()["choices"][0]["message"]["content"] == texts[number % NUM_PROMPTS]
        own_fleet.until_idle()
        held.append({process.name: (num_fds(process), rss_mib(process)) for process in own_fleet.processes})
    for name, (fds, mib) in held[1].items():
        fds_before, mib_before = held[0][name]
        assert fds <= fds_before + MORE_FDS, f"{name} has {fds} files open, {fds_before} before"
        assert mib <= mib_before + MORE_MIB, f"{name} has {mib:.0f} MiB, {mib_before:.0f} before"
