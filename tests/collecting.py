"""Processes of a run collect tests in different orders, and end with the same one.

The first process to import a test file rewrites its assertions, which takes more than half of the time of collecting in
a new clone, and keeps what it wrote for the others. If all began with the same file, each would rewrite every file.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest


class FromElsewhere:
    """Plugin of one of `count` processes: it begins in each folder at its own place, and then puts tests in the order
    of their files."""

    def __init__(self, number: int, count: int) -> None:
        self._number = number
        self._count = count

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Turn what a folder has."""
        report = yield
        if isinstance(collector, pytest.Directory) and report.result:
            first = len(report.result) * self._number // self._count
            report.result = [*report.result[first:], *report.result[:first]]
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put tests in the order of their files. All of a file are in the order in which they were collected."""
        items.sort(key=lambda item: item.path.parts)


def pytest_configure(config: pytest.Config) -> None:
    """Begin elsewhere than the others, if there are others."""
    if (told := getattr(config, "workerinput", None)) is not None:
        number = int(told["workerid"].removeprefix("gw"))
        config.pluginmanager.register(FromElsewhere(number, told["workercount"]))
