"""Detects a process that has work but makes no progress, by what the kernel counts.

Loading a model takes seconds to hours, so no time limit fits. But a process that loads computes, or reads or writes
files. One that does neither for long waits for something that does not come: a file system that is gone, a lock, a
signal to continue.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from headrace.common.kernel_files import ROOT, read_text

# A process gets on if it computes for this share of the bound. Threads that wait take some time too: timers, pings.
_SHARE = 0.01
_LOOKS = 8
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Work(NamedTuple):
    """What a process has done so far: seconds of CPUs; pages that came from files, and bytes from and to files."""

    cpu_s: float
    of_files: int


def work_of(pid: int, root: Path = ROOT) -> Work:
    """The work that a process and its descendants have done so far, with all their threads; zeros if it has ended."""
    children = " ".join(map(read_text, root.glob(f"proc/{pid}/task/[0-9]*/children"))).split()
    done = [_own_work_of(each, root) for each in (pid, *map(int, children))]
    return Work(sum(work.cpu_s for work in done), sum(work.of_files for work in done))


def _own_work_of(pid: int, root: Path) -> Work:
    # The name in field 2 of stat may contain anything, so count from its end: fields 12, 14 and 15 (proc(5)).
    fields = read_text(root / f"proc/{pid}/stat").rpartition(")")[2].split()
    if not fields:
        return Work(0.0, 0)
    faults, ticks = int(fields[9]), int(fields[11]) + int(fields[12])
    lines = read_text(root / f"proc/{pid}/io").splitlines()
    of_files = sum(int(line.split()[1]) for line in lines if line.startswith(("read_bytes:", "write_bytes:")))
    return Work(ticks / _TICKS_PER_S, faults + of_files)


class Progress:
    """Detects that a process makes no progress for `bound_s` seconds. Call `begin` when it gets work, and then
    `is_lost` repeatedly. Time in which nobody called `is_lost` counts little, because the caller may have been
    suspended as well."""

    def __init__(
        self,
        pid: int,
        bound_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        work: Callable[[int], Work] = work_of,
    ) -> None:
        self.bound_s = bound_s
        self.every_s = bound_s / _LOOKS
        """How often it is worth while to ask."""
        self._pid, self._clock, self._work = pid, clock, work
        self.begin()

    def begin(self) -> None:
        """Start measuring, because work begins now."""
        self._still_s, self._looked_s = 0.0, self._clock()
        self._done = self._work(self._pid)

    def is_lost(self) -> bool:
        """Whether the process has made no progress for `bound_s` seconds."""
        now_s = self._clock()
        passed_s = now_s - self._looked_s
        if passed_s < self.every_s:
            return False
        self._looked_s = now_s
        done = self._work(self._pid)
        if done.cpu_s - self._done.cpu_s >= _SHARE * self.bound_s or done.of_files != self._done.of_files:
            self._still_s, self._done = 0.0, done
            return False
        self._still_s += min(passed_s, 2 * self.every_s)
        return self._still_s >= self.bound_s

    def __str__(self) -> str:
        return f"it has neither computed nor read or written files for {self.bound_s:g} s"
