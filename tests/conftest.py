"""How the processes of a run share out the tests, how long a test may take, and what is said of a process that died.

Also that no example of a property is timed, and fixtures of several folders.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests import collecting, last_words, long_tests, memory
from tests.fetch_tools import FETCHED
from tests.patience import patience, session_slowness
from tests.redis_server import RedisServer
from tests.sharing_out import WITH_FLEETS, ByFleets
from tests.time_limits import pytest_runtest_makereport, pytest_timeout_cancel_timer, pytest_timeout_set_timer

# Ray would make uvloop the loop of all later tests in the process that imports it.
os.environ.setdefault("RAY_USE_UVLOOP", "0")

__all__ = ["pytest_runtest_makereport", "pytest_timeout_cancel_timer", "pytest_timeout_set_timer"]

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# They need what is exported beside the first tests.
_OF_EXPORTS = "tests/architectures/"


def pytest_configure(config: pytest.Config) -> None:
    """Measure the machine before other processes of the session are made, watch how they end, give memory back,
    let tests find the programs that were fetched for them, and let what tests start be interrupted."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a script's background, and inherited by processes
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), str(FETCHED)))
    session_slowness()
    collecting.pytest_configure(config)
    last_words.pytest_configure(config)
    long_tests.pytest_configure(config)
    config.pluginmanager.register(memory)


def pytest_report_header() -> str:
    """How slow the machine is."""
    return f"bounds of waits: {patience(1):.1f} times those of an idle machine, as of now"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that start fleets first, which take longest. Those of exported models come last: `every_run`
    exports them meanwhile."""
    items.sort(key=lambda item: (not item.nodeid.startswith(WITH_FLEETS), item.nodeid.startswith(_OF_EXPORTS)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """The scheduler of a run with several processes."""
    return ByFleets(config, log)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of the test's own, which it may end."""
    server = RedisServer(tmp_path).start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def shared_redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis for all tests of a module."""
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.kill()
