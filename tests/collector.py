"""A collector of traces of another maker, between our processes and the receiver of a test: rotel, which takes OTLP by
gRPC and HTTP, unpacks it, and sends batches on by gRPC.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.common import launch
from tests.otlp import Receiver
from tests.patience import patience, until
from tests.ports import free_port

PROGRAM = Path(__file__).parents[1] / ".make/collector/rotel/rotel-agent"
MISSING = "there is no collector here; make test fetches it"


def is_there() -> bool:
    """Whether there is a collector to run: make test fetches one."""
    return PROGRAM.exists()


@dataclass(frozen=True)
class Collector:
    """The addresses of a running collector, by the protocol that it takes there."""

    grpc_url: str
    http_url: str


@contextmanager
def collector(receiver: Receiver, directory: Path) -> Iterator[Collector]:
    """A collector that sends all spans on to a receiver over gRPC. Its log is in the directory."""
    ports = free_port(), free_port()
    grpc_address, http_address = (f"127.0.0.1:{port}" for port in ports)
    command = [
        *(str(PROGRAM), "start", "--pid-file", str(directory / "collector.pid"), "--batch-timeout", "50ms"),
        *("--otlp-grpc-endpoint", grpc_address, "--otlp-http-endpoint", http_address),
        *("--exporter", "otlp", "--otlp-exporter-endpoint", receiver.url),
    ]
    with (directory / "collector.log").open("wb") as log:
        process = subprocess.Popen(launch.with_parent(command), stdout=log, stderr=log)
    try:
        until(lambda: all(map(_accepts, ports)), "the collector listens")
        yield Collector(f"http://{grpc_address}", f"http://{http_address}")
    finally:
        process.terminate()
        process.wait(patience(30))


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
