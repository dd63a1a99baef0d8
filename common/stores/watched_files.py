"""Detects changes of files while a process runs, such as certificates and keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

LOOK_S = 1.0

Stamp: TypeAlias = tuple[int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """The values that show a change of a file: time in ns, inode and size; None if the file cannot be read.

    Links, as in mounted secrets, are followed.
    """
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_ino, found.st_size
    return None


class WatchedFiles:
    """Tells whether any of some files has changed. Checks them at most once in `LOOK_S`."""

    def __init__(self, paths: Iterable[Path], clock: Callable[[], float]) -> None:
        """`clock` gives seconds. Changes from now on count, so create this object before you read the files."""
        self._paths = tuple(paths)
        self._clock = clock
        self._looked_at_s = clock()
        self._stamps = self._look()

    @property
    def is_due(self) -> bool:
        """Whether `changed` would check the files now."""
        return self._clock() - self._looked_at_s >= LOOK_S

    def changed(self) -> bool:
        """Whether the files have changed since the last check. False if that was within `LOOK_S`."""
        if not self.is_due:
            return False
        self._looked_at_s = self._clock()
        before, self._stamps = self._stamps, self._look()
        return self._stamps != before

    def _look(self) -> tuple[Stamp | None, ...]:
        return tuple(map(stamp_of, self._paths))
