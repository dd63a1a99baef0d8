"""`headrace serve` as a real process, for tests."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import grpc
import httpx

from headrace.cli.fleet.fleet_access import transport_of
from headrace.cli.fleet.run_state import ServeRecord, running_serves
from headrace.cli.fleet.status import row_of
from headrace.cli.models.model_cache import model_directory
from headrace.protos import router_pb2, router_pb2_grpc
from tests.patience import patience, until

MODEL = "smollm2-135m"
READY_BOUND_S = 60.0
BOUND_S = 30.0
_TAIL_LINES = 60
_ASK_TIMEOUT_S = 2.0
HEADRACE = (sys.executable, "-m", "headrace.cli")
# Tests ask again and again. Reading the certificates of authorities takes httpx 35 ms each time, which no test needs,
# and a connection that is kept may be to a process that is gone.
HTTP = httpx.Client(verify=False, limits=httpx.Limits(max_keepalive_connections=0), timeout=4 * BOUND_S)


def headrace(*args: str, stdin: str = "", timeout_s: float = BOUND_S) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*HEADRACE, *args], input=stdin, capture_output=True, text=True, timeout=patience(timeout_s), check=False
    )


def alive(pid: int) -> bool:
    """Whether a process with this pid runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def held_by(workers: Iterable[router_pb2.WorkerInfo]) -> list[str]:
    """A description of the resources that requests hold at workers, as a router lists them; empty when idle."""
    held = []
    for worker in workers:
        load = worker.load
        numbers = (worker.num_in_flight, load.num_running, load.num_waiting)
        num_held_blocks = load.num_blocks - load.num_free_blocks
        if any(numbers) or num_held_blocks:
            booked, running, waiting = numbers
            held.append(
                f"{worker.worker_id}: {booked} booked, {running} running, {waiting} waiting, {num_held_blocks} blocks"
            )
    return held


class Serve:
    """A running `headrace serve`, or another command that serves, with its output. Call `end` in any case. `program`
    is the headrace that is installed, and `cwd` the directory in which it starts."""

    def __init__(
        self, *args: str, command: str = "serve", program: Sequence[str] = HEADRACE, cwd: Path | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [*program, command, *args],
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.stdout: list[str] = []
        self.logs: list[str] = []
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._readers = [self._reader(self.process.stdout, self.stdout), self._reader(self.process.stderr, self.logs)]

    @property
    def pid(self) -> int:
        """The id of the serve process."""
        return self.process.pid

    @property
    def base_url(self) -> str:
        """The URL from the ready line, without /v1."""
        return self.stdout[0].removeprefix("ready: ").removesuffix("/v1")

    @property
    def port(self) -> int:
        """HTTP port."""
        return int(self.base_url.rpartition(":")[2])

    def until_ready(self) -> None:
        """Wait for the ready line."""
        until(lambda: bool(self.stdout) or self.process.poll() is not None, "the ready line", READY_BOUND_S)
        assert self.stdout, f"no ready line, status {self.process.poll()}:\n{self.tail()}"
        assert re.fullmatch(r"ready: http://127\.0\.0\.1:\d+/v1", self.stdout[0])

    @property
    def record(self) -> ServeRecord:
        """What it tells commands of itself. It must run."""
        return next(record for record in running_serves() if record.pid == self.pid)

    def status(self) -> list[dict[str, Any]]:
        """Rows of `headrace status --json` for this serve, without starting the command: tests ask again and again."""
        return [row for record in running_serves() if record.pid == self.pid for row in self._rows(record)]

    def workers(self) -> dict[str, router_pb2.WorkerInfo]:
        """The workers that its router lists, by id, also those of others; none if it does not respond."""
        return _workers_of(self.record) or {}

    def process_of(self, name: str) -> dict[str, Any]:
        """The row of one process."""
        return next(row for row in self.status() if row["name"] == name)

    def is_ready(self) -> bool:
        """Whether requests can be answered now."""
        try:
            return HTTP.get(f"{self.base_url}/health/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels, from /metrics."""
        text = HTTP.get(f"{self.base_url}/metrics").text
        found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        assert found, f"/metrics has no {name}"
        return sum(map(float, found))

    def wait(self, bound_s: float = BOUND_S) -> int:
        """Wait for the end of the process and its output. Returns the exit status."""
        status = self.process.wait(patience(bound_s))
        for reader in self._readers:
            reader.join(patience(BOUND_S))
        return status

    def tail(self) -> str:
        """The last lines of the logs."""
        return "\n".join(self.logs[-_TAIL_LINES:])

    def end(self) -> None:
        """Stop it, by force if need be."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(patience(BOUND_S))
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def _rows(self, record: ServeRecord) -> list[dict[str, Any]]:
        workers = _workers_of(record)
        gateway_ready, now_s = self.is_ready(), time.time()
        return [row_of(record, process, workers, gateway_ready, now_s) for process in record.processes]

    def _reader(self, stream: IO[str], lines: list[str]) -> threading.Thread:
        def read() -> None:
            # Line by line: others look at the list while it grows.
            while line := stream.readline():
                lines.append(line.rstrip("\n"))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread


def _workers_of(record: ServeRecord) -> dict[str, router_pb2.WorkerInfo] | None:
    """The workers that the router of a serve lists; None if it does not respond."""
    with transport_of(record.tls_dir, record.join_token_file).blocking_channel(record.router_address) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        try:
            answer = stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=patience(_ASK_TIMEOUT_S))
        except grpc.RpcError:
            return None
    return {info.worker_id: info for info in answer.workers}


@functools.cache
def pulled_model() -> Path:
    """Directory of the demo model, pulled if the cache does not have it."""
    done = headrace("pull", MODEL, timeout_s=600)
    assert done.returncode == 0, done.stderr
    return model_directory(MODEL)


@contextmanager
def serving(*args: str, model: Path | None = None) -> Iterator[Serve]:
    """A model under the name of the demo model, ready on a free port: the demo model itself, pulled first if the cache
    does not have it, or the one in the directory `model`."""
    pulled_model()
    named = [MODEL] if model is None else [str(model), "--name", MODEL]
    serve = Serve(*named, "--port", "0", "--kv-cache-gb", "0.5", *args)
    try:
        serve.until_ready()
        yield serve
    finally:
        serve.end()
