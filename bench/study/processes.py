"""A server as a process of its own: started, awaited, watched, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.connection import Client, ExchangeError
from headrace.bench.process_tree import TICKS_PER_S, Process, descendants, process_of
from headrace.bench.target import target_of

_POLL_S = 0.1
_STOP_S = 20.0
_LOG_LINES = 12
_CALL_S = 5.0


class ServerError(Exception):
    """A server that does not start; the message says why."""


@dataclass(frozen=True, slots=True)
class Command:
    """How a server is started. `environment` is added to that of this process."""

    argv: Sequence[str]
    environment: Mapping[str, str]


class Server:
    """A process that serves at `url`, with all its descendants."""

    def __init__(self, name: str, url: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.name = name
        self.url = url
        self._process = process
        self._log_path = log_path

    async def ready(self, timeout_s: float) -> None:
        """Wait until it lists its models. Raises ServerError."""
        client = Client(target_of(self.url, {}, None, False), _CALL_S)
        deadline_s = time.monotonic() + timeout_s
        try:
            while True:
                self.check()
                try:
                    status, _ = await client.call("GET", "/v1/models")
                except ExchangeError:
                    status = 0
                if status == 200:
                    return
                if time.monotonic() > deadline_s:
                    raise ServerError(f"{self.name} was not ready after {timeout_s:.0f} s{self._log_end()}")
                await asyncio.sleep(_POLL_S)
        finally:
            client.close()

    def check(self) -> None:
        """Raises ServerError if the process has ended."""
        status = self._process.poll()
        if status is not None:
            raise ServerError(f"{self.name} ended with status {status}{self._log_end()}")

    def cpu_s(self) -> float:
        """CPU time of all its processes so far, in seconds."""
        return sum(process.cpu_s for process in descendants(self._process.pid))

    def memory_bytes(self) -> int:
        """Memory of all its processes now; what they share counts once."""
        return sum(_pss_bytes(process.pid) for process in descendants(self._process.pid))

    async def stop(self) -> None:
        """Ask it to end, and end it if it does not."""
        await asyncio.to_thread(end, self._process.pid, self._process.wait)

    def _log_end(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        shown = "".join(f"\n    {line[:300]}" for line in lines)
        return f"; the last lines of {self._log_path}:{shown}" if lines else f" and wrote nothing; see {self._log_path}"


@contextlib.asynccontextmanager
async def started(name: str, command: Command, port: int, log_path: Path, timeout_s: float) -> AsyncIterator[Server]:
    """The server, ready. It is stopped at the end. Raises ServerError."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    left = log_path.parent / "server.pid"
    end_left_over(left)
    process = _start(name, command, log_path)
    left.write_text(f"{process.pid} {_began(process.pid)}")
    server = Server(name, f"http://127.0.0.1:{port}", process, log_path)
    try:
        await server.ready(timeout_s)
        yield server
    finally:
        await asyncio.shield(server.stop())
        left.unlink(missing_ok=True)


def _start(name: str, command: Command, log_path: Path) -> subprocess.Popen[bytes]:
    with log_path.open("wb") as log:
        try:
            return subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **command.environment},
                # A Ctrl-C in the terminal is for the study, which then stops its server.
                start_new_session=True,
            )
        except OSError as error:
            raise ServerError(f"{name}: cannot start {command.argv[0]}: {error.strerror}") from None


def end_left_over(file: Path) -> None:
    """End the server that a killed study left running; `file` identifies its process."""
    try:
        pid, began = map(int, file.read_text().split())
    except (OSError, ValueError):
        return
    if _began(pid) == began:
        end(pid, lambda timeout_s: _wait_for_end(pid, began, timeout_s))
    file.unlink(missing_ok=True)


def end(pid: int, wait: Callable[[float], object]) -> None:
    """Ask a process to end, and end it if it does not, and then what is left of its descendants. `wait` raises
    TimeoutExpired."""
    own, *others = descendants(pid) or [Process(pid, 0, 0.0, 0)]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    try:
        wait(_STOP_S)
    except subprocess.TimeoutExpired:
        _kill(own)
        wait(_STOP_S)
    for process in others:
        _kill(process)


def _kill(process: Process) -> None:
    """Kill a process, unless its pid belongs to another process by now."""
    if _began(process.pid) == process.began:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _wait_for_end(pid: int, began: int, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while _began(pid) == began:
        if time.monotonic() > deadline_s:
            raise subprocess.TimeoutExpired(str(pid), timeout_s)
        time.sleep(_POLL_S)


def _began(pid: int) -> int:
    """When a process began, in ticks; 0 if there is none."""
    process = process_of(Path(f"/proc/{pid}"))
    return process.began if process else 0


def _pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def busy_s() -> float:
    """CPU time that all processes of this host have taken since it started, in seconds."""
    user, nice, system, _, _, irq, soft_irq = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8])
    return (user + nice + system + irq + soft_irq) / TICKS_PER_S
