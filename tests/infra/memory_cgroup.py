"""A separate memory cgroup for tests, v1 or v2, depending on this machine."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.patience import patience

_ROOT = Path("/sys/fs/cgroup")
_EMPTY_BOUND_S = 10.0


class MemoryCgroup:
    """A directory of the memory controller."""

    def __init__(self, directory: Path, *, is_v2: bool) -> None:
        self._directory = directory
        self._is_v2 = is_v2

    @property
    def procs(self) -> Path:
        """The file that takes the pid of a process to be moved here."""
        return self._directory / "cgroup.procs"

    def limit(self, num_bytes: int) -> None:
        """Set the limit. What processes had before they were moved here does not count."""
        (self._directory / ("memory.max" if self._is_v2 else "memory.limit_in_bytes")).write_text(str(num_bytes))

    @property
    def allocated_bytes(self) -> int:
        """Memory that the processes here have allocated, shared memory included, without files."""
        found = dict(line.split() for line in (self._directory / "memory.stat").read_text().splitlines())
        return sum(int(found[name]) for name in (("anon", "shmem") if self._is_v2 else ("total_rss", "total_shmem")))

    @property
    def num_oom_kills(self) -> int:
        """Processes that the kernel has killed here for want of memory."""
        text = (self._directory / ("memory.events" if self._is_v2 else "memory.oom_control")).read_text()
        found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        assert found is not None, text
        return int(found[1])


@contextmanager
def memory_cgroup() -> Iterator[MemoryCgroup]:
    """An empty cgroup. At the end, its processes are killed and it is removed. Skips if no cgroup can be created."""
    v1 = _ROOT / "memory"
    is_v2 = (_ROOT / "cgroup.controllers").exists()
    directory = (_ROOT if is_v2 else v1) / f"headrace-test-{os.getpid()}"
    try:
        if is_v2:
            (_ROOT / "cgroup.subtree_control").write_text("+memory")
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield MemoryCgroup(directory, is_v2=is_v2)
    finally:
        deadline_s = time.monotonic() + patience(_EMPTY_BOUND_S)
        while (directory / "cgroup.procs").read_text() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        directory.rmdir()
