"""A `headrace serve` that is started to be measured, and what the kernel says of its processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from headrace.bench.process_tree import descendants
from headrace.common import launch

_STOP_S = 20.0
_KEPT_LINES = 1000


class ServingError(Exception):
    """The server did not start. The message says why."""


class Serving:
    """Runs `headrace serve` with these flags; an asynchronous context. `environment` is added to this process's."""

    def __init__(self, flags: Sequence[str], environment: Mapping[str, str]) -> None:
        self._argv = launch.with_parent([sys.executable, "-m", "headrace.cli", "serve", *flags])
        self._environment = {**os.environ, **environment}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.url = ""
        """Its base URL, without /v1."""

    async def __aenter__(self) -> Serving:
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self._reading = asyncio.create_task(self._read())
        try:
            while line := (await self._process.stdout.readline()).decode(errors="replace"):
                if line.startswith("ready: "):
                    self.url = line.removeprefix("ready: ").strip().removesuffix("/v1")
                    return self
        except BaseException:
            await self._stop()
            raise
        await self._process.wait()
        await self._reading
        errors = [line for line in self._lines if line.startswith("error: ")]
        said = (errors or list(self._lines) or ["error: it said nothing"])[-1]
        raise ServingError(f"the server did not start: {said.removeprefix('error: ')}")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _stop(self) -> None:
        assert self._process is not None
        assert self._reading is not None
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            self._lines.append(line.decode(errors="replace").strip())

    def logged(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The first of the latest lines of its log that has this pattern."""
        return next((match for line in self._lines if (match := pattern.search(line))), None)

    def cpu_s(self, roles: Sequence[str]) -> float:
        """CPU seconds that its processes of these roles have used so far."""
        assert self._process is not None
        modules = tuple(f"headrace.{role}" for role in roles)
        return sum(
            process.cpu_s
            for process in descendants(self._process.pid)
            if process.parent == self._process.pid and any(module in _arguments(process.pid) for module in modules)
        )


def _arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # it has ended
        return []


class WorkerSize(NamedTuple):
    """The threads of a worker, in each of the ranks among which it divides its model."""

    threads: int
    ranks: int = 1


async def sizes_of_workers(flags: Sequence[str]) -> list[WorkerSize]:
    """The workers that `headrace serve` would start. Raises ServingError."""
    argv = [sys.executable, "-m", "headrace.cli", "serve", *flags, "--dry-run"]
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL
    )
    out, err = await process.communicate()
    if process.returncode:
        raise ServingError(err.decode(errors="replace").strip().removeprefix("error: "))
    return sizes_in(out.decode())


def sizes_in(plan: str) -> list[WorkerSize]:
    """The workers of which `headrace serve --dry-run` tells."""
    found = re.findall(r"computes with (\d+)(?: in each of (\d+) ranks)?", plan)
    return [WorkerSize(int(threads), int(ranks or 1)) for threads, ranks in found]
