"""TLS towards clients: HTTPS and gRPC, certificates of clients, files that change."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from headrace.common.stores import watched_files
from headrace.gateway.edge.settings import EdgeControls, EdgeSettings
from headrace.protos import text_pb2, text_pb2_grpc
from tests.certificates import make_certificates
from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certs") / "edge")


def settings_of(directory: Path, **more: Any) -> EdgeSettings:
    return EdgeSettings(tls_cert=directory / "cert.pem", tls_key=directory / "key.pem", **more)


def trusting(directory: Path, client: Path | None = None) -> ssl.SSLContext:
    """A client that believes this authority, and shows the certificate of `client`."""
    context = ssl.create_default_context(cafile=directory / "ca.pem")
    if client is not None:
        context.load_cert_chain(client / "cert.pem", client / "key.pem")
    return context


def asking(url: str, verify: ssl.SSLContext | bool = True) -> httpx.AsyncClient:
    """An HTTP client of one gateway."""
    return httpx.AsyncClient(base_url=url, verify=verify, timeout=patience(20))


async def grpc_answers(address: str, credentials: grpc.ChannelCredentials) -> bool:
    """Whether the gRPC edge answers a client."""
    options = (("grpc.ssl_target_name_override", "localhost"), ("grpc.enable_http_proxy", 0))
    async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
        try:
            await text_pb2_grpc.TextStub(channel).ListModels(text_pb2.TextListModelsRequest(), timeout=patience(5))
        except grpc.aio.AioRpcError:
            return False
    return True


async def test_clients_that_trust_the_authority_are_answered_and_streams_work(
    kit: Any, router: Any, certificates: Path
) -> None:
    controls = EdgeControls(settings_of(certificates))
    async with kit.serving_gateway(router.address, controls=controls) as gateway:
        router.reset()
        async with asking(gateway.url, trusting(certificates)) as http:
            streamed = await http.post(CHAT, json={**BODY, "stream": True})
            assert streamed.text.rstrip().endswith("[DONE]")
        with pytest.raises(httpx.ConnectError, match="certificate"):
            async with asking(gateway.url) as http:
                await http.get("/health/live")
        with pytest.raises(httpx.HTTPError):
            async with asking(gateway.url.replace("https", "http")) as http:
                await http.get("/health/live")
        # The test kit's gRPC server is plain; the credentials are tried on one of their own.
        assert controls.tls is not None
        server = grpc.aio.server()
        port = server.add_secure_port("127.0.0.1:0", controls.tls.grpc_credentials())
        text_pb2_grpc.add_TextServicer_to_server(Lists(), server)
        await server.start()
        trusted = grpc.ssl_channel_credentials((certificates / "ca.pem").read_bytes())
        assert await grpc_answers(f"127.0.0.1:{port}", trusted)
        assert not await grpc_answers(f"127.0.0.1:{port}", grpc.ssl_channel_credentials())
        await server.stop(None)


class Lists(text_pb2_grpc.TextServicer):  # type: ignore[misc]
    """Knows no models."""

    async def ListModels(self, request: Any, context: Any) -> text_pb2.TextListModelsResponse:
        return text_pb2.TextListModelsResponse()


async def test_with_an_authority_of_clients_only_health_is_for_those_without_a_certificate(
    kit: Any, router: Any, certificates: Path, tmp_path: Path
) -> None:
    stranger = make_certificates(tmp_path / "stranger")
    controls = EdgeControls(settings_of(certificates, tls_client_ca=certificates / "ca.pem"))
    async with kit.serving_gateway(router.address, controls=controls) as gateway:
        async with asking(gateway.url, trusting(certificates)) as http:
            assert (await http.get("/health/ready")).status_code == 200
            for path in ("/v1/models", "/metrics", "/", "/nothing"):
                refused = await http.get(path)
                assert (refused.status_code, refused.json()["error"]["code"]) == (403, "certificate_required")
        async with asking(gateway.url, trusting(certificates, certificates)) as http:
            assert (await http.post(CHAT, json=BODY)).status_code == 200
        with pytest.raises(httpx.HTTPError):
            async with asking(gateway.url, trusting(certificates, stranger)) as http:
                await http.get("/health/live")


async def test_a_renewed_certificate_is_used_from_the_next_connection_on(
    kit: Any, router: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_files, "LOOK_S", 0.0)
    own, other = make_certificates(tmp_path / "own"), make_certificates(tmp_path / "other")
    go_on = asyncio.Event()

    async def pausing(fake: Any, stream: Any, send: Any) -> None:
        await send([kit.token_of(ord("a"))], 0, None)
        await go_on.wait()
        await send([kit.EOS], 1, 1)

    controls = EdgeControls(settings_of(own, tls_client_ca=own / "ca.pem"))
    async with kit.serving_gateway(router.address, controls=controls) as gateway:
        router.reset()
        router.script = pausing
        async with (
            asking(gateway.url, trusting(own, own)) as http,
            http.stream("POST", CHAT, json={**BODY, "stream": True}) as running,
        ):
            lines = running.aiter_lines()
            while '"content":"a"' not in await anext(lines):
                pass
            (own / "cert.pem").write_bytes((other / "cert.pem").read_bytes())
            with pytest.raises(httpx.ConnectError):  # half of a change is none
                async with asking(gateway.url, trusting(other)) as early:
                    await early.get("/health/live")
            (own / "key.pem").write_bytes((other / "key.pem").read_bytes())
            (own / "ca.pem").write_bytes((other / "ca.pem").read_bytes())
            async with asking(gateway.url, trusting(other, other)) as late:
                assert (await late.get("/v1/models")).status_code == 200
            go_on.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
    router.reset()
