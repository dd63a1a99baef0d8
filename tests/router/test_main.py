"""The process: flags, exit status, signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from headrace.protos import router_pb2, router_pb2_grpc
from tests.patience import patience


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "headrace.router", *args]


def refused(*args: str) -> str:
    """Standard error of a router that exits with status 2."""
    done = subprocess.run(command(*args), capture_output=True, text=True, timeout=patience(60), check=False)
    assert done.returncode == 2, done.stderr
    return done.stderr


@pytest.fixture
def taken() -> Iterator[str]:
    """An address with a listening server."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_router_listens_answers_and_ends_with_status_0(
    tmp_path: Path, signal_number: signal.Signals, kind: str
) -> None:
    listen = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/router.sock"
    environment = {**os.environ, "HEADRACE_ROUTER_WORKER": "127.0.0.1:1"}
    with subprocess.Popen(command("--listen", listen), stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "listening on" in line)
        address = re.split(r"listening on ", line)[1].strip()
        with grpc.insecure_channel(address) as channel:
            listed = router_pb2_grpc.RouterStub(channel).ListWorkers(
                router_pb2.ListWorkersRequest(), timeout=patience(10)
            )
        assert [info.address for info in listed.workers] == ["127.0.0.1:1"]
        process.send_signal(signal_number)
        assert process.wait(timeout=patience(20)) == 0


def test_more_workers_than_it_takes_are_refused_in_one_sentence() -> None:
    said = refused("--listen", "127.0.0.1:0", "--max-workers", "1", "--worker", "a:1", "--worker", "b:1")
    assert said == "error: --worker names 2 workers, more than --max-workers (1): raise it or name fewer\n"


def test_an_address_in_use_is_refused_in_one_sentence(taken: str) -> None:
    said = refused("--listen", taken)
    assert said == f"error: cannot listen on {taken} (Address already in use): choose another address with --listen\n"


def test_a_unix_socket_in_use_is_not_taken_over(tmp_path: Path) -> None:
    path = f"{tmp_path}/s.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        assert "is in use" in refused("--listen", f"unix:{path}")


def test_a_metrics_address_in_use_is_refused(taken: str) -> None:
    assert "choose another with --metrics" in refused("--listen", "127.0.0.1:0", "--metrics", taken)


@pytest.mark.parametrize(
    "args",
    [
        ("--listen", "nonsense"),
        ("--listen", "127.0.0.1:99999"),
        ("--listen", "127.0.0.1:" + "1" * 5000),
        ("--listen", "127.0.0.1:0", "--worker", "nowhere"),
        ("--listen", "127.0.0.1:0", "--metrics", "9090"),
    ],
)
def test_what_is_no_address_is_refused_with_the_form_it_has(args: tuple[str, ...]) -> None:
    assert "write HOST:PORT" in refused(*args)


def test_a_missing_flag_is_refused() -> None:
    assert "--listen" in refused()


def test_an_open_address_without_secrets_is_refused_with_the_remedies() -> None:
    said = refused("--listen", "0.0.0.0:0")
    assert said.count("\n") == 1
    for remedy in ("--join-token-file", "--tls-dir", "--insecure"):
        assert remedy in said
