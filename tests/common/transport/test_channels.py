"""Mutual TLS and the join token between two ends on loopback: authentication, and replaced certificates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.common.transport.channels import PLAIN, SERVER_OPTIONS, Transport, TransportError, read_identity
from headrace.common.transport.introspection import add_introspection, set_serving, start_probe
from headrace.protos import router_pb2, router_pb2_grpc
from headrace.protos.status import Reason, error_of
from tests.certificates import make_certificates
from tests.patience import patience

BOUND_S = 20


class Clock:
    """Seconds that the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 2.0  # files may be looked at again each time
        return self.now_s


class Router(router_pb2_grpc.RouterServicer):  # type: ignore[misc]
    """Answers one call of each kind."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.seen: list[dict[str, Any]] = []

    async def ListModels(self, request: Any, context: Any) -> router_pb2.ListModelsResponse:
        self.seen.append(dict(context.invocation_metadata()))
        return router_pb2.ListModelsResponse()

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield router_pb2.RouterGetTokenizerResponse(chunk=b"a")
        await self.go_on.wait()
        yield router_pb2.RouterGetTokenizerResponse(chunk=b"b")


@asynccontextmanager
async def serving(transport: Transport, address: str = "127.0.0.1:0") -> AsyncIterator[tuple[str, Router]]:
    """A server by this transport; its address."""
    server = grpc.aio.server(interceptors=transport.interceptors(), options=SERVER_OPTIONS)
    router = Router()
    router_pb2_grpc.add_RouterServicer_to_server(router, server)
    health = add_introspection(server, ["headrace.v1.Router"])
    port = transport.bind(server, address)
    await server.start()
    await set_serving(health, ["headrace.v1.Router"], True)
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}", router
    finally:
        await server.stop(None)


async def answer_of(transport: Transport, address: str) -> str:
    """The result of a call over a new channel of this transport."""
    channel = transport.channel(address)
    try:
        stub = router_pb2_grpc.RouterStub(channel)
        await stub.ListModels(router_pb2.ListModelsRequest(), timeout=patience(5))
    except grpc.aio.AioRpcError as error:
        return error.code().name
    finally:
        await channel.close()
    return "OK"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of a fleet."""
    return make_certificates(tmp_path_factory.mktemp("certs") / "fleet")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of another fleet, for the same name."""
    return make_certificates(tmp_path_factory.mktemp("certs") / "stranger")


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_members_are_let_in_and_strangers_and_plain_callers_are_not(
    fleet: Path, stranger: Path, tmp_path: Path, kind: str
) -> None:
    member = make_certificates(tmp_path / "member", ca=fleet)
    address = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/s.sock"
    async with serving(Transport(fleet), address) as (address, _):
        assert await answer_of(Transport(fleet), address) == "OK"
        assert await answer_of(Transport(member), address) == "OK"
        assert await answer_of(Transport(stranger), address) == "UNAVAILABLE"
        assert await answer_of(PLAIN, address) == "UNAVAILABLE"
        # One who knows the authority, but has no certificate.
        bare = grpc.ssl_channel_credentials((fleet / "ca.pem").read_bytes())
        options = (("grpc.ssl_target_name_override", "headrace.internal"),)
        async with grpc.aio.secure_channel(address, bare, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await router_pb2_grpc.RouterStub(channel).ListModels(
                    router_pb2.ListModelsRequest(), timeout=patience(5)
                )
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_member_does_not_take_a_stranger_for_a_server(fleet: Path, stranger: Path) -> None:
    for server in (Transport(stranger), PLAIN):
        async with serving(server) as (address, router):
            assert await answer_of(Transport(fleet), address) == "UNAVAILABLE"
            assert router.seen == []


async def test_a_join_token_alone_keeps_out_who_does_not_have_it(tmp_path: Path) -> None:
    token, other = tmp_path / "token", tmp_path / "other"
    token.write_text("1" * 64)
    other.write_text("2" * 64)
    clock = Clock()
    async with serving(Transport(None, token, clock=clock)) as (address, router):
        assert await answer_of(Transport(None, token), address) == "OK"
        assert await answer_of(Transport(None, other), address) == "UNAUTHENTICATED"
        assert await answer_of(PLAIN, address) == "UNAUTHENTICATED"
        assert len(router.seen) == 1
        token.write_text("2" * 64)  # it changes without a restart
        assert await answer_of(Transport(None, other), address) == "OK"


@pytest.mark.parametrize(
    "address", ["0.0.0.0:1", "[::]:1", "10.0.0.7:1", "headrace-router:1", ":1", "localhost.example:1", "128.0.0.1:1"]
)
def test_beyond_the_host_a_process_does_not_serve_strangers_unless_told(
    fleet: Path, tmp_path: Path, address: str
) -> None:
    with pytest.raises(TransportError, match="--insecure"):
        PLAIN.refuse_strangers(address, insecure=False)
    PLAIN.refuse_strangers(address, insecure=True)
    Transport(fleet).refuse_strangers(address, insecure=False)
    Transport(None, fleet / "join-token").refuse_strangers(address, insecure=False)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.1.2.3:1", "[::1]:1", "localhost:1", "unix:/a.sock"])
def test_loopback_and_unix_sockets_need_no_secret(address: str) -> None:
    PLAIN.refuse_strangers(address, insecure=False)


async def test_the_join_token_is_asked_for_besides_the_certificate(fleet: Path, tmp_path: Path) -> None:
    token, other = fleet / "join-token", tmp_path / "other"
    other.write_text("0" * 64)
    async with serving(Transport(fleet, token)) as (address, router):
        assert await answer_of(Transport(fleet, token), address) == "OK"
        channel = Transport(fleet).channel(address)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await router_pb2_grpc.RouterStub(channel).ListModels(router_pb2.ListModelsRequest(), timeout=patience(5))
        assert error_of(raised.value).reason is Reason.UNAUTHENTICATED
        stream = router_pb2_grpc.RouterStub(channel).GetTokenizer(
            router_pb2.RouterGetTokenizerRequest(), timeout=patience(5)
        )
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stream.read()
        assert error_of(raised.value).reason is Reason.UNAUTHENTICATED
        await channel.close()
        assert await answer_of(Transport(fleet, other), address) == "UNAUTHENTICATED"
        assert len(router.seen) == 1
        assert token.read_text().strip() not in repr(raised.value)
        # Whoever only probes health has a certificate at most.
        with Transport(fleet).blocking_channel(address) as probing:
            check: Any = health_pb2_grpc.HealthStub(probing)
            answer = await asyncio.to_thread(check.Check, health_pb2.HealthCheckRequest(), timeout=patience(5))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_new_certificates_are_used_without_losing_a_stream(fleet: Path, tmp_path: Path) -> None:
    own = make_certificates(tmp_path / "own")
    clock = Clock()
    transport = Transport(own, clock=clock)
    before = Transport(make_certificates(tmp_path / "before", ca=own))
    async with serving(transport) as (address, router):
        channel = before.channel(address)
        stream = router_pb2_grpc.RouterStub(channel).GetTokenizer(router_pb2.RouterGetTokenizerRequest())
        assert (await stream.read()).chunk == b"a"
        version = transport.version
        # Another authority altogether: whoever connects from now on belongs to it.
        for name in ("ca.pem", "ca-key.pem"):
            (own / name).unlink()
        make_certificates(own)
        async with asyncio.timeout(patience(BOUND_S)):
            while transport.version == version:
                await asyncio.sleep(0.01)
        assert await answer_of(transport, address) == "OK"
        assert await answer_of(Transport(make_certificates(tmp_path / "after", ca=own)), address) == "OK"
        assert await answer_of(before, address) == "UNAVAILABLE"
        router.go_on.set()
        assert (await stream.read()).chunk == b"b"
        assert await stream.read() is grpc.aio.EOF
        await channel.close()


async def test_files_that_do_not_fit_together_are_left_alone_until_they_do(fleet: Path, tmp_path: Path) -> None:
    own = make_certificates(tmp_path / "own")
    transport = Transport(own, own / "join-token", clock=Clock())
    known = transport.metadata
    good = {name: (own / name).read_bytes() for name in ("cert.pem", "key.pem")}
    renewed = make_certificates(tmp_path / "renewed", ca=own)
    (own / "cert.pem").write_bytes((renewed / "cert.pem").read_bytes())
    assert transport.version == 0
    (own / "key.pem").write_bytes((renewed / "key.pem").read_bytes())
    assert transport.version == 1
    (own / "key.pem").unlink()
    (own / "join-token").write_text("short")
    assert transport.version == 1
    assert transport.metadata == known
    (own / "key.pem").write_bytes(good["key.pem"])
    (own / "cert.pem").write_bytes(good["cert.pem"])
    (own / "join-token").write_text("another-token-0123456789")
    assert transport.version == 2
    assert transport.metadata == (("x-headrace-join-token", "another-token-0123456789"),)
    assert transport.admits(b"another-token-0123456789")
    assert not transport.admits("another-token-012345678")
    assert not transport.admits(None)


def test_what_cannot_work_is_refused_at_once_with_the_remedy(fleet: Path, stranger: Path, tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="headrace certs create"):
        Transport(tmp_path)
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for name, source in (("ca.pem", stranger), ("cert.pem", fleet), ("key.pem", fleet)):
        (mixed / name).write_bytes((source / name).read_bytes())
    with pytest.raises(TransportError, match="unable to get local issuer"):
        read_identity(mixed)
    for content in ("", "short", "with a space in it, quite long", "ä" * 40, "x" * 5000):
        (tmp_path / "token").write_text(content)
        with pytest.raises(TransportError) as raised:
            Transport(fleet, tmp_path / "token")
        assert content == "" or content not in str(raised.value)


async def test_probes_without_a_certificate_learn_of_health_and_of_nothing_else(fleet: Path) -> None:
    transport = Transport(fleet)
    server = grpc.aio.server()
    health = add_introspection(server, ["headrace.v1.Router"])
    await set_serving(health, ["headrace.v1.Router"], True)
    transport.bind(server, "127.0.0.1:0")
    await server.start()
    with pytest.raises(RuntimeError):
        await start_probe("256.0.0.1:1", health)
    probe = await start_probe(f"unix:{fleet}/probe.sock", health)
    async with PLAIN.channel(f"unix:{fleet}/probe.sock") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=patience(5))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await router_pb2_grpc.RouterStub(channel).ListModels(router_pb2.ListModelsRequest(), timeout=patience(5))
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await probe.stop(None)
    await server.stop(None)


async def test_whoever_is_away_is_looked_for_again_and_again() -> None:
    """Six times within seconds; gRPC by itself would take a quarter of a minute for that, and then minutes for one."""
    num_attempts = 0
    is_enough = asyncio.Event()

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_attempts
        num_attempts += 1
        writer.close()
        if num_attempts == 6:
            is_enough.set()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    address = "{}:{}".format(*server.sockets[0].getsockname())
    async with server, PLAIN.channel(address) as channel:
        ready = asyncio.create_task(channel.channel_ready())
        await asyncio.wait_for(is_enough.wait(), patience(8))
        ready.cancel()
