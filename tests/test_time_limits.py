"""A test that hangs ends, wherever its alarm strikes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import time_limits
from tests.inner_pytest import failed_run
from tests.time_limits import pytest_runtest_makereport, pytest_timeout_set_timer

_HANGS = """
import asyncio


def test_it():
    lost = []

    def busy():
        while not lost:
            pass

    async def hang():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: lost.append(type(context["exception"]).__name__))
        loop.call_soon(busy)
        try:
            await asyncio.Event().wait()
        finally:
            print("the loop has swallowed", *lost)

    asyncio.run(hang())
"""


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The limits that were set, with pytest-timeout's own timer replaced; the test's own timer is there afterwards."""
    found: list[float] = []
    own = signal.getitimer(signal.ITIMER_REAL)
    monkeypatch.setattr(
        time_limits.pytest_timeout, "pytest_timeout_set_timer", lambda _, values: found.append(values.timeout)
    )
    monkeypatch.setattr(time_limits, "patience", lambda seconds: 3 * seconds)
    yield found
    signal.setitimer(signal.ITIMER_REAL, *own)


class Item:
    """A test, as far as its limit is concerned."""

    config = SimpleNamespace(stash=pytest.Stash())


def settings(timeout: float) -> Any:
    values = SimpleNamespace(timeout=timeout)
    values._replace = lambda **changed: SimpleNamespace(**changed)
    return values


def test_a_limit_follows_the_machine(limits: list[float]) -> None:
    assert pytest_timeout_set_timer(Item(), settings(60.0))  # type: ignore[arg-type]
    assert limits == [180.0]
    assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(180.0, abs=5)


def test_a_limit_does_not_grow_without_end(limits: list[float]) -> None:
    assert pytest_timeout_set_timer(Item(), settings(600.0))  # type: ignore[arg-type]
    assert pytest_timeout_set_timer(Item(), settings(1200.0))  # type: ignore[arg-type]
    assert limits == [900.0, 1200.0]


def test_an_alarm_that_an_event_loop_swallowed_comes_again(tmp_path: Path) -> None:
    """In a process of its own: alarms that come again and again strike what follows, too."""
    (tmp_path / "test_hanging.py").write_text(_HANGS)
    (tmp_path / "conftest.py").write_text("from tests import time_limits\n\ntime_limits._AGAIN_S = 0.05\n")
    printed = failed_run(tmp_path, "-n", "0", "--timeout", "0.5")
    assert "the loop has swallowed Failed" in printed
    assert "1 failed" in printed


def test_an_interruption_between_two_lines_is_a_failure_of_its_test_alone() -> None:
    """pytest cannot show a traceback without a line number, and would end all tests."""
    call = pytest.CallInfo.from_call(lambda: pytest.fail("too long"), "call")
    item = SimpleNamespace(nodeid="a.py::b", location=("a.py", 1, "b"), keywords={})
    hook = pytest_runtest_makereport(item, call)  # type: ignore[arg-type]
    next(hook)
    with pytest.raises(StopIteration) as ended:
        hook.throw(TypeError("unsupported operand type(s) for -: 'NoneType' and 'int'"))
    report = ended.value.value
    assert (report.nodeid, report.outcome, report.when) == ("a.py::b", "failed", "call")
    assert "too long" in str(report.longrepr)
