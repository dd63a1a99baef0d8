"""The time that a test may take: pytest-timeout's, on this machine as it is."""

from __future__ import annotations

import signal
from collections.abc import Generator

import pytest
import pytest_timeout

from tests.patience import patience

# The exception of the first alarm is lost if it is raised in a callback of an event loop, which logs it and goes on.
_AGAIN_S = 5.0


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: pytest_timeout.Settings) -> bool:
    """Give a test the time that this machine needs for it, and interrupt it then until it ends."""
    bound_s = patience(settings.timeout)
    pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=bound_s))
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, bound_s, _AGAIN_S)
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a test that was interrupted between two lines. Its traceback has no line number there, over which pytest
    stumbles and ends all tests."""
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
