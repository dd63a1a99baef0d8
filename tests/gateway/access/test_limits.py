"""Limits of keys: the arithmetic, one process, and the scripts in a real Redis, which must decide the same."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.common.stores.api_keys import MAX_PER_MINUTE
from headrace.gateway.access.admission import duration_of
from headrace.gateway.access.limits import LEVELS, Bucket, KeyLimits, LocalLimits, drained, take
from headrace.gateway.access.quota import ENTER, LEASE_S, TAKE, SharedLimits
from tests.redis_server import RedisServer, until

MINUTE_US = 60_000_000
limits_of_keys = st.one_of(st.integers(1, 100), st.integers(1, MAX_PER_MINUTE))
pauses_us = st.one_of(st.integers(0, 1000), st.integers(0, 2 * MINUTE_US))


class Clock:
    """Microseconds that the test moves."""

    def __init__(self) -> None:
        self.now_us = 1_700_000_000_000_000

    def __call__(self) -> int:
        return self.now_us


# --- the bucket


@given(limits_of_keys, st.lists(st.tuples(pauses_us, st.integers(1, 50)), max_size=40))
def test_no_minute_has_more_than_the_limit_beyond_what_was_saved_up(limit: int, steps: list[tuple[int, int]]) -> None:
    bucket, now_us, taken = Bucket(0, 0), 0, []
    for pause_us, cost in steps:
        now_us += pause_us
        bucket, answer = take(bucket, limit, cost, now_us)
        if not answer.wait_us:
            taken.append((now_us, cost))
    for index, (start_us, _) in enumerate(taken):
        total = 0
        for at_us, cost in taken[index:]:
            total += cost
            # A full bucket, and what drained since the first of these.
            assert total * LEVELS <= limit * (LEVELS + at_us - start_us)


@given(limits_of_keys, st.lists(st.tuples(pauses_us, st.integers(1, 1000)), min_size=1, max_size=20))
def test_a_refusal_tells_the_exact_microsecond_from_which_the_same_would_be_taken(
    limit: int, steps: list[tuple[int, int]]
) -> None:
    bucket, now_us = Bucket(0, 0), 0
    for pause_us, cost in steps:
        now_us += pause_us
        if cost > limit:
            continue
        after, answer = take(bucket, limit, cost, now_us)
        if answer.wait_us:
            assert after == Bucket(drained(bucket, limit, now_us), now_us), "a refusal takes nothing"
            assert take(bucket, limit, cost, now_us + answer.wait_us - 1)[1].wait_us == 1
            assert take(bucket, limit, cost, now_us + answer.wait_us)[1].wait_us == 0
        bucket = after


@given(limits_of_keys, st.lists(st.tuples(pauses_us, st.integers(-2000, 2000)), max_size=20))
def test_what_is_state_holds(limit: int, steps: list[tuple[int, int]]) -> None:
    bucket, now_us = Bucket(0, 0), 0
    for pause_us, cost in steps:
        now_us += pause_us
        bucket, answer = take(bucket, limit, cost, now_us, anyway=True)
        state = answer.state
        assert (state.limit, answer.wait_us) == (limit, 0)
        assert 0 <= state.remaining <= limit
        if state.remaining:
            assert take(bucket, limit, state.remaining, now_us)[1].wait_us == 0, "as much as is said to remain"
        if state.remaining < limit:
            assert take(bucket, limit, state.remaining + 1, now_us)[1].wait_us > 0, "and no more"
        assert drained(bucket, limit, now_us + state.reset_us) == 0
        assert state.reset_us == 0 or drained(bucket, limit, now_us + state.reset_us - 1) > 0


def test_a_clock_that_goes_back_neither_drains_nor_locks() -> None:
    bucket, _ = take(Bucket(0, 0), 1, 1, 90 * MINUTE_US)
    back, answer = take(bucket, 1, 1, 10 * MINUTE_US)
    assert answer.wait_us == MINUTE_US
    assert take(back, 1, 1, 11 * MINUTE_US)[1].wait_us == 0


# --- one process


def test_requests_of_a_key_are_counted_and_its_tokens_and_those_at_a_time() -> None:
    clock = Clock()
    local = LocalLimits(clock)
    key = KeyLimits("a", requests_per_minute=3, tokens_per_minute=100, max_concurrent=2)
    assert local.enter(key, "1").is_in
    assert local.enter(key, "2").is_in
    crowded = local.enter(key, "3")
    assert (crowded.is_in, crowded.is_at_max_concurrent) == (False, True)
    local.leave(key, "1")
    assert local.enter(key, "3").is_in
    local.leave(key, "2")
    refused = local.enter(key, "4")
    assert (refused.is_in, refused.wait_us) == (False, 20_000_000)
    clock.now_us += 20_000_000
    assert local.enter(key, "4").is_in
    assert local.take_tokens(key, 60).wait_us == 0
    assert local.take_tokens(key, 60).wait_us == 12_000_000
    local.take_tokens(key, -50, anyway=True)
    assert local.take_tokens(key, 60).wait_us == 0


def test_a_key_that_is_gone_is_forgotten_when_nothing_of_it_is_inside() -> None:
    local = LocalLimits(Clock())
    gone, busy = KeyLimits("gone", 1), KeyLimits("busy", 1)
    local.enter(gone, "1")
    local.leave(gone, "1")
    local.enter(busy, "2")
    local.retain({"other"})
    assert local.enter(gone, "3").is_in, "its bucket is a new one"
    assert not local.enter(busy, "4").is_in


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0, "0s"),
        (1, "1ms"),
        (999_001, "1s"),
        (20_000, "20ms"),
        (1_500_000, "1.5s"),
        (360_000_000, "6m0s"),
        (3_600_000_000, "1h0m0s"),
        (61_050_000, "1m1.05s"),
    ],
)
def test_times_are_written_as_openai_writes_them(microseconds: int, text: str) -> None:
    assert duration_of(microseconds) == text


# --- the scripts


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(limits_of_keys, st.lists(st.tuples(pauses_us, st.integers(-500, 500), st.booleans()), max_size=15))
def test_redis_decides_about_tokens_as_the_pure_module_does(
    shared_redis_server: RedisServer, limit: int, steps: list[tuple[int, int, bool]]
) -> None:
    client: Any = shared_redis_server.client()
    client.flushall()
    bucket, now_us = Bucket(0, 0), Clock().now_us
    for pause_us, cost, anyway in steps:
        now_us += pause_us
        bucket, answer = take(bucket, limit, cost, now_us, anyway=anyway)
        state = client.eval(TAKE, 1, "bucket", now_us, cost, limit, int(anyway))
        assert state == [answer.wait_us, answer.state.remaining, answer.state.reset_us]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 20),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 5_000_000), st.booleans()), max_size=15),
)
def test_redis_lets_requests_in_as_one_process_does(
    shared_redis_server: RedisServer, limit: int, most: int, steps: list[tuple[int, bool]]
) -> None:
    client: Any = shared_redis_server.client()
    client.flushall()
    clock = Clock()
    local, key, inside = LocalLimits(clock), KeyLimits("a", limit, None, most), []
    for number, (pause_us, leaves) in enumerate(steps):
        clock.now_us += pause_us
        if leaves and inside:
            local.leave(key, inside[0])
            client.zrem("inside", inside.pop(0))
        entry = local.enter(key, f"{number}")
        lease_us = 10 * MINUTE_US
        state = client.eval(ENTER, 2, "bucket", "inside", clock.now_us, limit, most, f"{number}", lease_us)
        assert entry.state is not None
        assert state == [entry.wait_us, int(entry.is_at_max_concurrent), entry.state.remaining, entry.state.reset_us]
        if entry.is_in:
            inside.append(f"{number}")


async def test_two_gateways_share_every_limit_exactly(shared_redis_server: RedisServer) -> None:
    client: Any = shared_redis_server.client()
    client.flushall()
    both = [SharedLimits(shared_redis_server.url, LocalLimits(Clock())) for _ in range(2)]
    for limits in both:
        await limits.start()
        assert limits.is_shared
    key = KeyLimits("k", requests_per_minute=10, tokens_per_minute=1000)
    begun_s = time.monotonic()
    entries = await asyncio.gather(*(both[i % 2].enter(key, f"request-{i}") for i in range(60)))
    answers = await asyncio.gather(*(both[i % 2].take_tokens(key, 100) for i in range(60)))
    drained_since = int((time.monotonic() - begun_s) / 6)
    assert 10 <= sum(entry.is_in for entry in entries) <= 10 + drained_since
    assert 10 <= sum(not answer.wait_us for answer in answers) <= 10 + drained_since
    both[0].settle(key, -500)
    await asyncio.to_thread(
        until, lambda: int(client.hget("headrace:quota:{k}:tokens", "level")) < 600 * LEVELS, "it is settled"
    )
    assert (await both[1].take_tokens(key, 400)).wait_us == 0
    for limits in both:
        await limits.close()


async def test_a_request_that_leaves_while_redis_decides_costs_no_tokens(shared_redis_server: RedisServer) -> None:
    client: Any = shared_redis_server.client()
    client.flushall()
    limits = SharedLimits(shared_redis_server.url, LocalLimits(Clock()))
    await limits.start()
    key, level = KeyLimits("k", tokens_per_minute=1000), "headrace:quota:{k}:tokens"
    assert (await limits.take_tokens(key, 100)).wait_us == 0
    for number_of_turns in (1, 2, 3):
        taking = asyncio.create_task(limits.take_tokens(key, 800))
        for _ in range(number_of_turns):
            await asyncio.sleep(0)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
    refused = asyncio.create_task(limits.take_tokens(key, 950))
    await asyncio.sleep(0)
    refused.cancel()
    assert (await limits.take_tokens(key, 1)).state.remaining >= 0  # behind all of them
    await asyncio.to_thread(
        until, lambda: 0 < int(client.hget(level, "level")) <= 101 * LEVELS, "only what was used is counted"
    )
    await limits.close()


async def test_places_come_back_from_a_gateway_that_died(shared_redis_server: RedisServer) -> None:
    client: Any = shared_redis_server.client()
    client.flushall()
    one, other = (SharedLimits(shared_redis_server.url, LocalLimits(Clock())) for _ in range(2))
    key = KeyLimits("k", max_concurrent=2)
    for limits in (one, other):
        await limits.start()
    assert (await one.enter(key, "a")).is_in
    assert (await other.enter(key, "b")).is_in
    assert (await other.enter(key, "c")).is_at_max_concurrent
    one.leave(key, "a")
    name = "headrace:quota:{k}:inside"
    await asyncio.to_thread(until, lambda: client.zcard(name) == 1, "it has left")
    assert (await one.enter(key, "d")).is_in
    # The gateway that has `d` renews it no more; as if the lease had ended:
    client.zadd(name, {"d": 1})
    assert (await other.enter(key, "e")).is_in
    assert client.pttl(name) <= LEASE_S * 1000
    for limits in (one, other):
        await limits.close()


async def test_without_redis_each_gateway_goes_on_with_what_it_knows_and_notices_when_it_is_back(
    tmp_path: Path,
) -> None:
    server = RedisServer(tmp_path).start()
    clock = Clock()
    limits = SharedLimits(server.url, LocalLimits(clock))
    await limits.start()
    key = KeyLimits("k", requests_per_minute=4, tokens_per_minute=100, max_concurrent=10)
    for request in ("a", "b", "c"):
        assert (await limits.enter(key, request)).is_in
    server.kill()
    assert (await limits.enter(key, "d")).is_in, "it is let in by this gateway alone"
    assert not limits.is_shared
    assert not (await limits.enter(key, "e")).is_in, "what was let in before counts"
    assert (await limits.take_tokens(key, 50)).wait_us == 0
    limits.settle(key, 10)
    limits.leave(key, "a")
    server.start()
    await asyncio.to_thread(until, lambda: limits.is_shared, "it is shared again")
    client: Any = server.client()
    await asyncio.to_thread(
        until, lambda: client.zrange("headrace:quota:{k}:inside", 0, -1) == [b"b", b"c", b"d"], "who is inside is known"
    )
    await limits.close()
    server.kill()
