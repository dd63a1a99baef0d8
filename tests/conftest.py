"""How `pytest -n 2` shares out the tests, and that no example of a property is timed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Their tests start fleets with the real model, one such fleet at a time. They take longest, so they begin first.
_WITH_FLEETS = ("tests/e2e/", "tests/test_readme.py")


class _ByFleets(LoadScopeScheduling):
    """Runs all tests that start fleets in one worker process, and each other file in any one process."""

    def _split_scope(self, nodeid: str) -> str:
        return "fleets" if nodeid.startswith(_WITH_FLEETS) else nodeid.partition("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that start fleets first."""
    items.sort(key=lambda item: not item.nodeid.startswith(_WITH_FLEETS))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """The scheduler of a run with several processes."""
    return _ByFleets(config, log)
