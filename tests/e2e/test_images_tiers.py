"""Pictures whose blocks are on a disk or at another worker, or were given up for others. Chats over them get the same
words, and no picture is encoded again where its blocks are.

The workers keep no states beside their blocks (--image-cache-gb 0), so whatever does not come from blocks is encoded.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.common.transport.channels import PLAIN
from headrace.protos import router_pb2, worker_pb2, worker_pb2_grpc
from tests.e2e.fleet import Fleet, fleet
from tests.e2e.serving import until
from tests.e2e.shapes import MODEL as SHAPES
from tests.e2e.shapes import Question, questions
from tests.e2e.streams import http_client
from tests.e2e.test_images_over_http import body, long, message
from tests.e2e.test_warm_restart import body as of_tokens
from tests.patience import patience

pytestmark = pytest.mark.e2e

BLOCK = 32
FLAGS = ["--execution-mode", "accuracy", "--kv-precision", "f32", "--image-cache-gb", "0"]
NUM_WORDS = 20
WHICH = questions()[0].text
NUM_PICTURES = 12
CHATS = [
    Question(tuple(one.pictures[0] for one in questions()[start : start + NUM_PICTURES]), " ".join([WHICH] * 7), "")
    for start in range(0, 4 * NUM_PICTURES, NUM_PICTURES)
]
"""Twelve pictures each: to encode them takes longer than to fetch their blocks, even if the machine is busy. The words
fill the block with the end of the last one."""
NUM_CACHED = 7 * BLOCK


async def answer(client: httpx.AsyncClient, system: Fleet, question: Question, **fields: Any) -> tuple[str, int]:
    """The words of an answer, and how many of the prompt's tokens were cached."""
    asked = {**body(message(question), max_tokens=NUM_WORDS, ignore_eos=True), **fields}
    response = await client.post(f"{system.base_url}/v1/chat/completions", json=asked, timeout=patience(120))
    assert response.status_code == 200, response.text
    found = response.json()
    return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


async def answers(system: Fleet, asked: Sequence[Question], **fields: Any) -> list[tuple[str, int]]:
    """Those of several chats, one after the other."""
    async with http_client() as client:
        return [await answer(client, system, question, **fields) for question in asked]


def counters(system: Fleet, name: str) -> list[int]:
    """A counter of each worker, in the fleet's order."""
    found = {worker.worker_id: worker.load.counters for worker in system.list_workers()}
    return [getattr(found[worker.name], name) for worker in system.workers]


def counter(system: Fleet, name: str) -> int:
    """Of all workers together."""
    return sum(counters(system, name))


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Fleet]:
    """A worker with so small a KV cache that prompts drive out one another, and a disk."""
    flags = [*FLAGS, "--kv-cache-gb", "0.004", "--kv-disk", str(tmp_path / "disk"), "--kv-disk-gb", "0.1"]
    with fleet(tmp_path, num_workers=1, model=SHAPES, worker_flags=flags) as made:
        yield made


async def test_pictures_come_back_from_the_disk(on_disk: Fleet) -> None:
    expected = await answers(on_disk, CHATS)
    assert not any(num_cached for _, num_cached in expected)
    rng = random.Random(1)
    async with http_client() as client:
        # Blocks are written in the order in which they are evicted, those of the pictures first.
        while counter(on_disk, "blocks_written") < 200:
            prompt = [rng.randrange(4, 20) for _ in range(500)]
            response = await client.post(f"{on_disk.base_url}/v1/completions", json=of_tokens(prompt, 4))
            assert response.status_code == 200, response.text
    num_encoded = counter(on_disk, "images_encoded")
    num_read = counter(on_disk, "blocks_read")
    found = await answers(on_disk, CHATS)
    assert [words for words, _ in found] == [words for words, _ in expected]
    assert all(num_cached >= NUM_CACHED for _, num_cached in found)
    until(lambda: counter(on_disk, "blocks_read") >= num_read + len(CHATS), "blocks were read")
    assert counter(on_disk, "images_encoded") == num_encoded
    # The same pictures in other blocks are encoded.
    again = await answers(on_disk, CHATS, cache_salt="another's")
    assert [words for words, _ in again] == [words for words, _ in expected]
    until(
        lambda: counter(on_disk, "images_encoded") == num_encoded + NUM_PICTURES * len(CHATS),
        "they are encoded again",
    )


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Fleet]:
    """Two workers that hand nothing over unasked."""
    flags = [*FLAGS, "--kv-cache-gb", "0.05", "--kv-handover-gb", "0"]
    with fleet(tmp_path, num_workers=2, model=SHAPES, worker_flags=flags) as made:
        yield made


def drain(worker: router_pb2.WorkerInfo) -> None:
    with PLAIN.blocking_channel(worker.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        stub.Drain(worker_pb2.DrainRequest(), timeout=patience(10))


async def test_pictures_come_from_another_worker(peers: Fleet) -> None:
    expected = await answers(peers, CHATS)
    until(lambda: counter(peers, "images_encoded") == NUM_PICTURES * len(CHATS), "the pictures are encoded")
    assert [words for words, _ in await answers(peers, CHATS)] == [words for words, _ in expected]
    encoded = counters(peers, "images_encoded")
    of_more = encoded.index(max(encoded))
    drain(next(one for one in peers.list_workers() if one.worker_id == peers.workers[of_more].name))
    until(lambda: peers.num_ready() == 1, "one worker drains")
    found = await answers(peers, CHATS)
    assert [words for words, _ in found] == [words for words, _ in expected]
    assert all(num_cached >= NUM_CACHED for _, num_cached in found)
    until(lambda: counter(peers, "blocks_received") > 0, "blocks came from the other worker")
    assert counter(peers, "images_encoded") == NUM_PICTURES * len(CHATS)


async def test_preempted_chats_over_pictures_get_the_same_words(tmp_path: Path) -> None:
    """Twelve answers that do not fit beside one another: whoever is preempted has its blocks evicted, and its pictures
    encoded again."""
    flags = [*FLAGS, "--kv-cache-gb", "0.004", "--max-context-tokens", "1024"]
    with fleet(tmp_path, num_workers=1, model=SHAPES, worker_flags=flags) as system:
        async with http_client() as client:

            async def told(question: Question, **fields: Any) -> str:
                return (await answer(client, system, question, max_tokens=300, **fields))[0]

            asked = [long(question) for question in questions()[:12]]
            alone = [await told(question, cache_salt=f"alone {number}") for number, question in enumerate(asked)]
            assert await asyncio.gather(*map(told, asked)) == alone
        until(lambda: counter(system, "preemptions") > 0, "requests were preempted")
        system.until_idle()
