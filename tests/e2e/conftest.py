"""One running system for the tests of a module; when a test fails, its report shows the end of the logs."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.e2e.serving import Serve, serving
from tests.e2e.small_model import small_model


@pytest.fixture(scope="module")
def system() -> Iterator[Serve]:
    """The demo model with one worker. Tests leave it as they found it: idle and ready."""
    with serving() as serve:
        yield serve


@pytest.fixture
def own_system() -> Iterator[Serve]:
    """A system with a few layers of the demo model, which the test may break."""
    with serving(model=small_model()) as serve:
        yield serve


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs of the systems that a failed test used."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for value in item.funcargs.values():
            if isinstance(value, Serve):
                report.sections.append(("headrace serve", value.tail()))
    return report
