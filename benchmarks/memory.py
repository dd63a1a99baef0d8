"""The resident memory of a process, by its kind."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Memory(NamedTuple):
    """Bytes of a process: private ones, those shared with other processes, and pages of files, which the kernel can
    drop."""

    private: int
    shared: int
    of_files: int


def memory_of(pid: int) -> Memory:
    """The resident memory of a process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Memory(*(int(fields[key].split()[0]) * 1024 for key in ("RssAnon", "RssShmem", "RssFile")))
