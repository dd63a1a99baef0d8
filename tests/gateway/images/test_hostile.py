"""Hostile images and URLs at a gateway: no failure of the server, no call to a forbidden address, no neighbour cut."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpcore
import httpx
import pytest
from PIL import Image

from headrace.gateway.edge.settings import EdgeControls, EdgeSettings
from headrace.gateway.images.loading import ImageLoader
from headrace.gateway.images.remote import MAX_FETCHES, MAX_FETCHES_OF_SOURCE, RemoteImages, is_public, resolved
from headrace.gateway.images.urls import Domains
from tests.common.vision.image_files import OURS, SIGNATURES, WRITERS, written
from tests.gateway.image_model import MAX_BYTES, RED, image_part
from tests.hostile_images import has_remedy, requests
from tests.memory import resident_bytes
from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")
SEED = int(os.environ.get("HEADRACE_SEED", "7"))
NUM_REQUESTS = 10_000 if os.environ.get("HEADRACE_SOAK") else 200
WIDTH = 16
REFUSED = {400, 413, 429}
TELLTALE = ("0x7", "PIL", "Traceback", "169.254", "93.184")
"""Words of a library, or of the network behind the gateway."""
MOST_GROWTH_BYTES = 64 << 20
_PATIENT_S = 86_400.0


PUBLIC = {"93.184.216.34", "2606:4700::1111"}
# Where redirects lead: relative, to another scheme, host or port, and what is no URL. Whoever follows one shows it.
LOCATIONS = (
    *("/followed", "followed", "?followed", "//followed.example/", "///followed.example/", "..//followed", ""),
    *("http://127.0.0.1/followed", "https://127.0.0.1/followed", "http://169.254.169.254/followed", "http:followed"),
    *("http://[::1]/followed", "http://[::ffff:7f00:1]/followed", "http://allowed.example/followed", "HTTPS:/followed"),
    *("https://allowed.example/followed", "file:///etc/passwd", "ftp://allowed.example/followed", "data:image/png,x"),
    *("gopher://127.0.0.1:70/_followed", "http://allowed.example\\@127.0.0.1/followed", "\\\\127.0.0.1\\followed"),
    *("http://allowed.example:8000/followed", "javascript:followed()", "http://followed.example%00/", "h" * 9000),
)


def answer_of(draw: random.Random) -> bytes:
    """What a host answers to a request for an image: a redirect of any kind, something odd, or an image."""
    if draw.random() < 0.6:
        lines = [f"HTTP/1.1 {draw.randrange(300, 400)} Moved"]
        lines += [f"Location: {draw.choice(LOCATIONS)}" for _ in range(draw.choice((0, 1, 1, 1, 2)))]
        return "\r\n".join([*lines, f"Content-Length: {len(RED)}", "", ""]).encode() + RED
    return draw.choice(_ANSWERS)


_HEAD = b"HTTP/1.1 200 OK\r\n"
_ANSWERS = (
    _HEAD + b"Content-Length: %d\r\n\r\n" % len(RED) + RED,
    _HEAD + b"\r\n" + RED,
    _HEAD + b"Refresh: 0; url=http://127.0.0.1/followed\r\nContent-Length: %d\r\n\r\n" % len(RED) + RED,
    _HEAD + b'\r\n<meta http-equiv="refresh" content="0; url=http://127.0.0.1/followed">',
    _HEAD + b"Content-Length: 99999999999999999999\r\n\r\n",
    _HEAD + b"Content-Length: -1\r\n\r\n" + RED,
    _HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + RED,
    _HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n" + RED,
    _HEAD + b"Content-Encoding: gzip\r\n\r\n" + RED,
    _HEAD + b"\r\n" + RED + bytes(MAX_BYTES),
    _HEAD + b"X: " + b"x" * 200_000 + b"\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 3 + b"HTTP/1.1 302 Found\r\nLocation: /followed\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n",
    b"HTTP/1.1 401 No\r\nWWW-Authenticate: Basic\r\n\r\n",
    b"HTTP/1.1 407 No\r\nProxy-Authenticate: Basic\r\n\r\n",
    b"HTTP/1.1 999 \r\n\r\n",
    b"\x16\x03\x01\x02\0\x01",
    b"",
)


class Answering(httpcore.AsyncMockStream):
    """A connection to a public host, with one answer. What is sent to it is kept in `sent`."""

    def __init__(self, answer: bytes, sent: bytearray) -> None:
        super().__init__([answer[at : at + 4096] for at in range(0, len(answer), 4096)])
        self._sent = sent

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._sent += buffer


class Web(httpcore.AnyIOBackend):
    """All hosts of the web. Keeps which addresses were called, and what each connection was sent; some connections
    fail."""

    def __init__(self) -> None:
        self.called: Counter[str] = Counter()
        self.sent: list[bytearray] = []
        self._draw = random.Random(SEED)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.called[host] += 1
        if host not in PUBLIC or self._draw.random() < 0.1:
            raise httpcore.ConnectError
        self.sent.append(bytearray())
        return Answering(answer_of(self._draw), self.sent[-1])


async def resolve(host: str, port: int) -> Sequence[str]:
    """A resolver with names that change their address, or have several."""
    draw = random.Random()
    if host == "rebinding.example":
        return [draw.choice(("93.184.216.34", "127.0.0.1"))]
    if host == "mixed.example":
        return ["93.184.216.34", "10.0.0.1"]
    if host == "six.example":
        return ["2606:4700::1111"]
    if host.rstrip(".") == "allowed.example":
        return ["93.184.216.34"]
    if host == "metadata.google.internal":
        return ["169.254.169.254"]
    return await resolved(host, port)


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_every_format_of_pillow_but_ours_is_refused_by_name(view: Any, seer: Any) -> None:
    seer.reset()
    seer.cards = seer.seeing_cards
    drawn = Image.new("RGB", (20, 12), "red")
    for kind in sorted({*WRITERS, *SIGNATURES}):
        content = [{"type": "text", "text": "a"}, image_part(written(drawn, kind))]
        body = {"model": "seeing", "messages": [{"role": "user", "content": content}]}
        answer = await view.http.post("/v1/chat/completions", json=body)
        if kind in (*OURS, "MPO"):  # a JPEG file that others may follow
            assert answer.status_code == 200, (kind, answer.text)
            continue
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages[0].content[1]"), kind
        assert "the image is neither PNG, JPEG, WebP nor GIF. Convert it to one of these" in error["message"]


async def test_hostile_requests(seer: Any, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    web = Web()
    monkeypatch.setattr(httpcore, "AnyIOBackend", lambda: web)
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
            assert "the image" not in answer.text or has_remedy(answer.text), answer.text

        held_bytes = num_files = num_tasks = 0
        for number in range(2):  # the second half needs no more than the first one
            async with asyncio.TaskGroup() as sending:
                for one in requests(SEED + number, NUM_REQUESTS // 2, "seeing", port):
                    await room.acquire()
                    sending.create_task(send(one.path, one.body)).add_done_callback(lambda _: room.release())
            seer.streams.clear()
            gc.collect()
            if number:
                assert resident_bytes() - held_bytes < MOST_GROWTH_BYTES
                assert num_open_files() - num_files < WIDTH
                assert len(asyncio.all_tasks()) - num_tasks < WIDTH
            held_bytes, num_files, num_tasks = resident_bytes(), num_open_files(), len(asyncio.all_tasks())
        whole = {"role": "user", "content": [image_part(RED)]}
        answer = await http.post("/v1/chat/completions", json={"model": "seeing", "messages": [whole]})
        assert answer.status_code == 200
    listening.close()
    assert controls.bodies.num_bytes == 0
    assert accepted == 0, "the gateway called its own host"
    assert set(web.called) <= PUBLIC
    assert len(web.sent) > NUM_REQUESTS // 100, "public addresses were called"
    # No redirect was followed, neither on the connection nor on another one. Some connections are given up before
    # anything is sent, because another image of the request is refused.
    assert not [one for one in web.sent if one.count(b"HTTP/1.1\r\n") > 1 or b"followed" in one]
    assert statuses[200] > NUM_REQUESTS // 50, statuses
    assert statuses[400] > NUM_REQUESTS // 4, statuses


async def test_callers_that_hang_up_while_images_are_fetched_leave_nothing(seer: Any, kit: Any) -> None:
    """There are more of them than images are fetched at a time, and then there is room for another one."""
    seer.reset()
    seer.cards = seer.seeing_cards
    waiting, left = asyncio.Semaphore(0), asyncio.Semaphore(0)
    is_silent = True

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if is_silent:
            waiting.release()
            await reader.read()  # until the gateway hangs up
            left.release()
        else:
            writer.write(_ANSWERS[0])
        writer.close()

    async def here(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    places = [f"pictures{number}.example:{port}" for number in range(MAX_FETCHES // MAX_FETCHES_OF_SOURCE + 1)]

    def loader(threads: Any) -> ImageLoader:
        remote = RemoteImages(Domains(places), 3600, resolve=here, permits=lambda address: True)
        return ImageLoader(threads.images, remote)

    controls = EdgeControls(EdgeSettings())

    def body(number: int) -> dict[str, Any]:
        url = {"url": f"http://{places[number % len(places)]}/a.png"}
        message = {"role": "user", "content": [{"type": "image_url", "image_url": url}]}
        return {"model": "seeing", "messages": [message]}

    limits = httpx.Limits(max_keepalive_connections=0)
    async with (
        server,
        kit.serving_gateway(seer.address, images=loader, controls=controls) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=None, limits=limits) as http,
        asyncio.timeout(patience(60)),
    ):
        posts = (http.post("/v1/chat/completions", json=body(number)) for number in range(MAX_FETCHES + 8))
        asked = [asyncio.create_task(post) for post in posts]
        for _ in range(MAX_FETCHES):
            await waiting.acquire()
        assert controls.bodies.num_bytes > 0
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        for _ in range(MAX_FETCHES):
            await left.acquire()
        is_silent = False
        answer = await http.post("/v1/chat/completions", json=body(0))
        assert answer.status_code == 200, answer.text
        assert [image.data for image in seer.streams[-1].request.images] == [RED]
        while controls.bodies.num_bytes:
            await asyncio.sleep(0.01)
