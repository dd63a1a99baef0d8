"""What a process of `pytest -n` that died left behind, in the report of the test that it ran.

A fault writes the stacks of all threads to a file of the process. A process that was killed cannot write; the signal,
its memory and what the kernel says of memory then tell why.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import Any, TextIO

import pytest

# The file of this process for stacks, where there is another process to read it.
STACKS = pytest.StashKey[TextIO]()
_FOLDER = "last_words"
_MOST_CHARACTERS = 20_000


class LastWords:
    """Plugin of the processes that run tests: they write where the first process looks."""

    def __init__(self, folder: Path) -> None:
        name = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self._memory = folder / f"{name}.memory"
        self._stacks = (folder / f"{name}.stacks").open("w")

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Write the stacks of a fault where the first process looks, which pytest writes to standard error."""
        session.config.stash[STACKS] = self._stacks
        faulthandler.enable(self._stacks)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note the memory before each test."""
        self._memory.write_text(f"before {nodeid} it had {_status('VmRSS')}, at most {_status('VmHWM')}")


class Ends:
    """Plugin of the first process: says how the others ended."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="headrace-tests-")
        self._folder = Path(self._directory.name)
        self._oom_kills = oom_kills()

    def pytest_configure_node(self, node: Any) -> None:
        """Tell a new process where it may write."""
        node.workerinput[_FOLDER] = str(self._folder)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: pytest.TestReport) -> None:
        """Add how the process ended to the report of the test that it ran."""
        gateway = report.node.gateway  # type: ignore[attr-defined]
        report.longrepr = f"{report.longrepr}\n{self.describe(gateway.id, _exit_status(gateway))}"

    def pytest_unconfigure(self) -> None:
        """Leave nothing behind."""
        self._directory.cleanup()

    def describe(self, name: str, status: int | None) -> str:
        """The end of the process, in lines."""
        said = [ending(status), *self._read(f"{name}.memory")]
        if killed := oom_kills() - self._oom_kills:
            said.append(f"the kernel killed {killed} processes for want of memory since these tests began")
        said.append(f"now {_available()} of the machine's memory are available")
        return "\n".join([*said, *self._read(f"{name}.stacks")])

    def _read(self, name: str) -> list[str]:
        with contextlib.suppress(OSError):
            if text := (self._folder / name).read_text():
                return [text[:_MOST_CHARACTERS]]
        return []


def pytest_configure(config: pytest.Config) -> None:
    """Register what this process needs of the two."""
    folder = getattr(config, "workerinput", {}).get(_FOLDER)
    if folder is not None:
        config.pluginmanager.register(LastWords(Path(folder)))
    elif not hasattr(config, "workerinput"):
        config.pluginmanager.register(Ends())


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory, on the machine and in this control group."""
    found = 0
    for path in (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events")):
        with contextlib.suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE):
                found = max(found, int(match[1]))
    return found


def _exit_status(gateway: Any) -> int | None:
    """The status of an execnet gateway's process as of Popen; None if it is not known."""
    try:
        status: int = gateway._io.popen.wait(timeout=10)
    except Exception:
        return None
    return status


def ending(status: int | None) -> str:
    """How a process with this status, as of Popen, ended."""
    if status is None:
        return "the process has closed its connection; how it ended is not known"
    if status >= 0:
        return f"the process ended itself with status {status}"
    return f"the process was ended by {signal.Signals(-status).name}"


def _status(field: str) -> str:
    match = re.search(rf"^{field}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return f"{int(match[1]) // 1024} MiB" if match else "unknown memory"


def _available() -> str:
    match = re.search(r"^MemAvailable:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return f"{int(match[1]) // 1024} MiB" if match else "an unknown part"
