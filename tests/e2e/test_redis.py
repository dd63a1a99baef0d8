"""Fleets that find one another through Redis, and what happens to them when it goes away. Real servers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.fleet import Fleet, fleet
from tests.e2e.serving import until
from tests.e2e.streams import load
from tests.redis_server import RedisServer, RedisWithSentinel

pytestmark = pytest.mark.e2e

SOAK = os.environ.get("HEADRACE_SOAK") == "1"
AWAY_S = 60.0 if SOAK else 0.0


@pytest.fixture
def redis_with_sentinel(tmp_path: Path) -> Iterator[RedisWithSentinel]:
    servers = RedisWithSentinel(tmp_path)
    yield servers
    servers.kill()


def num_known(own_fleet: Fleet) -> list[int]:
    """The number of workers that each router lists as ready."""
    return [own_fleet.num_ready(index) for index in range(len(own_fleet.routers))]


def said(own_fleet: Fleet, words: str) -> list[bool]:
    """The routers with these words in their logs."""
    return [any(words in line for line in router.logs) for router in own_fleet.routers]


@pytest.mark.timeout(240 + AWAY_S)
async def test_redis_may_be_away_and_a_worker_started_meanwhile_is_used_when_it_is_back(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    with fleet(tmp_path, num_workers=1, num_routers=2, redis_url=redis_server.url) as own_fleet:
        async with load(own_fleet.base_url) as requests:
            await requests.more(8)
            redis_server.kill()
            await asyncio.to_thread(until, lambda: all(said(own_fleet, "cannot read Redis")), "both routers noticed")
            added = own_fleet.add_worker()
            added.start()
            await asyncio.to_thread(until, lambda: any("listening" in line for line in added.logs), "it listens", 60)
            await asyncio.sleep(AWAY_S)
            await requests.more(8)
            assert num_known(own_fleet) == [1, 1]
            redis_server.start()
            await asyncio.to_thread(until, lambda: num_known(own_fleet) == [2, 2], "both routers have both workers")
            await requests.more(32)
            own_fleet.workers[0].kill()
            await requests.more(8)
        assert [stream.error for stream in requests.failed] == []
        own_fleet.until_idle()
        served = {worker.worker_id: worker.load.counters.requests_finished for worker in own_fleet.list_workers()}
        assert served["worker-1"] > 0


@pytest.mark.timeout(240)
async def test_a_failover_of_redis_is_nothing_to_clients_and_leases_go_on_at_the_new_master(
    tmp_path: Path, redis_with_sentinel: RedisWithSentinel
) -> None:
    servers = redis_with_sentinel
    with fleet(tmp_path, num_workers=1, num_routers=2, redis_url=servers.url) as own_fleet:
        async with load(own_fleet.base_url) as requests:
            await requests.more(8)
            servers.master.kill()
            await asyncio.to_thread(
                until, lambda: servers.master_port() == servers.replica.port, "the replica is the master now"
            )
            added = own_fleet.add_worker()
            added.start()
            await asyncio.to_thread(until, lambda: num_known(own_fleet) == [2, 2], "both routers have both workers", 60)
            await requests.more(16)
        assert [stream.error for stream in requests.failed] == []
        own_fleet.until_idle()


@pytest.mark.timeout(180)
async def test_a_worker_that_stops_takes_its_lease_back(tmp_path: Path, redis_server: RedisServer) -> None:
    with fleet(tmp_path, num_workers=1, num_routers=1, redis_url=redis_server.url) as own_fleet:
        client = redis_server.client()
        assert client.exists("headrace:worker:worker-0")
        own_fleet.workers[0].terminate()
        assert own_fleet.workers[0].gone() == 0
        assert set(client.keys("*")) <= {b"headrace:probe"}  # the router's own
