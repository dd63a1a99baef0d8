"""Shows the progress of a run on standard error: live figures on a terminal, otherwise a line from time to time."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Coroutine
from typing import Any

from headrace.bench.load import Progress

_LIVE_S = 1.0
_FIRST_S = 2.0
_PLAIN_S = 10.0


class Display:
    """Shows the progress of a load. It draws once a second, because the client draws in the
    thread in which it also reads answers."""

    def __init__(self, progress: Progress, title: str, is_shown: bool) -> None:
        self._progress = progress
        self._title = title
        self._is_shown = is_shown
        self._last = (time.monotonic(), 0, 0)

    def shown(self) -> Coroutine[Any, Any, None] | None:
        """The coroutine that shows the progress while it runs; None if nothing is shown."""
        if not self._is_shown:
            return None
        return self._live() if sys.stderr.isatty() else self._plain()

    async def _live(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
        bar = Bar(*columns, TextColumn("{task.fields[figures]}"), console=Console(stderr=True), auto_refresh=False)
        task = bar.add_task(self._title, total=self._progress.total, figures="")
        with bar:
            try:
                while True:
                    await asyncio.sleep(_LIVE_S)
                    figures = self._figures()
                    bar.update(task, completed=self._progress.done, total=self._progress.total, figures=figures)
                    bar.refresh()
            finally:
                bar.update(task, completed=self._progress.done, total=self._progress.total)
                bar.refresh()

    async def _plain(self) -> None:
        wait_s = _FIRST_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = _PLAIN_S
            done = f"{self._progress.done} of {self._progress.total} requests"
            print(f"{self._title}: {done}, {self._figures()}", file=sys.stderr, flush=True)

    def _figures(self) -> str:
        progress = self._progress
        now_s = time.monotonic()
        before_s, tokens, done = self._last
        elapsed_s = max(now_s - before_s, 1e-9)
        now_tokens = progress.tokens
        self._last = (now_s, now_tokens, progress.done)
        words = [
            f"{progress.sent - progress.done} in flight",
            f"{(progress.done - done) / elapsed_s:.1f} req/s",
            f"{max(now_tokens - tokens, 0) / elapsed_s:.0f} tok/s",
        ]
        for name, values in (("TTFT", progress.ttfts_s), ("ITL", progress.gaps_s)):
            words += [f"{name} {1000 * statistics.median(values):.0f} ms"] if values else []
        words += [f"{progress.failed} failed"] if progress.failed else []
        words += [f"{progress.late} late"] if progress.late else []
        return ", ".join(words)
