"""Hostile images at a fleet that serves a vision-language model: no failure of the server, no growth, and the answers
of neighbours stay those of the reference."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import Serve
from tests.e2e.shapes import MODEL, Question, questions
from tests.gateway.image_model import data_url
from tests.hostile_images import has_remedy, requests
from tests.patience import patience

pytestmark = pytest.mark.e2e

SEED = int(os.environ.get("HEADRACE_SEED", "11"))
NUM_REQUESTS = 10_000 if os.environ.get("HEADRACE_SOAK") else 60
WIDTH = 8
MOST_GROWTH_BYTES = 256 << 20


@pytest.fixture(scope="module")
def system() -> Iterator[Serve]:
    """The model that names what is drawn, from any public host and from no file."""
    flags = ("--port", "0", "--kv-cache-gb", "0.25", "--execution-mode", "accuracy", "--allowed-media-domains", "all")
    serve = Serve(str(MODEL), *flags)
    try:
        serve.until_ready()
        yield serve
    finally:
        serve.end()


def resident_bytes(pid: int) -> int:
    """Memory of a process and of all that it started."""
    try:
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return 0
    return own + sum(resident_bytes(int(child)) for child in children)


async def test_hostile_requests_beside_pictures(system: Serve) -> None:
    accepted = 0

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        writer.close()

    listening = await asyncio.start_server(record, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    statuses: Counter[int] = Counter()
    room = asyncio.Semaphore(WIDTH)
    ended = asyncio.Event()

    # If this process did not run for long, httpx may close a kept connection that it has just given to a request.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=system.base_url, timeout=patience(120), limits=limits) as http:

        async def post(path: str, body: object) -> httpx.Response:
            start_s = time.monotonic()
            try:
                return await http.post(path, json=body)
            except httpx.TransportError as error:
                waited_s, num_bytes = time.monotonic() - start_s, len(json.dumps(body))
                running = [(row["name"], row["pid"]) for row in system.status()]
                raise AssertionError(
                    f"{error!r} at {path} after {waited_s:.1f} s, with {num_bytes} bytes, behind {statuses}; "
                    f"now there are {running}\n{system.tail()}"
                ) from error

        async def send(path: str, body: object) -> None:
            answer = await post(path, body)
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, answer.text
            assert not [word for word in ("0x7", "PIL", "Pillow", "Traceback") if word in answer.text], answer.text
            assert "the image" not in answer.text or has_remedy(answer.text), answer.text

        async def ask(question: Question) -> str:
            parts = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in question.pictures]
            content = [*parts, {"type": "text", "text": question.text}]
            body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
            answer = await post("/v1/chat/completions", body)
            return str(answer.json()["choices"][0]["message"]["content"]).strip()

        async def neighbour() -> int:
            number = 0
            while not ended.is_set() or not number:
                question = questions()[number % len(questions())]
                assert await ask(question) == question.reference
                number += 1
            return number

        asking = asyncio.create_task(neighbour())
        held_bytes = 0
        for number in range(2):  # the second half needs no more memory than the first one
            async with asyncio.TaskGroup() as sending:
                for one in requests(SEED + number, NUM_REQUESTS // 2, MODEL.name, port):
                    await room.acquire()
                    sending.create_task(send(one.path, one.body)).add_done_callback(lambda _: room.release())
            if number:
                assert resident_bytes(system.pid) - held_bytes < MOST_GROWTH_BYTES
            held_bytes = resident_bytes(system.pid)
        ended.set()
        assert await asking > 0
    listening.close()
    assert accepted == 0, "the gateway called its own host"
    assert statuses[400] > NUM_REQUESTS // 4, statuses
