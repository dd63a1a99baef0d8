"""Images are fetched from allowed hosts at public addresses only, within bounds."""

from __future__ import annotations

import asyncio
import itertools
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.common.tasks import end_tasks
from headrace.gateway.images.refusal import ImageRefusal, Why
from headrace.gateway.images.remote import MAX_FETCHES, MAX_FETCHES_OF_SOURCE, RemoteImages, is_public
from headrace.gateway.images.urls import Domains, target_of
from tests.gateway.image_model import RED
from tests.hostile_images import has_remedy
from tests.patience import patience

HOST = "pictures.example"
INSTEAD = "send it as a data: URL with base64"
UNREACHABLE = f"u: the image could not be fetched: its host cannot be reached from here; {INSTEAD}"


def response(body: bytes = RED, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(headers or [f"Content-Length: {len(body)}"]), "Connection: close", "", ""]
    return "\r\n".join(lines).encode() + body


class Server:
    """A server on loopback that answers each request with the same bytes, and keeps what it was sent."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.requests: list[str] = []
        self.num_sent = 0
        self.port = 0
        self.endless = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.requests.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(self.answer)
            await writer.drain()
            while self.endless:
                writer.write(self.endless)
                await writer.drain()
                self.num_sent += len(self.endless)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(answer: bytes = b"", tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    found = Server(answer or response())
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0, ssl=tls)
    found.port = server.sockets[0].getsockname()[1]
    async with server:
        yield found


class Resolver:
    """Gives the addresses of each look-up in turn, the last ones for ever."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.names: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.names.append(host)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def remote(
    *domains: str,
    resolve: Any = None,
    permits: Callable[[str], bool] = lambda address: address == "127.0.0.1",
    timeout_s: float = 20,
    tls: ssl.SSLContext | None = None,
) -> RemoteImages:
    """Images from these hosts, which this test alone may fetch from loopback."""
    names = Resolver(["127.0.0.1"]) if resolve is None else resolve
    return RemoteImages(Domains(domains), timeout_s, resolve=names, permits=permits, tls=tls)


async def refused(images: RemoteImages, url: str, max_bytes: int = 10_000) -> tuple[Why, str]:
    with pytest.raises(ImageRefusal) as found:
        await images.fetch("u", url, max_bytes)
    assert found.value.field == "u"
    assert has_remedy(found.value.message)
    return found.value.why, found.value.message


async def test_an_image_is_fetched_by_name_from_the_checked_address() -> None:
    async with serving() as server:
        resolve = Resolver(["127.0.0.1"], ["10.0.0.1"])
        images = remote(f"{HOST}:{server.port}", resolve=resolve)
        url = f"http://{HOST.upper()}:{server.port}/a/b%20c.png?x=1&y=2#part"
        assert await images.fetch("u", url, 10_000) == RED
    assert resolve.names == [HOST], "one look-up"
    request = server.requests[0].lower().splitlines()
    assert request[0] == "get /a/b%20c.png?x=1&y=2 http/1.1"
    assert f"host: {HOST}:{server.port}" in request
    assert not [line for line in request if line.startswith(("cookie", "authorization", "referer"))]


async def test_a_rebinding_name_is_not_asked_again() -> None:
    async with serving() as server:
        resolve = Resolver(["93.184.216.34"], ["127.0.0.1"])
        images = remote(f"{HOST}:{server.port}", resolve=resolve, permits=is_public, timeout_s=0.2)
        await refused(images, f"http://{HOST}:{server.port}/")
    assert (resolve.names, server.requests) == ([HOST], []), "the second answer is never used"


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1", "fe80::1"])
async def test_hosts_in_the_network_of_the_gateway_are_not_called(address: str) -> None:
    async with serving() as server:
        for addresses in ([address], ["93.184.216.34", address]):
            images = remote(f"{HOST}:{server.port}", resolve=Resolver(addresses), permits=is_public)
            assert await refused(images, f"http://{HOST}:{server.port}/") == (Why.FETCH, UNREACHABLE)
        assert server.requests == []


async def test_all_that_cannot_be_reached_is_told_in_one_sentence() -> None:
    async def unknown(host: str, port: int) -> Sequence[str]:
        raise OSError("Name or service not known")

    async def bad_label(host: str, port: int) -> Sequence[str]:
        return ["x".encode("idna").decode() + "." * 70] if host.encode("idna") else []

    async with serving() as server:
        port = server.port
    for resolve in (unknown, Resolver([]), Resolver(["127.0.0.1"])):  # nobody listens on the port any more
        images = remote(f"{HOST}:{port}", resolve=resolve)
        assert await refused(images, f"http://{HOST}:{port}/") == (Why.FETCH, UNREACHABLE)
    images = remote("all", resolve=bad_label)
    assert await refused(images, f"http://{'a' * 70}.example/") == (Why.FETCH, UNREACHABLE)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (response(b"", "302 Found", "Location: http://169.254.169.254/", "Content-Length: 0"), "redirects to another"),
        (response(b"", "301 Moved", "Location: /b", "Content-Length: 0"), "redirects to another URL, which is not"),
        (response(b"x", "404 Not Found"), "its host answered with the status 404"),
        (response(b"x", "200 OK", "Content-Encoding: gzip", "Content-Length: 1"), "its host sends it compressed"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "its host broke off, or did not answer in HTTP"),
        (response(RED, "200 OK", f"Content-Length: {len(RED) + 9}"), "its host broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "its host broke off, or did not answer"),
    ],
)
async def test_odd_answers_are_refused(answer: bytes, problem: str) -> None:
    async with serving(answer) as server:
        images = remote(f"{HOST}:{server.port}")
        kind, message = await refused(images, f"http://{HOST}:{server.port}/a.png")
    assert kind == Why.FETCH
    assert problem in message
    assert "169.254" not in message
    assert len(server.requests) == 1


async def test_no_redirect_of_any_status_is_followed_wherever_it_leads() -> None:
    async with serving() as server:
        here = f"http://{HOST}:{server.port}/followed"
        places = ("/followed", "followed", "?followed", f"//{HOST}:{server.port}/followed", here, here.upper(), "")
        places += (here.replace("http", "https"), "ftp://127.0.0.1/", "file:///etc/passwd", f"\\\\{HOST}\\followed")
        resolve = Resolver(["127.0.0.1"])
        images = remote("all", f"{HOST}:{server.port}", resolve=resolve)
        for status, place in zip(range(300, 400), itertools.cycle(places), strict=False):
            server.answer = response(RED, f"{status} Moved", f"Location: {place}", f"Content-Length: {len(RED)}")
            kind, message = await refused(images, f"http://{HOST}:{server.port}/a.png")
            assert kind == Why.FETCH
            assert message.endswith("its host redirects to another URL, which is not followed; give the final URL")
        assert {request.split("\r\n")[0] for request in server.requests} == {"GET /a.png HTTP/1.1"}
    assert len(server.requests) == 100
    assert resolve.names == [HOST] * 100


async def test_bytes_are_bounded_by_the_header_and_while_they_come() -> None:
    async with serving(response(RED, "200 OK", "Content-Length: 10001")) as server:
        images = remote(f"{HOST}:{server.port}")
        assert (await refused(images, f"http://{HOST}:{server.port}/"))[0] == Why.BYTES
    async with serving(response(RED, "200 OK", "X: no length")) as server:
        server.endless = bytes(1000)
        images = remote(f"{HOST}:{server.port}")
        assert (await refused(images, f"http://{HOST}:{server.port}/"))[0] == Why.BYTES
    assert server.num_sent < 50_000_000


async def test_time_is_bounded() -> None:
    async with serving(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n") as server:
        server.endless = b""

        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.Event().wait()

        silent = await asyncio.start_server(hold, "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        images = remote(f"{HOST}:{port}", timeout_s=0.1)
        assert await refused(images, f"http://{HOST}:{port}/") == (
            Why.FETCH,
            f"u: the image could not be fetched: it did not come within 0.1 s; {INSTEAD}",
        )
        silent.close()


async def test_tls_asks_for_the_name_and_checks_it(tmp_path: Path, certificates: Any) -> None:
    given = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    given.load_cert_chain(*certificates)
    names: list[str] = []
    given.sni_callback = lambda _, name, __: names.append(name)
    trusting = ssl.create_default_context(cafile=str(certificates[0]))
    async with serving(tls=given) as server:
        images = remote(f"{HOST}:{server.port}", f"other.example:{server.port}", tls=trusting)
        assert await images.fetch("u", f"https://{HOST}:{server.port}/a.png", 10_000) == RED
        assert names == [HOST]
        kind, message = await refused(images, f"https://other.example:{server.port}/a.png")
        assert (kind, message) == (Why.FETCH, UNREACHABLE)
        assert len(server.requests) == 1


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The certificate of `HOST`, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    certificate, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", f"/CN={HOST}"),
            *("-addext", f"subjectAltName=DNS:{HOST}"),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with serving() as server:
        images = remote(f"{HOST}:{server.port}")
        assert await images.fetch("u", f"http://{HOST}:{server.port}/", 10_000) == RED


@pytest.mark.parametrize(
    ("allowed", "url", "is_allowed"),
    [
        ("a.example", "https://a.example/x", True),
        ("A.example", "http://a.EXAMPLE./x", True),
        ("a.example", "https://b.a.example/x", False),
        ("a.example", "https://a.example.evil/x", False),
        ("a.example", "https://evila.example/x", False),
        ("a.example", "https://a.example:8443/x", False),
        ("a.example:8443", "https://a.example:8443/x", True),
        ("a.example:8443", "https://a.example/x", False),
        ("*.a.example", "https://b.a.example/x", True),
        ("*.a.example", "https://c.b.a.example/x", True),
        ("*.a.example", "https://a.example/x", False),
        ("*.a.example", "https://b.evila.example/x", False),
        ("all", "https://b.example/x", True),
        ("all", "https://b.example:8443/x", False),
        ("all", "http://[::1]/x", True),  # its address is refused later
    ],
)
def test_domains_are_compared_by_labels(allowed: str, url: str, is_allowed: bool) -> None:
    assert (Domains([allowed]).source_of(target_of("u", url)) is not None) is is_allowed


def test_hosts_below_an_allowed_domain_are_one_source() -> None:
    def source_of(url: str, *allowed: str) -> str | None:
        return Domains(allowed).source_of(target_of("u", url))

    assert source_of("https://b.a.example/x", "*.a.example", "all") == "*.a.example"
    assert source_of("https://c.b.a.example/x", "*.a.example") == "*.a.example"
    assert source_of("https://b.a.example/x", "*.a.example", "b.a.example") == "b.a.example"
    assert source_of("https://b.a.example/x", "all") == "b.a.example"
    assert source_of("https://b.a.example:8443/x", "*.a.example:8443") == "*.a.example:8443"


async def test_images_of_a_slow_host_do_not_hold_up_those_of_others() -> None:
    """Although more are asked for than are fetched at a time. The hosts below `*.slow.example` are one."""
    begun: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = (await reader.readuntil(b"\r\n\r\n")).decode()
        if "slow.example" in request:
            begun.append(request)
            await reader.read()  # until the caller hangs up
        else:
            writer.write(response())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    images = remote(f"*.slow.example:{port}", f"{HOST}:{port}", timeout_s=3600)
    async with server, asyncio.timeout(patience(20)):
        urls = [f"http://{number}.slow.example:{port}/" for number in range(MAX_FETCHES + 8)]
        slow = [asyncio.create_task(images.fetch("u", url, 10_000)) for url in urls]
        while len(begun) < MAX_FETCHES_OF_SOURCE:
            await asyncio.sleep(0.001)
        assert await images.fetch("u", f"http://{HOST}:{port}/", 10_000) == RED
        assert len(begun) == MAX_FETCHES_OF_SOURCE
        await end_tasks(*slow)
        assert not images._places_of, "nothing is kept of a source that is not asked"


@pytest.mark.parametrize("name", ["", "https://a.example", "a.example/x", "a b", "*", "*a.example", "a:x", "ä.x"])
def test_what_is_no_domain_is_refused_at_start(name: str) -> None:
    with pytest.raises(ValueError, match="is not a domain"):
        Domains([name])


@pytest.mark.parametrize(
    "url",
    [
        "https://a.example\\@b.example/",
        "https://a.example/\\x",
        "https://user@a.example/",
        "https://user:pass@a.example/",
        "https://a.example@b.example/",
        "https://a.example /",
        "https://a.example/a b",
        "https://a.example/\r\nHost: b.example",
        "https://a.example/\0",
        "https://a.example/ä",
        "https://ä.example/",
        "https://a%2eexample/",
        "https:/a.example/",
        "https:a.example",
        "https:///a.example/",
        "https://[::1%25eth0]/",
        "https://[::1/",
        "https://a.example:0/",
        "https://a.example:99999/",
        "https://a.example:8a/",
        "https://a.example:/",
        "https://",
        "https://a.example?\\",
        "https://a.example/" + "x" * 5000,
    ],
)
def test_a_url_with_two_readings_is_refused(url: str) -> None:
    with pytest.raises(ImageRefusal, match="u must be a URL of at most 4096 characters") as found:
        target_of("u", url)
    assert found.value.why is Why.URL


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("http://a.example", ("http", "a.example", 80, "/", "a.example")),
        ("HTTPS://A.Example.:443?q", ("https", "a.example", 443, "/?q", "a.example")),
        ("http://[2606:4700::1111]:8080/x#y", ("http", "2606:4700::1111", 8080, "/x", "[2606:4700::1111]:8080")),
        ("http://2130706433/", ("http", "2130706433", 80, "/", "2130706433")),
    ],
)
def test_the_parts_of_a_url(url: str, read: tuple[str, str, int, str, str]) -> None:
    found = target_of("u", url)
    assert (found.scheme, found.host, found.port, found.path, found.authority) == read


@pytest.mark.parametrize("address", ["93.184.216.34", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "100.63.0.1"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "0.1.2.3",
        "10.1.2.3",
        "100.64.0.1",
        "100.127.255.254",
        "127.0.0.1",
        "127.255.255.254",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.8",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.1.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::8.8.8.8",
        "::ffff:10.0.0.1",
        "::ffff:169.254.169.254",
        "::ffff:7f00:1",
        "64:ff9b::808:808",
        "64:ff9b::a00:1",
        "64:ff9b:1::1",
        "100::1",
        "2001::1",
        "2001:db8::1",
        "2002:808:808::1",
        "2002:7f00:1::",
        "5f00::1",
        "fc00::1",
        "fd12:3456::1",
        "fe80::1",
        "fe80::1%eth0",
        "2606:4700::1111%1",
        "fec0::1",
        "ff02::1",
        "",
        "localhost",
        "2130706433",
        "0x7f.1",
        "127.1",
    ],
)
def test_all_other_addresses_are_forbidden(address: str) -> None:
    assert not is_public(address)
