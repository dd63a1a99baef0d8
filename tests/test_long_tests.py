"""Tests that run for long are named while they run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.long_tests import LongTests
from tests.patience import until


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def long_tests(said: list[str]) -> Iterator[LongTests]:
    plugin = LongTests(said.append, interval_s=0.01, long_s=0.05)
    plugin.pytest_sessionstart()
    yield plugin
    plugin.pytest_sessionfinish()


def test_a_test_that_runs_for_long_is_named_again_as_its_time_doubles(long_tests: LongTests, said: list[str]) -> None:
    long_tests.pytest_runtest_logstart("a.py::b")
    until(lambda: len(said) >= 3, "the test is named three times")
    assert all(line.startswith("still running after ") and line.endswith(" s: a.py::b") for line in said)


def test_a_test_that_has_ended_is_not_named(long_tests: LongTests, said: list[str]) -> None:
    long_tests.pytest_runtest_logstart("a.py::ended")
    long_tests.pytest_runtest_logfinish("a.py::ended")
    long_tests.pytest_runtest_logstart("a.py::runs")
    until(lambda: bool(said), "the other test is named")
    assert all(line.endswith("a.py::runs") for line in said)


def test_nothing_is_said_after_the_end(said: list[str]) -> None:
    plugin = LongTests(said.append, interval_s=0.01, long_s=0.0)
    plugin.pytest_sessionstart()
    plugin.pytest_sessionfinish()
    plugin.pytest_runtest_logstart("a.py::b")
    assert not plugin._thread.is_alive()
    assert said == []
