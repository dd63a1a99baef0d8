"""The time that a test may take: pytest-timeout's, on this machine as it is."""

from __future__ import annotations

import signal

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
