"""The time that a test may take: pytest-timeout's, on this machine as it is.

An alarm does not interrupt native code. A process that stays in it is ended a minute later, with the stacks of its
threads.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Generator

import pytest
import pytest_timeout

from tests.last_words import STACKS
from tests.patience import patience

# A busy machine gets more time, but one test that hangs must not cost the run its own limit.
_MOST_S = 900.0
# The exception of the first alarm is lost if it is raised in a callback of an event loop, which logs it and goes on.
_AGAIN_S = 5.0
# After the first alarm, for a test that ends when its native code returns.
_NATIVE_S = 60.0


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool:
    """Give a test the time that this machine needs for it, and interrupt it then until it ends."""
    bound_s = max(settings.timeout, min(patience(settings.timeout), _MOST_S))
    if settings.timeout:
        file = item.config.stash.get(STACKS, sys.__stderr__)
        faulthandler.dump_traceback_later(bound_s + _NATIVE_S, exit=True, file=file)  # type: ignore[arg-type]
    pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=bound_s))
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, bound_s, _AGAIN_S)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    """Let the process live on: its test has ended."""
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a test that was interrupted between two lines. Its traceback has no line number there, over which pytest
    stumbles and ends all tests. An alarm that strikes the report would do the same, so none does."""
    alarm = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        return (yield)
    except TypeError:
        if call.excinfo is None:
            raise
        return pytest.TestReport(
            item.nodeid,
            item.location,
            dict.fromkeys(item.keywords, 1),
            "failed",
            f"interrupted between two lines: {call.excinfo.value!r}",
            call.when,
            duration=call.duration,
            start=call.start,
            stop=call.stop,
        )
    finally:
        signal.setitimer(signal.ITIMER_REAL, *alarm)
