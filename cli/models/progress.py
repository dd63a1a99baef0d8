"""Progress of a long step, on standard error: a bar on a terminal, else a plain line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

_PLAIN_INTERVAL_S = 3.0


class Progress(Protocol):
    """Shows how far a transfer is. A context manager; all numbers are bytes."""

    def __enter__(self) -> Self:
        """Start the progress display."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the progress display."""

    def at(self, done: int, total: int | None) -> None:
        """Show the progress: `done` of `total` bytes. `total` may be unknown."""


class PlainProgress:
    """One line every few seconds, for logs."""

    def __init__(
        self, title: str, write: Callable[[str], object] | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._title = title
        self._write = write if write is not None else _write_line
        self._now_s = now_s
        self._last_s = now_s()
        self._last_done: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def at(self, done: int, total: int | None) -> None:
        """Write a line if the last one is old enough."""
        now_s = self._now_s()
        if self._last_done is None:
            self._last_done = done
        elapsed_s = now_s - self._last_s
        if elapsed_s < _PLAIN_INTERVAL_S:
            return
        rate = max(0, done - self._last_done) / elapsed_s / 1e6
        share = f" of {total / 1e6:.0f} MB ({100 * done // total} %)" if total else " MB"
        self._write(f"{self._title}: {done / 1e6:.0f}{share}, {rate:.1f} MB/s")
        self._last_s = now_s
        self._last_done = done


class BarProgress:
    """A bar with rate and time left, for terminals."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as RichProgress

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._progress = RichProgress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
        self._task = self._progress.add_task(title, total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def at(self, done: int, total: int | None) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=done, total=total)


def progress_for(title: str) -> Progress:
    """The kind of progress for standard error: a bar on a terminal, else lines."""
    return BarProgress(title) if sys.stderr.isatty() else PlainProgress(title)


def say(sentence: str) -> None:
    """Write a message to the user on standard error."""
    _write_line(sentence)


def _write_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
