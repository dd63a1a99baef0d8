"""Leases in a real Redis: read, kept while it is away, forgotten when they end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from headrace.common.stores.redis_link import WORKER_KEY, WORKERS_KEY
from headrace.router.dispatch.metrics import RouterMetrics
from headrace.router.fleet import leases
from headrace.router.fleet.fleet import Fleet, FleetConfig
from headrace.router.fleet.leases import LeaseReader, parse_lease
from headrace.router.fleet.registry import Registry, SharedLeases
from tests.odd_redis import ODD_ANSWERS, odd_redis
from tests.redis_server import RedisServer, RedisWithSentinel
from tests.router.conftest import StartWorker
from tests.router.fake_worker import until


def publish(redis_server: RedisServer, worker_id: str, address: str) -> None:
    value = json.dumps({"worker_id": worker_id, "address": address})
    redis_server.client().set(WORKER_KEY + worker_id, value, ex=60)
    redis_server.client().sadd(WORKERS_KEY, worker_id)


class Reading:
    """A reader and its latest leases."""

    def __init__(self, url: str) -> None:
        self.leases: dict[str, str] = {}
        self.num_reads = self.num_lost = 0
        self.reader = LeaseReader(url, self._seen, self._lost, max_workers=3)
        self.reader.start()

    def _seen(self, leases: dict[str, str]) -> None:
        self.leases = leases
        self.num_reads += 1

    def _lost(self) -> None:
        self.num_lost += 1


@pytest.fixture
async def reading(redis_server: RedisServer) -> AsyncIterator[Reading]:
    made = Reading(redis_server.url)
    yield made
    await made.reader.close()


async def test_workers_beyond_the_bound_are_left_out_and_the_log_says_so(
    redis_server: RedisServer, reading: Reading, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(5):
        publish(redis_server, f"w{number}", f"10.0.0.{number}:1")
    await until(
        lambda: len(reading.leases) == 3 and any("--max-workers" in record.message for record in caplog.records)
    )
    assert "Redis has 5 workers, but this router accepts 3: 2 get no requests from it" in caplog.text


async def test_leases_beside_a_redis_that_is_none_are_read_when_it_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "_TIMEOUT_S", 0.3)
    monkeypatch.setattr(leases, "READ_INTERVAL_S", 0.05)
    server = RedisServer(tmp_path)
    async with odd_redis(server.port) as odd:
        made = Reading(server.url)
        for odd.answer in (b"", *ODD_ANSWERS):
            seen = odd.num_commands
            await until(lambda seen=seen: odd.num_commands >= seen + 3)  # type: ignore[misc]
    server.start()
    publish(server, "a", "10.0.0.1:1")
    await until(lambda: made.leases == {"a": "10.0.0.1:1"})
    await made.reader.close()
    server.kill()


async def test_leases_are_seen_as_they_come_and_go(redis_server: RedisServer, reading: Reading) -> None:
    await until(lambda: reading.num_reads)
    assert reading.leases == {}
    publish(redis_server, "a", "10.0.0.1:1")
    publish(redis_server, "b", "unix:/b.sock")
    await until(lambda: reading.leases == {"a": "10.0.0.1:1", "b": "unix:/b.sock"})
    redis_server.client().delete(WORKER_KEY + "a")
    await until(lambda: reading.leases == {"b": "unix:/b.sock"})
    assert redis_server.client().smembers(WORKERS_KEY) == {b"b"}


async def test_while_redis_is_away_nothing_is_seen_and_it_is_found_again(
    redis_server: RedisServer, reading: Reading
) -> None:
    await until(lambda: reading.reader.is_connected)
    redis_server.kill()
    await until(lambda: reading.num_lost >= 2)
    assert not reading.reader.is_connected
    redis_server.start()
    publish(redis_server, "a", "10.0.0.1:1")
    await until(lambda: reading.leases == {"a": "10.0.0.1:1"})


async def test_leases_are_read_through_a_failover_of_the_sentinel(tmp_path: Path) -> None:
    servers = RedisWithSentinel(tmp_path)
    reading = Reading(servers.url)
    try:
        publish(servers.master, "a", "10.0.0.1:1")
        await until(lambda: reading.leases == {"a": "10.0.0.1:1"})
        servers.master.kill()
        await until(lambda: servers.master_port() == servers.replica.port, 30)
        await until(lambda: reading.reader.is_connected, 30)
        publish(servers.replica, "b", "10.0.0.2:1")
        await until(lambda: "b" in reading.leases)
    finally:
        await reading.reader.close()
        servers.kill()


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"not json",
        b"[]",
        b'{"worker_id": "a"}',
        b'{"worker_id": 1, "address": "x"}',
        b'{"worker_id": "", "address": "x"}',
        b'{"worker_id": "a", "address": "' + b"x" * 5000 + b'"}',
    ],
)
def test_what_is_no_lease_is_passed_over(value: bytes | None) -> None:
    assert parse_lease(value) is None


def test_a_worker_stays_while_the_store_is_away_and_for_a_lease_after_it_is_back() -> None:
    shared = SharedLeases(lease_s=6.0)
    shared.seen({"a": "x:1", "b": "x:2"}, 0.0)
    shared.lost()
    assert set(shared.addresses()) == {"a", "b"}
    shared.seen({}, 100.0)  # it came back empty
    shared.seen({"b": "x:2"}, 102.0)
    assert set(shared.addresses()) == {"a", "b"}
    shared.seen({"b": "x:2"}, 105.9)
    assert set(shared.addresses()) == {"a", "b"}
    shared.seen({"b": "x:2"}, 106.0)
    assert set(shared.addresses()) == {"b"}


def test_a_worker_that_comes_back_elsewhere_is_at_its_new_address() -> None:
    shared = SharedLeases(lease_s=6.0)
    shared.seen({"a": "x:1"}, 0.0)
    shared.seen({"a": "y:1"}, 1.0)
    assert shared.addresses() == {"a": "y:1"}


def test_shared_and_direct_registrations_make_one_fleet() -> None:
    registry = Registry(["s:1"], lease_s=6.0)
    registry.shared.seen({"a": "x:1", "b": "x:2"}, 0.0)
    registry.register("a", "y:1", 0.0)
    assert {address: member.worker_id for address, member in registry.members().items()} == {
        "s:1": "",
        "y:1": "a",
        "x:2": "b",
    }


async def test_a_full_redis_takes_no_worker_away_that_is_heard(tmp_path: Path, start_worker: StartWorker) -> None:
    full = RedisServer(tmp_path, "--maxmemory-policy", "noeviction").start()
    heard, gone = await start_worker("heard"), await start_worker("gone")
    fleet = Fleet(Registry(lease_s=0.5), FleetConfig(heartbeat_ms=100))
    reader = LeaseReader(full.url, fleet.leases_seen, fleet.leases_lost)
    try:
        for worker in (heard, gone):
            publish(full, worker.name, worker.address)
        await fleet.start()
        reader.start()
        await until(lambda: fleet.num_ready == 2)
        assert reader.is_writable
        full.client().config_set("maxmemory", 1)  # as others leave it who have filled it
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            publish(full, "heard", heard.address)
        for worker in (heard, gone):
            full.client().delete(WORKER_KEY + worker.name)  # as it ends when nobody can renew it
        await until(lambda: heard.address not in fleet._registry.members())
        await until(lambda: not reader.is_writable, 20)
        assert [link.is_ready for link in fleet.links()] == [True, True]
        # Who is heard no more is forgotten, as ever.
        await gone.kill()
        await until(lambda: [link.address for link in fleet.links()] == [heard.address])
        assert fleet.num_ready == 1
        full.client().config_set("maxmemory", 0)
        await until(lambda: reader.is_writable, 20)
    finally:
        await reader.close()
        await fleet.close()
        full.kill()


async def test_workers_that_alone_lose_redis_stay(start_worker: StartWorker, redis_server: RedisServer) -> None:
    worker = await start_worker("w")
    fleet = Fleet(Registry(lease_s=0.5), FleetConfig(heartbeat_ms=100))
    reader = LeaseReader(redis_server.url, fleet.leases_seen, fleet.leases_lost)
    try:
        publish(redis_server, "w", worker.address)
        await fleet.start()
        reader.start()
        await until(lambda: fleet.num_ready == 1)
        incarnations = [link.incarnation for link in fleet.links()]
        redis_server.client().delete(WORKER_KEY + "w")
        await until(lambda: worker.address not in fleet._registry.members())
        assert fleet.num_ready == 1
        # Its lease is there again: nothing happens.
        publish(redis_server, "w", worker.address)
        await until(lambda: worker.address in fleet._registry.members())
        assert [link.incarnation for link in fleet.links()] == incarnations
    finally:
        await reader.close()
        await fleet.close()


async def test_a_worker_that_hangs_is_shown_longer_than_its_lease_and_one_that_is_dead_is_not(
    start_worker: StartWorker, redis_server: RedisServer
) -> None:
    worker = await start_worker("w")
    fleet = Fleet(Registry(lease_s=0.2), FleetConfig(heartbeat_ms=100))
    reader = LeaseReader(redis_server.url, fleet.leases_seen, fleet.leases_lost)
    try:
        publish(redis_server, "w", worker.address)
        await fleet.start()
        reader.start()
        await until(lambda: fleet.num_ready == 1)
        worker.is_silent = True
        redis_server.client().delete(WORKER_KEY + "w")
        await until(lambda: [link.silent_s > 1.0 for link in fleet.links()] == [True])
        assert worker.address not in fleet._registry.members()
        metrics = RouterMetrics()
        metrics.observe(fleet)
        found = metrics.registry.get_sample_value
        assert found("headrace_router_workers_not_answering") == 1
        assert (found("headrace_router_longest_silence_seconds") or 0) > 1.0
        await worker.kill()
        await until(lambda: not list(fleet.links()))
    finally:
        await reader.close()
        await fleet.close()
