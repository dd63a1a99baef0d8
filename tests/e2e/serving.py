"""`headrace serve` as a real process, for tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx

MODEL = "smollm2-135m"
READY_BOUND_S = 60.0
BOUND_S = 30.0
_TAIL_LINES = 60
_HEADRACE = (sys.executable, "-m", "headrace.cli")


def headrace(*args: str, stdin: str = "", timeout_s: float = BOUND_S) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*_HEADRACE, *args], input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def until(condition: Callable[[], bool], what: str, bound_s: float = BOUND_S) -> None:
    """Wait for something that happens in other processes."""
    deadline_s = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {bound_s:.0f} s: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process with this pid runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Serve:
    """A running `headrace serve` with its output. Call `end` in any case."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [*_HEADRACE, "serve", *args],
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

    def status(self) -> list[dict[str, Any]]:
        """Rows of `headrace status --json` for this serve."""
        rows = json.loads(headrace("status", "--json").stdout)
        return [row for row in rows if row["serve_pid"] == self.pid]

    def process_of(self, name: str) -> dict[str, Any]:
        """The row of one process."""
        return next(row for row in self.status() if row["name"] == name)

    def is_ready(self) -> bool:
        """Whether requests can be answered now."""
        try:
            return httpx.get(f"{self.base_url}/health/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels, from /metrics."""
        text = httpx.get(f"{self.base_url}/metrics").text
        found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        assert found, f"/metrics has no {name}"
        return sum(map(float, found))

    def wait(self, bound_s: float = BOUND_S) -> int:
        """Wait for the end of the process and its output. Returns the exit status."""
        status = self.process.wait(bound_s)
        for reader in self._readers:
            reader.join(BOUND_S)
        return status

    def tail(self) -> str:
        """The last lines of the logs."""
        return "\n".join(self.logs[-_TAIL_LINES:])

    def end(self) -> None:
        """Stop it, by force if need be."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(BOUND_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def _reader(self, stream: IO[str], lines: list[str]) -> threading.Thread:
        def read() -> None:
            # Line by line: others look at the list while it grows.
            while line := stream.readline():
                lines.append(line.rstrip("\n"))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread


@contextmanager
def serving(*args: str, model: Path | None = None) -> Iterator[Serve]:
    """A model under the name of the demo model, ready on a free port: the demo model itself, pulled first if the cache
    does not have it, or the one in the directory `model`."""
    pulled = headrace("pull", MODEL, timeout_s=600)
    assert pulled.returncode == 0, pulled.stderr
    named = [MODEL] if model is None else [str(model), "--name", MODEL]
    serve = Serve(*named, "--port", "0", "--kv-cache-gb", "0.5", *args)
    try:
        serve.until_ready()
        yield serve
    finally:
        serve.end()
