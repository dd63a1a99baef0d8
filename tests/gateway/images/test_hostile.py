"""Hostile images and URLs at a gateway: no failure of the server, no call to a forbidden address, no neighbour cut."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import httpcore
import httpx
import pytest

from headrace.gateway.edge.settings import EdgeControls, EdgeSettings
from headrace.gateway.images.loading import ImageLoader
from headrace.gateway.images.remote import RemoteImages, is_public, resolved
from headrace.gateway.images.urls import Domains
from tests.gateway.image_model import RED, image_part
from tests.hostile_images import requests
from tests.memory import resident_bytes

pytestmark = pytest.mark.asyncio(loop_scope="module")
SEED = int(os.environ.get("HEADRACE_SEED", "7"))
NUM_REQUESTS = 10_000 if os.environ.get("HEADRACE_SOAK") else 200
WIDTH = 16
REFUSED = {400, 413, 429}
TELLTALE = ("0x7", "PIL", "Traceback", "169.254", "93.184")
"""Words of a library, or of the network behind the gateway."""
MOST_GROWTH_BYTES = 64 << 20
_PATIENT_S = 86_400.0


class Sockets(httpcore.AnyIOBackend):
    """Keeps the addresses that are called, and reaches none."""

    called: ClassVar[Counter[str]] = Counter()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.called[host] += 1
        raise httpcore.ConnectError


async def resolve(host: str, port: int) -> Sequence[str]:
    """A resolver with names that change their address, or have several."""
    draw = random.Random()
    if host == "rebinding.example":
        return [draw.choice(("93.184.216.34", "127.0.0.1"))]
    if host == "mixed.example":
        return ["93.184.216.34", "10.0.0.1"]
    if host.rstrip(".") == "allowed.example":
        return ["93.184.216.34"]
    return await resolved(host, port) if not host.isascii() or ".google." not in host else ["169.254.169.254"]


async def test_hostile_requests(seer: Any, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpcore, "AnyIOBackend", Sockets)
    Sockets.called.clear()
    seer.reset()
    seer.cards = seer.seeing_cards
    accepted = 0

    async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        writer.close()

    listening = await asyncio.start_server(record, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]

    def loader(threads: Any) -> ImageLoader:
        domains = Domains(["all", f"*.example:{port}", f"allowed.example:{port}", f"127.0.0.1:{port}"])
        return ImageLoader(threads.images, RemoteImages(domains, 2, resolve=resolve, permits=is_public))

    statuses: Counter[int] = Counter()
    # Client and gateway share a thread. If it stands still for long, the usual times end requests whose client is not
    # slow, and httpx may close a kept connection that it has just given to a request.
    controls = EdgeControls(EdgeSettings(head_timeout=_PATIENT_S, body_timeout=_PATIENT_S, send_timeout=_PATIENT_S))
    limits = httpx.Limits(max_keepalive_connections=0)
    async with (
        kit.serving_gateway(seer.address, images=loader, controls=controls) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=None, limits=limits) as http,
    ):
        room = asyncio.Semaphore(WIDTH)

        async def send(path: str, body: Any) -> None:
            answer = await http.post(path, json=body)
            statuses[answer.status_code] += 1
            assert answer.status_code == 200 or answer.status_code in REFUSED, (body, answer.text)
            assert not [word for word in TELLTALE if word in answer.text], answer.text

        held_bytes = 0
        for number in range(2):  # the second half needs no more memory than the first one
            async with asyncio.TaskGroup() as sending:
                for one in requests(SEED + number, NUM_REQUESTS // 2, "seeing", port):
                    await room.acquire()
                    sending.create_task(send(one.path, one.body)).add_done_callback(lambda _: room.release())
            seer.streams.clear()
            gc.collect()
            if number:
                assert resident_bytes() - held_bytes < MOST_GROWTH_BYTES
            held_bytes = resident_bytes()
        whole = {"role": "user", "content": [image_part(RED)]}
        answer = await http.post("/v1/chat/completions", json={"model": "seeing", "messages": [whole]})
        assert answer.status_code == 200
    listening.close()
    assert controls.bodies.num_bytes == 0
    assert accepted == 0, "the gateway called its own host"
    assert set(Sockets.called) <= {"93.184.216.34"}
    assert Sockets.called, "public addresses were called"
    assert statuses[200] > NUM_REQUESTS // 50, statuses
    assert statuses[400] > NUM_REQUESTS // 4, statuses
