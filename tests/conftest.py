"""How `pytest -n 2` shares out the tests, and that no example of a property is timed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Their tests start fleets with the real model: one such system at a time.
_WITH_SYSTEMS = ("tests/architectures/", "tests/e2e/", "tests/infra/", "tests/test_readme.py")


class _BySystems(LoadScopeScheduling):
    """Runs all tests that start systems in one worker process, and each other file in any one process."""

    def _split_scope(self, nodeid: str) -> str:
        return "systems" if nodeid.startswith(_WITH_SYSTEMS) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """The scheduler of a run with several processes."""
    return _BySystems(config, log)
