"""Says which tests have run for long while they run: a run that is ended from outside then tells what it waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

# A test is named when it has run for so long, and again each time that this has doubled.
_LONG_S = 120.0
_INTERVAL_S = 5.0


class LongTests:
    """Plugin of the process that reports: it looks at the tests of all processes from a thread of its own."""

    def __init__(self, say: Callable[[str], None], interval_s: float = _INTERVAL_S, long_s: float = _LONG_S) -> None:
        self._say = say
        self._interval_s = interval_s
        self._long_s = long_s
        self._lock = threading.Lock()
        # When each test that runs began, and when it is named next; in seconds.
        self._running: dict[str, tuple[float, float]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="long-tests", daemon=True)

    def pytest_sessionstart(self) -> None:
        """Begin to look."""
        self._thread.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note when a test begins."""
        now_s = time.monotonic()
        with self._lock:
            self._running[nodeid] = now_s, now_s + self._long_s

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Forget a test that has ended."""
        with self._lock:
            self._running.pop(nodeid, None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Say no more: what follows are the closing lines."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._interval_s):
            now_s = time.monotonic()
            for nodeid, began_s in self._due(now_s):
                self._say(f"still running after {now_s - began_s:.0f} s: {nodeid}")

    def _due(self, now_s: float) -> list[tuple[str, float]]:
        with self._lock:
            due = [(nodeid, began_s) for nodeid, (began_s, named_s) in self._running.items() if now_s >= named_s]
            for nodeid, began_s in due:
                self._running[nodeid] = began_s, now_s + (now_s - began_s)
        return due


def pytest_configure(config: pytest.Config) -> None:
    """Watch in the process that reports, if it runs others: alone, it shows each test's file as it runs it."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        return

    def say(line: str) -> None:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(line)

    config.pluginmanager.register(LongTests(say))
