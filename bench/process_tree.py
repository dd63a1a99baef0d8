"""Reads facts about processes from the kernel: their descendants, the CPU time of each, and the load of the host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


_BUSY_LOAD = 0.5


def busy_host() -> str:
    """That other programs keep this host busy, for a command that is about to measure it; empty if they do not."""
    load = os.getloadavg()[0]
    return f"this host is busy (load {load:.1f})" if load > _BUSY_LOAD else ""


class Process(NamedTuple):
    """A process: CPU seconds with those of its ended children, and when it began, in ticks since the host's start."""

    pid: int
    parent: int
    cpu_s: float
    began: int


def descendants(pid: int) -> list[Process]:
    """A process, the processes that it started, and so on."""
    processes = [process for directory in Path("/proc").glob("[0-9]*") if (process := process_of(directory))]
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found = [process for process in processes if process.pid == pid]
    for process in found:
        found += children.get(process.pid, [])
    return found


def process_of(directory: Path) -> Process | None:
    """The process of a directory in /proc; None if it has ended."""
    try:
        fields = _fields(directory)
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    return Process(int(directory.name), int(fields[1]), sum(map(int, fields[11:15])) / TICKS_PER_S, int(fields[19]))


def cpu_s(pid: int) -> float:
    """User and system time of a process, all threads and no children, in seconds. Raises OSError if it has ended."""
    fields = _fields(Path(f"/proc/{pid}"))
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _fields(directory: Path) -> list[str]:
    """The fields of `stat` after the name of the program, from the state on. Raises OSError if it has ended."""
    return (directory / "stat").read_text().rpartition(")")[2].split()
