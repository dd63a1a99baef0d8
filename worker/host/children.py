"""Ends what this process has started."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from headrace.common.kernel_files import ROOT


def end_children() -> None:
    """Kill all processes that this one has started, and wait for them: the program that it becomes next would not.
    Processes that stand still end too."""
    for pid in list(_children()):
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _children() -> Iterator[int]:
    for place in (ROOT / "proc").glob("[0-9]*"):
        # A process that has ended in the meantime has no such file.
        with contextlib.suppress(OSError):
            if _parent_of(place) == os.getpid():
                yield int(place.name)


def _parent_of(place: Path) -> int:
    # The name of the program, in parentheses, may have any characters.
    return int((place / "stat").read_text().rpartition(")")[2].split()[1])
