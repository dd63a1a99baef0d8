"""Progress of long steps, on standard error. A terminal shows a bar, or the stage with its time. Elsewhere there is a
plain line every few seconds of a transfer, and one after 10, 20, 40 seconds and so on of a stage.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self

from headrace.common.commands import duration

_PLAIN_INTERVAL_S = 3.0
_FIRST_REMINDER_S = 10.0
_TICK_S = 1.0
# Stages that took less are not told on a terminal.
_WORTH_TELLING_S = 1.0


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
        rate = max(0, done - self._last_done) / elapsed_s
        share = f" of {total / 1e6:.0f} MB ({100 * done // total} %)" if total else " MB"
        left = f", {duration((total - done) / rate)} left" if total and rate and done < total else ""
        self._write(f"{self._title}: {done / 1e6:.0f}{share}, {rate / 1e6:.1f} MB/s{left}")
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


class PlainStages:
    """A line for a stage that lasts long, and again each time that it has lasted twice as long."""

    def __init__(
        self, title: str, write: Callable[[str], object] | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._title = title
        self._write = write if write is not None else _write_line
        self._now_s = now_s
        self._stage = ""
        self._since_s = now_s()
        self._next_s = _FIRST_REMINDER_S

    def at(self, stage: str) -> None:
        """Begin a stage."""
        self._stage, self._since_s, self._next_s = stage, self._now_s(), _FIRST_REMINDER_S

    def tick(self) -> None:
        """Write a line if it is time."""
        lasts_s = self._now_s() - self._since_s
        if self._stage and lasts_s >= self._next_s:
            self._write(f"{self._title}: still {self._stage}, {duration(lasts_s)} so far")
            while self._next_s <= lasts_s:
                self._next_s *= 2

    def end(self) -> None:
        """End the last stage."""
        self._stage = ""


class LiveStages:
    """The stage and its time in one line of a terminal. What took long stays there with its time."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import Progress as RichProgress
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

        self._title = title
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        self._progress = RichProgress(*columns, console=Console(stderr=True, highlight=False), transient=True)
        self._task = self._progress.add_task(title, total=None)
        self._stage = ""
        self._since_s = time.monotonic()
        self._progress.start()

    def at(self, stage: str) -> None:
        """Begin a stage."""
        self._tell()
        self._stage, self._since_s = stage, time.monotonic()
        self._progress.reset(self._task, description=f"{self._title}: {stage}")

    def tick(self) -> None:
        """Do nothing: rich redraws by itself."""

    def end(self) -> None:
        """End the last stage."""
        self._tell()
        self._progress.stop()

    def _tell(self) -> None:
        took_s = time.monotonic() - self._since_s
        if self._stage and took_s >= _WORTH_TELLING_S:
            text = f"{self._title}: {self._stage} took {duration(took_s)}"
            self._progress.console.print(text, markup=False, soft_wrap=True)
        self._stage = ""


@contextmanager
def stages(title: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done, and for how long. Yields a function that begins a stage, such as "converting"."""
    shown: LiveStages | PlainStages = LiveStages(title) if sys.stderr.isatty() else PlainStages(title)
    over = threading.Event()

    def tick() -> None:
        while not over.wait(_TICK_S):
            shown.tick()

    thread = threading.Thread(target=tick, name="stages", daemon=True)
    thread.start()
    try:
        yield shown.at
    finally:
        over.set()
        thread.join()
        shown.end()


def say(sentence: str) -> None:
    """Write a message to the user on standard error."""
    _write_line(sentence)


def _write_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
