"""Keys, limits and mutual TLS on real processes: two gateways, a router and a worker that share a Redis."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import grpc
import httpx
import pytest

from headrace.common.stores.files import replace_file
from headrace.common.transport.channels import FLEET_NAME, PLAIN, Transport
from headrace.protos import router_pb2, router_pb2_grpc
from headrace.protos.status import Reason, error_of
from tests.certificates import make_certificates
from tests.e2e.fleet import Fleet, Process, fleet
from tests.e2e.serving import HTTP, MODEL, headrace, until
from tests.patience import patience
from tests.ports import free_port
from tests.redis_server import RedisServer

pytestmark = pytest.mark.e2e

PASSWORD = "hunter2-of-redis"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0}


@dataclass
class Secured:
    """A fleet that authenticates its callers."""

    fleet: Fleet
    second_gateway: Process
    second_url: str
    redis_server: RedisServer
    redis_url: str
    tls_dir: Path
    secrets: list[str]

    @property
    def urls(self) -> tuple[str, str]:
        """The URLs of both gateways."""
        return self.fleet.base_url, self.second_url

    @property
    def gateways(self) -> tuple[Process, Process]:
        """Both of them."""
        return self.fleet.gateway, self.second_gateway

    def both_say(self, words: str) -> bool:
        """Whether both gateways have these words in their logs."""
        return all(any(words in line for line in gateway.logs) for gateway in self.gateways)

    def new_key(self, *flags: str) -> dict[str, str]:
        """Headers with a new key, once both gateways know it."""
        made = headrace("keys", "create", "test", "--redis", self.redis_url, "--json", *flags)
        assert made.returncode == 0, made.stderr
        secret = json.loads(made.stdout)["key"]
        self.secrets.append(secret)
        headers = {"authorization": f"Bearer {secret}"}
        for url in self.urls:
            until(lambda u=url: HTTP.get(f"{u}/v1/models", headers=headers).status_code == 200, "the key is known")  # type: ignore[misc]
        return headers


def known_gateway(known: list[str], redis_url: str, port: int) -> Process:
    """A further gateway that shares keys and limits with others."""
    flags = ["--host", "127.0.0.1", "--port", str(port), "--redis", redis_url, "--api-keys-redis", "--open-metrics"]
    return Process("gateway-1", ["-m", "headrace.gateway", *flags, *known])


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("secured")
    tls_dir = make_certificates(directory / "tls")
    token = tls_dir / "join-token"
    user = f"alice on >{PASSWORD} ~* &* +@all".split()
    redis_server = RedisServer(directory, "--user", *user).start()
    redis_url = f"redis://alice:{PASSWORD}@127.0.0.1:{redis_server.port}/0"
    member = ["--tls-dir", str(tls_dir), "--join-token-file", str(token), "--log-level", "debug"]
    port = free_port()
    gateway_flags = [*member, "--redis", redis_url, "--api-keys-redis", "--open-metrics"]
    secrets = [PASSWORD, token.read_text().strip(), *(tls_dir / "key.pem").read_text().split("\n")[1:3]]
    try:
        with fleet(
            directory,
            num_workers=1,
            redis_url=redis_url,
            transport=Transport(tls_dir, token),
            worker_flags=member,
            router_flags=member,
            gateway_flags=gateway_flags,
        ) as running:
            known = [*member, "--router", running.router_addresses[0]]
            second = known_gateway(known, redis_url, port)
            url = f"http://127.0.0.1:{port}"
            try:
                second.start()
                until(lambda: _is_ready(url), "the second gateway is ready")
                yield Secured(running, second, url, redis_server, redis_url, tls_dir, secrets)
            finally:
                second.end()
                print(second.tail(), running.tail())
    finally:
        redis_server.kill()


def _is_ready(url: str) -> bool:
    try:
        return HTTP.get(f"{url}/health/ready").status_code == 200
    except httpx.HTTPError:
        return False


async def ask_all(urls: list[str], headers: dict[str, str], **fields: object) -> list[httpx.Response]:
    """Send one request to each URL, all at once."""
    async with httpx.AsyncClient(timeout=patience(120), trust_env=False) as client:
        asked = (client.post(f"{url}/v1/chat/completions", json={**BODY, **fields}, headers=headers) for url in urls)
        return list(await asyncio.gather(*asked))


async def test_what_one_tenant_asks_does_not_show_to_another(secured: Secured) -> None:
    tokens = [1000 + i for i in range(100)]
    one, same, other = (secured.new_key("--tenant", tenant) for tenant in ("one", "one", "other"))
    house, guest = (secured.new_key("--tenant", tenant, "--cache-group", "house") for tenant in ("host", "guest"))

    async def cached(headers: dict[str, str], prompt: list[int] = tokens) -> int:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        async with httpx.AsyncClient(timeout=patience(120), trust_env=False) as client:
            response = await client.post(f"{secured.fleet.base_url}/v1/completions", json=body, headers=headers)
        found: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert await cached(one) == 0
    # The hit is of 98 tokens, and told in blocks of 32.
    assert await cached(same) == 96
    assert await cached(same, [*tokens[:77], *tokens[:23]]) == 64
    assert await cached(other) == 0
    assert (await cached(house), await cached(guest)) == (0, 96)

    def explained(*flags: str) -> int:
        member = ["--tls-dir", str(secured.tls_dir), "--join-token-file", str(secured.tls_dir / "join-token")]
        asked = ["--router", secured.fleet.router_addresses[0], "--tokens", ",".join(map(str, tokens)), "--json"]
        done = headrace("explain", *asked, *member, *flags)
        assert done.returncode == 0, done.stderr
        return int(json.loads(done.stdout)["workers"][0]["num_cached_tokens"])

    until(lambda: explained("--cache-group", "house") == 96, "the router's index has what the worker cached")
    assert (explained("--tenant", "one"), explained("--tenant", "nobody"), explained()) == (96, 0, 0)


async def test_two_gateways_that_share_redis_keep_a_limit_exactly(secured: Secured) -> None:
    headers = secured.new_key("--requests-per-minute", "6")
    begun_s = time.monotonic()
    # Of what comes at once, one gateway may take all places: each takes one before.
    answers = [(await ask_all([url], headers))[0] for url in secured.urls]
    answers += await ask_all([*secured.urls] * 14, headers)
    drained = int((time.monotonic() - begun_s) / 10)  # one place each 10 s
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert 6 <= statuses.count(200) <= 6 + drained
    for url in range(2):
        assert 200 in statuses[url::2]
        assert 429 in statuses[url::2]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert all(0 < int(answer.headers["retry-after-ms"]) <= 10_000 for answer in refused)
    assert {answer.json()["error"]["code"] for answer in refused} == {"rate_limit_exceeded"}


async def test_a_refused_request_is_taken_after_exactly_the_time_it_was_told(secured: Secured) -> None:
    headers = secured.new_key("--requests-per-minute", "30")
    answers = await ask_all([*secured.urls] * 18, headers)
    while True:
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused, "more were asked than may be"
        # The last place that drained is gone: the next one comes when this answer says.
        answers = await ask_all([secured.urls[0]], headers)
        if answers[0].status_code == 429:
            break
    wait_s = int(answers[0].headers["retry-after-ms"]) / 1000
    await asyncio.sleep(wait_s)  # as clients do
    assert [answer.status_code for answer in await ask_all([secured.urls[1]], headers)] == [200]


async def test_tokens_are_settled_across_gateways_to_what_was_used(secured: Secured) -> None:
    headers = secured.new_key("--tokens-per-minute", "1000")
    first = (await ask_all([secured.urls[0]], headers, max_tokens=400, stop=[" "]))[0]
    usage = first.json()["usage"]["total_tokens"]
    assert int(first.headers["x-ratelimit-limit-tokens"]) == 1000

    async def remaining() -> int:
        answer = (await ask_all([secured.urls[1]], headers))[0]
        return int(answer.headers["x-ratelimit-remaining-tokens"])

    async with asyncio.timeout(patience(30)):
        while await remaining() < 1000 - 2 * usage:  # until the 400 that were taken are given back
            pass


async def test_wrong_keys_are_refused_by_every_gateway(secured: Secured) -> None:
    for headers in ({}, {"authorization": "Bearer hr-wrong"}):
        answers = await ask_all([*secured.urls], headers)
        assert [answer.status_code for answer in answers] == [401, 401]


@pytest.mark.timeout(240)
async def test_without_redis_requests_go_on_and_limits_hold_for_each_gateway(secured: Secured) -> None:
    free, limited = secured.new_key(), secured.new_key("--requests-per-minute", "4")
    assert {answer.status_code for answer in await ask_all([*secured.urls] * 2, free)} == {200}
    secured.redis_server.kill()
    answers = await ask_all([*secured.urls] * 6, free)
    assert {answer.status_code for answer in answers} == {200}
    begun_s = time.monotonic()
    answers = await ask_all([*secured.urls] * 8, limited)
    drained = int((time.monotonic() - begun_s) / 15)
    for url in range(2):
        num_taken = [answer.status_code for answer in answers[url::2]].count(200)
        assert 4 <= num_taken <= 4 + drained
    await asyncio.to_thread(until, lambda: secured.both_say("Redis is unreachable"), "it is noticed")
    secured.redis_server.start()
    await asyncio.to_thread(until, lambda: secured.both_say("Redis is back"), "it is back")
    assert {answer.status_code for answer in await ask_all([*secured.urls] * 2, free)} == {200}
    await asyncio.to_thread(secured.new_key)


def test_strangers_and_plain_callers_get_nowhere_and_a_member_needs_the_token(secured: Secured, tmp_path: Path) -> None:
    stranger = make_certificates(tmp_path / "stranger")
    worker = f"unix:{Path(secured.fleet.router_addresses[0].removeprefix('unix:')).parent}/worker-0.sock"
    register = router_pb2.RegisterRequest(worker_id="evil", address="127.0.0.1:1")
    for address in (secured.fleet.router_addresses[0], worker):
        for transport, code in (
            (PLAIN, grpc.StatusCode.UNAVAILABLE),
            (Transport(stranger, stranger / "join-token"), grpc.StatusCode.UNAVAILABLE),
            (Transport(secured.tls_dir), grpc.StatusCode.UNAUTHENTICATED),
        ):
            with transport.blocking_channel(address) as channel, pytest.raises(grpc.RpcError) as raised:
                router_pb2_grpc.RouterStub(channel).Register(register, timeout=5)
            assert raised.value.code() is code
            if code is grpc.StatusCode.UNAUTHENTICATED:
                assert error_of(raised.value).reason is Reason.UNAUTHENTICATED
    assert [worker.worker_id for worker in secured.fleet.list_workers()] == ["worker-0"]


def test_the_commands_work_with_certificates(secured: Secured) -> None:
    router = secured.fleet.router_addresses[0]
    member = ("--tls-dir", str(secured.tls_dir), "--join-token-file", str(secured.tls_dir / "join-token"))
    assert headrace("health", router, *member).returncode == 0
    assert headrace("health", router, *member[:2]).returncode == 0
    assert headrace("health", router).returncode == 1
    told = headrace("explain", "--router", router, "--tokens", "1,2,3", *member)
    assert "worker-0" in told.stdout, told.stderr
    refused = headrace("explain", "--router", router, "--tokens", "1,2,3", *member[:2])
    assert "join token" in refused.stderr
    headers = secured.new_key()
    key = headers["authorization"].removeprefix("Bearer ")
    # Drawn without a seed: left to itself, the answer is now and then thousands of tokens long.
    limits = ("--max-tokens", "20")
    chatted = headrace("chat", "--url", secured.urls[0], "--api-key", key, *limits, stdin="Say hi.\n")
    assert chatted.returncode == 0, chatted.stderr
    refused = headrace("chat", "--url", secured.urls[0], stdin="Say hi.\n")
    assert "--api-key" in refused.stderr


def shown_certificate(address: str, tls_dir: Path) -> bytes:
    """The certificate of a server on a unix socket, as DER."""
    context = ssl.create_default_context(cafile=tls_dir / "ca.pem")
    context.load_cert_chain(tls_dir / "cert.pem", tls_dir / "key.pem")
    context.set_alpn_protocols(["h2"])
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(address.removeprefix("unix:"))
        with context.wrap_socket(raw, server_hostname=FLEET_NAME) as connection:
            return connection.getpeercert(binary_form=True) or b""


def refuses_token(address: str, tls_dir: Path, token: Path) -> bool:
    """Whether a router refuses the calls of a member with this join token."""
    with Transport(tls_dir, token).blocking_channel(address) as channel:
        try:
            router_pb2_grpc.RouterStub(channel).ListModels(router_pb2.ListModelsRequest(), timeout=patience(5))
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.UNAUTHENTICATED
    return False


async def test_certificates_and_the_join_token_are_renewed_without_losing_a_stream(
    secured: Secured, tmp_path: Path
) -> None:
    headers = secured.new_key()
    router = secured.fleet.router_addresses[0]
    before = shown_certificate(router, secured.tls_dir)
    token, old_token = secured.tls_dir / "join-token", tmp_path / "old"
    old_token.write_bytes(token.read_bytes())
    assert not refuses_token(router, secured.tls_dir, old_token)
    body = {**BODY, "max_tokens": 100, "ignore_eos": True, "stream": True}

    async def stream(url: str, started: asyncio.Event) -> list[str]:
        lines = []
        async with (
            httpx.AsyncClient(timeout=patience(120), trust_env=False) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as response,
        ):
            async for line in response.aiter_lines():
                lines.append(line)
                if len(lines) > 6:
                    started.set()
        return [line for line in lines if line]

    begun = [asyncio.Event() for _ in range(4)]
    urls = [secured.urls[index % 2] for index in range(4)]
    running = [asyncio.create_task(stream(url, event)) for url, event in zip(urls, begun, strict=True)]
    async with asyncio.timeout(patience(120)):
        await asyncio.gather(*(event.wait() for event in begun))
    secured.secrets.append(token_hex(32))
    replace_file(token, secured.secrets[-1].encode(), 0o600)
    await asyncio.to_thread(make_certificates, secured.tls_dir)
    await asyncio.to_thread(
        until, lambda: shown_certificate(router, secured.tls_dir) != before, "the router shows the new certificate"
    )
    await asyncio.to_thread(
        until, lambda: refuses_token(router, secured.tls_dir, old_token), "the router wants the new token"
    )
    assert {answer.status_code for answer in await ask_all([*secured.urls] * 2, headers)} == {200}
    streams = await asyncio.gather(*running)
    assert [lines[-1] for lines in streams] == ["data: [DONE]"] * 4
    assert len({"".join(delta_of(line) for line in lines) for lines in streams}) == 1, "all have the same whole answer"
    # Whoever comes now has never seen the old certificate, nor the old token.
    secured.fleet.gateway.terminate()
    assert secured.fleet.gateway.gone() == 0
    secured.fleet.gateway.start()
    await asyncio.to_thread(until, secured.fleet.is_ready, "the gateway is back")


def delta_of(line: str) -> str:
    """The text of a chunk."""
    if not line.startswith("data: {"):
        return ""
    choices = json.loads(line.removeprefix("data: "))["choices"]
    return choices[0]["delta"].get("content", "") if choices else ""


async def test_no_secret_is_in_any_log(secured: Secured) -> None:
    headers = secured.new_key("--requests-per-minute", "1")
    for wrong in ({"authorization": "Bearer hr-not-a-key-but-secret"}, {"x-api-key": "hr-not-a-key-but-secret"}):
        await ask_all([*secured.urls], wrong)
    await ask_all([*secured.urls] * 2, headers)
    async with httpx.AsyncClient(timeout=patience(20)) as client:
        await client.post(f"{secured.urls[0]}/v1/chat/completions", content=b"{", headers=headers)
    logs = "\n".join(line for process in (*secured.fleet.processes, secured.second_gateway) for line in process.logs)
    assert "API keys are valid" in logs
    for secret in (*secured.secrets, "hr-not-a-key-but-secret"):
        assert len(secret) > 10
        assert secret not in logs
