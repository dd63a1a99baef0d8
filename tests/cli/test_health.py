"""`headrace health` against real servers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health as grpc_health
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.cli.fleet.health import health


@pytest.fixture
def server() -> Iterator[str]:
    made = grpc.server(ThreadPoolExecutor(2))
    servicer = grpc_health.HealthServicer()
    servicer.set("up", health_pb2.HealthCheckResponse.SERVING)
    servicer.set("down", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, made)
    port = made.add_insecure_port("127.0.0.1:0")
    made.start()
    yield f"127.0.0.1:{port}"
    made.stop(None).wait()


@pytest.mark.parametrize(("service", "status"), [("up", 0), ("down", 1), ("unknown", 1), ("", 0)])
def test_the_status_of_a_grpc_service_is_the_exit_status(server: str, service: str, status: int) -> None:
    result = CliRunner().invoke(health, [server, "--service", service])
    assert (result.exit_code, result.output) == (status, "serving\n" if status == 0 else "not serving\n")


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        ("127.0.0.1:1", "a fleet with TLS wants --tls-dir"),
        ("http://127.0.0.1:1", "is it https?"),
        ("https://127.0.0.1:1", "is it http?"),
        ("unix:/nowhere.sock", "a fleet with TLS wants --tls-dir"),
    ],
)
def test_nobody_there_does_not_serve_and_is_told_from_who_says_no(target: str, remedy: str) -> None:
    result = CliRunner().invoke(health, [target])
    assert (result.exit_code, result.output) == (1, f"not serving: no answer from {target}; {remedy}\n")


@pytest.mark.parametrize("target", ["http://", "http://[::1", "http://host:port", "http://host:99999"])
def test_an_address_that_is_none_is_a_usage_error(target: str) -> None:
    result = CliRunner().invoke(health, [target])
    assert result.exit_code == 2, result.exception
    assert f"{target} is no address; write http://HOST:PORT" in result.stderr
