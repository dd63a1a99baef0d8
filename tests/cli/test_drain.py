"""`headrace drain`: its request to the worker, and its output."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from headrace.cli.main import cli
from headrace.protos import worker_pb2, worker_pb2_grpc


class FakeWorker(worker_pb2_grpc.WorkerServicer):  # type: ignore[misc]
    """Records its requests."""

    def __init__(self) -> None:
        self.undone: list[bool] = []
        self.num_running = 0

    def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:
        self.undone.append(request.undo)
        return worker_pb2.DrainResponse(num_running=self.num_running)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[str, FakeWorker]]:
    fake, address = FakeWorker(), f"unix:{tmp_path}/worker.sock"
    server = grpc.server(ThreadPoolExecutor(2))
    worker_pb2_grpc.add_WorkerServicer_to_server(fake, server)
    server.add_insecure_port(address)
    server.start()
    yield address, fake
    server.stop(None).wait()


def test_a_worker_is_drained_and_taken_back(worker: tuple[str, FakeWorker]) -> None:
    address, fake = worker
    done = CliRunner().invoke(cli, ["drain", address])
    assert (done.exit_code, done.stdout) == (0, "drained\n")
    fake.num_running = 2
    done = CliRunner().invoke(cli, ["drain", address, "--timeout", "5"])
    assert (done.exit_code, done.stdout) == (1, "draining: 2 requests still run\n")
    done = CliRunner().invoke(cli, ["drain", address, "--undo"])
    assert (done.exit_code, done.stdout) == (0, "takes requests again\n")
    assert fake.undone == [False, False, True]


def test_nobody_at_the_address_is_said(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["drain", f"unix:{tmp_path}/none.sock", "--timeout", "5"])
    assert done.exit_code == 1
    assert "none.sock" in done.output
