"""A Ray cluster of one node, started by `ray start --head` as docs/how-to/ray.md has it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.ray_cluster import RayProcesses
from tests.e2e.serving import BOUND_S, HTTP
from tests.patience import patience, until
from tests.ports import free_port

LONG_S = 6 * BOUND_S
# Not in the files of deploy/ray, because it is a matter of the machine. On a crowded one Serve would end its proxies,
# which have not started within three times 5 s.
_OF_MACHINE = {
    "HEADRACE_WORKER_KV_CACHE_GB": "0.3",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "300",
}
# What Serve's commands say if the proxies have not started within 60 s, which no setting changes. They start later.
SLOW_PROXIES = "roxies not available after"
# And `ray start`, if the raylet has not started within 30 s, which no setting changes either.
_SLOW_RAYLET = "timed out during startup"
_STARTS = 5


class Head(RayProcesses):
    """`ray start --head` as the guide has it, but for the ports."""

    def __init__(self, directory: Path, programs: Path) -> None:
        """`programs` has the commands of Ray and of headrace."""
        self._programs = programs
        port, dashboard = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        self.dashboard = f"http://127.0.0.1:{dashboard}"
        offer = [self.program("headrace"), "ray", "resources"]
        offered = subprocess.run(offer, stdout=subprocess.PIPE, text=True, check=True)
        others = (
            "ray-client-server-port",
            "metrics-export-port",
            "dashboard-agent-listen-port",
            "dashboard-agent-grpc-port",
            "runtime-env-agent-port",
        )
        self._applications = f"{self.dashboard}/api/serve/applications/"
        flags = [f"--resources={offered.stdout.strip()}", "--node-ip-address=127.0.0.1", f"--port={port}"]
        flags += ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
        flags += [f"--{name}={free_port()}" for name in others]
        super().__init__(directory, _OF_MACHINE, [self.program("ray"), "start", "--head", "--block", *flags])

    def program(self, name: str) -> str:
        """A command of Ray, or headrace."""
        return str(self._programs / name)

    def serve(self, *args: str) -> str:
        """Run `serve ARGS` against the dashboard, and return its output. Runs it again while Serve's proxies start."""
        end_s = time.monotonic() + patience(LONG_S)
        while True:
            done = subprocess.run(
                [self.program("serve"), *args, "--address", self.dashboard],
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=patience(LONG_S),
                check=False,
            )
            said = done.stdout + done.stderr
            if done.returncode == 0:
                return done.stdout
            assert SLOW_PROXIES in said, said + self.logs()
            assert time.monotonic() < end_s, said + self.logs()

    def was_slow(self) -> bool:
        """Whether it has ended because its raylet did not start in time."""
        return self._process.poll() is not None and _SLOW_RAYLET in self.log.read_text()

    def is_up(self) -> bool:
        """Whether `serve` can talk to it."""
        assert self._process.poll() is None, self.log.read_text()
        try:
            return HTTP.get(self._applications).status_code == 200
        except httpx.HTTPError:
            return False

    def is_running(self) -> bool:
        """Whether the application runs: what `serve status` asks, without the seconds that each run of it takes."""
        answer = HTTP.get(self._applications)
        if answer.status_code != 200:
            return False
        state: str = answer.json()["applications"].get("headrace", {}).get("status", "")
        assert state not in ("DEPLOY_FAILED", "UNHEALTHY"), self.logs()
        return state == "RUNNING"


@contextmanager
def _started_head(programs: Path) -> Iterator[Head | None]:
    """A head that answers; None if it was too slow for Ray."""
    with tempfile.TemporaryDirectory(prefix="hr-", dir="/tmp", ignore_cleanup_errors=True) as made:
        running = Head(Path(made), programs)
        try:
            until(lambda: running.was_slow() or running.is_up(), "the head's dashboard answers", LONG_S)
            yield None if running.was_slow() else running
        finally:
            print(running.logs())
            running.end()


@contextmanager
def running_head(programs: Path = Path(sys.executable).parent) -> Iterator[Head]:
    """A head, ended with the block. `programs` is the folder with the commands of Ray and of headrace."""
    for _ in range(_STARTS):
        with _started_head(programs) as running:
            if running is not None:
                yield running
                return
    pytest.fail(f"none of {_STARTS} heads has started in the time that Ray gives them")
