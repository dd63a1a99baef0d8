"""Workers, routers and gateways as separate processes, for tests that kill, stop and restart them individually."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx

from headrace.common import launch
from headrace.common.transport.channels import PLAIN, Transport
from headrace.protos import router_pb2, router_pb2_grpc
from tests.e2e.serving import BOUND_S, HTTP, MODEL, READY_BOUND_S, held_by, until
from tests.e2e.small_model import small_model
from tests.patience import patience
from tests.ports import free_port

_TAIL_LINES = 40


class Process:
    """One process that can be started again and again with the same arguments; it dies with the tests."""

    def __init__(
        self,
        name: str,
        argv: Iterable[str],
        *,
        before: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`before` is a command that runs `argv`, such as one that enters a namespace. `environment` adds to ours."""
        self.name = name
        self.logs: list[str] = []
        self.killed_s = float("-inf")
        self._argv = [*before, sys.executable, *argv]
        self._environment = dict(environment or {})
        self._popen: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        """The id of the current or last process."""
        assert self._popen is not None
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._popen is not None and self._popen.poll() is None

    def start(self) -> None:
        """Start the process. None may be running."""
        assert not self.is_alive, f"{self.name} runs already"
        self._popen = subprocess.Popen(
            launch.with_parent(self._argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **self._environment},
        )
        self._reader = threading.Thread(target=self._read, args=(self._popen,), daemon=True)
        self._reader.start()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL. `killed_s` is infinite until `gone` sets the time of the end. Until then the port accepts
        connections, and `is_alive` may lag behind."""
        self.killed_s = math.inf
        self.signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.signal(signal.SIGTERM)

    def gone(self, bound_s: float = BOUND_S) -> int:
        """Wait for its end; the exit status as of Popen."""
        assert self._popen is not None
        assert self._reader is not None
        status = self._popen.wait(patience(bound_s))
        if status == -signal.SIGKILL:
            self.killed_s = time.monotonic()
        self._reader.join(patience(BOUND_S))
        return status

    def end(self) -> None:
        """Kill the process if it is still running."""
        if self.is_alive:
            self.signal(signal.SIGKILL)
            self.gone()

    def tail(self) -> str:
        """The end of its logs."""
        return "\n".join(f"{self.name} | {line}" for line in self.logs[-_TAIL_LINES:])

    def _read(self, popen: subprocess.Popen[str]) -> None:
        assert popen.stdout is not None
        with popen.stdout:
            for line in popen.stdout:
                self.logs.append(line.rstrip("\n"))


def num_fds(process: Process) -> int:
    """The number of its open files."""
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


def rss_mib(process: Process) -> float:
    """Resident memory without shared pages."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(f"{process.name} has no RssAnon")


class Fleet:
    """Processes that know one another. `start` and `end` frame its life.

    Every worker registers with every router, or with `redis_url` publishes its lease there for the routers to read.
    Each gateway has all routers. Addresses are sockets in `directory`. Workers serve the model in
    `model`, by default a few layers of the demo model, under the demo model's name.
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_workers: int,
        num_routers: int,
        num_gateways: int = 1,
        model: Path | None = None,
        redis_url: str | None = None,
        environment: Mapping[str, str] | None = None,
        roles: Sequence[str] = (),
        worker_flags: Iterable[str] = (),
        router_flags: Iterable[str] = (),
        gateway_flags: Iterable[str] = (),
        transport: Transport = PLAIN,
    ) -> None:
        self._directory = directory
        self._transport = transport
        self._model = model
        self._environment = environment
        self.router_addresses = [f"unix:{directory}/router-{index}.sock" for index in range(num_routers)]
        known = [flag for address in self.router_addresses for flag in ("--router", address)]
        shared = [] if redis_url is None else ["--redis", redis_url]
        self._worker_flags = [*(shared or known), *worker_flags]
        self.routers = [
            Process(
                f"router-{index}",
                ["-m", "headrace.router", "--listen", address, *shared, *router_flags],
                environment=environment,
            )
            for index, address in enumerate(self.router_addresses)
        ]
        self.workers: list[Process] = []
        for number in range(num_workers):
            self.add_worker(roles[number] if roles else "both")
        self.ports = [free_port() for _ in range(num_gateways)]
        self.gateways = [
            Process(
                f"gateway-{index}",
                ["-m", "headrace.gateway", "--host", "127.0.0.1", "--port", str(port), *known, *gateway_flags],
                environment=environment,
            )
            for index, port in enumerate(self.ports)
        ]

    def add_worker(self, role: str = "both") -> Process:
        """Add a worker without starting it."""
        name = f"worker-{len(self.workers)}"
        listen = ["--listen", f"unix:{self._directory}/{name}.sock", "--worker-id", name]
        path = self._model or small_model()
        model = ["--model", str(path), "--name", MODEL, "--threads", "1", "--kv-cache-gb", "0.5"]
        argv = ["-m", "headrace.worker", *model, *listen, "--role", role, *self._worker_flags]
        self.workers.append(Process(name, argv, environment=self._environment))
        return self.workers[-1]

    @property
    def port(self) -> int:
        """The port of the first gateway."""
        return self.ports[0]

    @property
    def gateway(self) -> Process:
        """The first one."""
        return self.gateways[0]

    @property
    def base_url(self) -> str:
        """The URL of the first gateway, without /v1."""
        return self.base_urls[0]

    @property
    def base_urls(self) -> list[str]:
        """The URL of each gateway."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    @property
    def processes(self) -> list[Process]:
        """All processes."""
        return [*self.workers, *self.routers, *self.gateways]

    def start(self) -> None:
        """Start everything and wait until every router has every worker, and the gateway answers."""
        for process in self.processes:
            process.start()
        self.until_whole(READY_BOUND_S)

    def end(self) -> None:
        """Kill all processes that are still running."""
        for process in self.processes:
            process.end()

    def until_whole(self, bound_s: float = BOUND_S) -> None:
        """Wait until every router has every worker, and every gateway answers."""
        for index in range(len(self.routers)):
            until(lambda i=index: self.num_ready(i) == len(self.workers), f"router {index} has all workers", bound_s)  # type: ignore[misc]
        until(self.is_ready, "the gateways are ready", bound_s)

    def until_idle(self, bound_s: float = BOUND_S) -> None:
        """Wait until no router books a request, no worker runs one, and every KV block is free."""
        until(lambda: not self.what_is_held(), f"nothing is held any more: {self.what_is_held()}", bound_s)

    def what_is_held(self) -> list[str]:
        """A description of the resources that requests still hold; empty when idle."""
        return [
            f"router {index}, {held}"
            for index in range(len(self.routers))
            for held in held_by(self.list_workers(index))
        ]

    def list_workers(self, router_index: int = 0) -> list[router_pb2.WorkerInfo]:
        """The workers that a router lists; none if it does not respond."""
        with self._transport.blocking_channel(self.router_addresses[router_index]) as channel:
            try:
                answer = router_pb2_grpc.RouterStub(channel).ListWorkers(
                    router_pb2.ListWorkersRequest(), timeout=patience(5)
                )
            except grpc.RpcError:
                return []
        return list(answer.workers)

    def num_disk_tokens(self, prompt: list[int], router_index: int = 0) -> int:
        """Tokens of a prompt that some worker would read from its disk, as a router explains it."""
        with self._transport.blocking_channel(self.router_addresses[router_index]) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            explained = stub.Explain(router_pb2.ExplainRequest(token_ids=prompt), timeout=patience(5))
        return max(worker.num_disk_tokens for worker in explained.workers)

    def num_ready(self, router_index: int = 0) -> int:
        """Workers that take requests of this router."""
        return sum(worker.state == router_pb2.WORKER_STATE_READY for worker in self.list_workers(router_index))

    def is_ready(self) -> bool:
        """Whether the gateways answer requests."""
        try:
            return all(HTTP.get(f"{url}/health/ready").status_code == 200 for url in self.base_urls)
        except httpx.HTTPError:
            return False

    def metric(self, name: str) -> float:
        """Sum of a metric over the gateways and its labels."""
        text = "".join(HTTP.get(f"{url}/metrics").text for url in self.base_urls)
        return sum(map(float, re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)))

    def tail(self) -> str:
        """The end of all logs."""
        return "\n".join(process.tail() for process in self.processes)


@contextmanager
def fleet(
    directory: Path,
    *,
    num_workers: int = 2,
    num_routers: int = 1,
    **settings: Any,
) -> Iterator[Fleet]:
    """A fleet that answers, ended with the block; `settings` as of `Fleet`. Prints the end of all logs, which pytest
    shows if the test has failed."""
    made = Fleet(directory, num_workers=num_workers, num_routers=num_routers, **settings)
    try:
        made.start()
        yield made
    finally:
        print(made.tail())
        made.end()
