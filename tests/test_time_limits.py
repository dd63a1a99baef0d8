"""A test that hangs ends, wherever its alarm strikes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests import time_limits
from tests.time_limits import pytest_runtest_makereport, pytest_timeout_set_timer


class Overdue(BaseException):
    """What the alarm raises here."""


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The limits that were set, with pytest-timeout's own timer replaced; the test's own timer is there afterwards."""
    found: list[float] = []
    own_s, again_s = signal.getitimer(signal.ITIMER_REAL)
    own_handler = signal.getsignal(signal.SIGALRM)

    def set_timer(item: Any, settings: Any) -> None:
        def ring(*_: Any) -> None:
            raise Overdue

        found.append(settings.timeout)
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, settings.timeout)

    monkeypatch.setattr(time_limits.pytest_timeout, "pytest_timeout_set_timer", set_timer)
    monkeypatch.setattr(time_limits, "patience", lambda seconds: 3 * seconds)
    monkeypatch.setattr(time_limits, "_AGAIN_S", 0.05)
    yield found
    signal.signal(signal.SIGALRM, own_handler)
    signal.setitimer(signal.ITIMER_REAL, own_s, again_s)


def settings(timeout: float) -> Any:
    values = SimpleNamespace(timeout=timeout)
    values._replace = lambda **changed: SimpleNamespace(**changed)
    return values


def test_a_limit_follows_the_machine(limits: list[float]) -> None:
    assert pytest_timeout_set_timer(None, settings(60.0))  # type: ignore[arg-type]
    assert limits == [180.0]
    assert signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(180.0, abs=5)


def test_an_alarm_that_an_event_loop_swallowed_comes_again(limits: list[float]) -> None:
    lost: list[Any] = []

    async def hang() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: lost.append(context["exception"]))

        def busy() -> None:
            while not lost:
                pass

        pytest_timeout_set_timer(None, settings(0.02))  # type: ignore[arg-type]
        loop.call_soon(busy)
        await asyncio.Event().wait()

    # The loop of pytest-asyncio's tests. An exception out of a signal handler ends a process in which uvloop runs.
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner, pytest.raises(Overdue):
        runner.run(hang())
    assert [type(error) for error in lost] == [Overdue]


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
