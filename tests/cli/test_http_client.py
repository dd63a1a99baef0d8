"""HTTP clients of commands: proxies, TLS, and the URLs that people type."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.cli.fleet.run_state import RunState
from headrace.cli.http_client import http_client, is_on_this_host, is_same_server, server_url
from headrace.cli.main import cli
from headrace.common.commands import CommandError
from tests.certificates import make_certificates
from tests.cli.test_status import record
from tests.http_server import http_server, respond

_LIST = json.dumps({"data": [{"id": "m"}]}).encode()


def chat(*args: str) -> str:
    """What a chat that is left at once says on standard error."""
    return CliRunner().invoke(cli, ["chat", *args], input="/exit\n").stderr


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_server_on_this_host_is_asked_without_a_proxy(
    cache: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv(variable, "socks5h://127.0.0.1:9" if variable == "ALL_PROXY" else "http://127.0.0.1:9")
    with http_server(lambda handler: respond(handler, 200, _LIST)) as url:
        assert chat("--url", url) == ""
        assert chat("--url", url.replace("127.0.0.1", "localhost")) == ""


@pytest.mark.parametrize("proxy", ["socks5h://127.0.0.1:9", "socks://proxy:1080", "http://proxy:none", "ftp://proxy"])
@pytest.mark.parametrize("command", [("chat", "--url", "http://10.255.255.1:8000"), ("pull", "owner/name")])
def test_a_proxy_that_cannot_be_used_is_named_and_no_secret_of_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch, proxy: str, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("all_proxy", proxy.replace("//", "//user:hidden@"))
    done = CliRunner().invoke(cli, command, input="hello\n")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: all_proxy names a proxy that cannot be used")
    assert "hidden" not in done.stderr


def test_a_proxy_without_a_scheme_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "proxy.example:3128")
    http_client().close()


@pytest.fixture
def https_url(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server with a certificate of an authority that nobody knows, and the file of that authority."""
    files = make_certificates(tmp_path / "tls")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            respond(self, 200, _LIST)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files / "cert.pem", files / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{server.server_address[1]}", files / "ca.pem"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_certificate_that_is_not_accepted_is_said_with_the_remedy(cache: Path, https_url: tuple[str, Path]) -> None:
    url, ca_file = https_url
    assert "its certificate is not accepted (" in chat("--url", url)
    assert "name its authority with --ca-file" in chat("--url", url)
    assert chat("--url", url, "--ca-file", str(ca_file)) == ""


def test_run_does_not_wait_forever_for_a_server_whose_certificate_it_does_not_accept(
    cache: Path, https_url: tuple[str, Path]
) -> None:
    url, _ = https_url
    RunState(9).write(record(url=url, models=("m",)))
    done = CliRunner().invoke(cli, ["run", "m", "hello"])
    assert done.exit_code == 1
    assert "its certificate is not accepted" in done.stderr


def test_https_at_a_server_without_it_is_said(cache: Path) -> None:
    with http_server() as url:
        assert "if it has no certificate, write http://" in chat("--url", url.replace("http:", "https:"))


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/v1/", "http://h:8000"),
        ("https://h/", "https://h"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_a_url_may_end_as_clients_write_it(text: str, url: str) -> None:
    assert server_url(text) == url


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("localhost:8000", "did you mean http://localhost:8000?"),
        ("127.0.0.1", "did you mean http://127.0.0.1?"),
        ("http://", "is not the URL of a server"),
        ("http://h:port", "is not the URL of a server"),
        ("http://[::1", "is not the URL of a server"),
        ("ftp://h", "is not the URL of a server"),
    ],
)
def test_what_is_no_url_is_refused(text: str, said: str) -> None:
    with pytest.raises(CommandError) as raised:
        server_url(text)
    assert said in raised.value.message


def test_loopback_addresses_are_one_server() -> None:
    assert is_same_server("http://localhost:8000", "http://127.0.0.1:8000")
    assert is_same_server("http://[::1]:8000", "http://0.0.0.0:8000")
    assert is_same_server("https://h", "https://h:443")
    assert not is_same_server("http://localhost:8000", "http://127.0.0.1:8001")
    assert not is_same_server("http://a:8000", "http://127.0.0.1:8000")
    assert not is_on_this_host("http://10.0.0.1:8000")
