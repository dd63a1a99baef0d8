"""Peers that are given up for silence, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from headrace.common.transport.silence import GRACE_S, STALL_S, TICK_S, WIDER, Peer, Silences

BOUND_S = 2.5
HEARTBEAT_S = 0.5


class World:
    """Peers that are heard every half second unless they are silent, and a process that listens unless it is late."""

    def __init__(self, num_peers: int) -> None:
        self.now_s = 1000.0
        self.silences = Silences(lambda: self.now_s)
        self.peers = {f"w{i}": self.silences.watch(f"w{i}", BOUND_S) for i in range(num_peers)}
        self.silent: set[str] = set()
        self.lost: dict[str, float] = {}
        self._next_beat_s = self.now_s + HEARTBEAT_S

    def run(self, seconds: float) -> None:
        """Let time pass, tick by tick; peers that are given up are listened to no more."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += TICK_S
            self.judge()  # timers may come before what is to be read
            self.silences.tick()
            self.hear()
            self.judge()

    def stand_still(self, seconds: float) -> None:
        """This process gets no CPU."""
        self.now_s += seconds

    def hear(self) -> None:
        if self.now_s < self._next_beat_s:
            return
        self._next_beat_s = self.now_s + HEARTBEAT_S
        for name, peer in self.peers.items():
            if name not in self.silent:
                peer.heard()

    def judge(self) -> None:
        for name, peer in list(self.peers.items()):
            if peer.silent_s >= BOUND_S and peer.judge() == 0.0:
                self.lost[name] = self.now_s
                del self.peers[name]
                peer.close()


@pytest.fixture
async def worlds() -> Iterator[list[World]]:  # type: ignore[misc]
    made: list[World] = []
    yield made
    for world in made:
        for peer in world.peers.values():
            peer.close()


async def started(worlds: list[World], num_peers: int) -> World:
    world = World(num_peers)
    worlds.append(world)
    world.run(5.0)
    return world


@pytest.mark.parametrize("num_peers", [1, 2, 3, 8])
async def test_one_that_hangs_is_given_up_within_its_bound(worlds: list[World], num_peers: int) -> None:
    world = await started(worlds, num_peers)
    world.silent, since_s = {"w0"}, world.now_s
    world.run(BOUND_S + 2 * HEARTBEAT_S)
    assert list(world.lost) == ["w0"]
    assert world.lost["w0"] - since_s <= BOUND_S + HEARTBEAT_S
    world.run(20.0)
    assert list(world.lost) == ["w0"]


@pytest.mark.parametrize("late_s", [0.3, 2.0, 5.0, 60.0])
async def test_nobody_is_given_up_because_the_observer_was_late(worlds: list[World], late_s: float) -> None:
    world = await started(worlds, 8)
    for _ in range(20):
        world.stand_still(late_s)
        world.run(0.7)
    assert not world.lost


async def test_an_observer_that_is_always_a_little_late_sees_no_silence(worlds: list[World]) -> None:
    world = await started(worlds, 4)
    for _ in range(500):
        world.stand_still(0.2)  # below what counts as a standstill
        world.run(TICK_S)
    assert not world.lost


async def test_one_that_hangs_is_found_though_the_observer_was_late(worlds: list[World]) -> None:
    world = await started(worlds, 4)
    world.silent = {"w0"}
    world.stand_still(30.0)
    since_s = world.now_s
    world.run(BOUND_S + GRACE_S + 2 * HEARTBEAT_S)
    assert list(world.lost) == ["w0"]
    assert world.lost["w0"] - since_s >= GRACE_S


async def test_many_that_fall_silent_together_get_longer(worlds: list[World]) -> None:
    world = await started(worlds, 8)
    world.silent = {"w0", "w1", "w2", "w3"}
    world.run(WIDER * BOUND_S - 1.0)
    assert not world.lost
    world.silent = set()
    world.run(20.0)
    assert not world.lost


async def test_many_that_stay_silent_are_given_up_a_few_at_a_time(worlds: list[World]) -> None:
    world = await started(worlds, 8)
    world.silent, since_s = set(world.peers), world.now_s
    world.run(60.0)
    times = sorted(at_s - since_s for at_s in world.lost.values())
    assert len(times) == 8
    assert times[0] >= WIDER * BOUND_S - 2 * HEARTBEAT_S
    for first, third in zip(times, times[2:], strict=False):
        assert third - first >= BOUND_S - TICK_S


async def test_a_few_of_many_are_given_up_a_quarter_at_a_time(worlds: list[World]) -> None:
    world = await started(worlds, 8)
    world.silent, since_s = {"w0", "w1", "w2"}, world.now_s
    world.run(2 * BOUND_S + 3 * HEARTBEAT_S)
    first, second, third = sorted(at_s - since_s for at_s in world.lost.values())
    assert max(first, second) <= BOUND_S + HEARTBEAT_S
    assert third >= BOUND_S + min(first, second) - 2 * TICK_S


async def test_streams_of_one_peer_count_as_one(worlds: list[World]) -> None:
    world = await started(worlds, 2)
    # The session of w0 beside its watch: both are silent, and still only one peer of two is.
    session = world.silences.watch("w0", BOUND_S)
    world.silent = {"w0"}
    world.run(BOUND_S + 2 * HEARTBEAT_S)
    assert list(world.lost) == ["w0"]
    assert session.judge() == 0.0, "giving up another stream of the same peer is no second loss"
    session.close()


async def test_streams_that_turn_out_to_be_of_one_peer_count_as_one(worlds: list[World]) -> None:
    world = await started(worlds, 2)
    sessions = [world.silences.watch(number, BOUND_S) for number in range(4)]
    for session in sessions:
        session.heard("w0")
    world.silent = {"w0"}
    world.run(BOUND_S + 2 * HEARTBEAT_S)
    assert list(world.lost) == ["w0"]
    for session in sessions:
        assert session.judge() == 0.0
        session.close()


async def test_a_peer_heard_on_one_stream_is_not_silent(worlds: list[World]) -> None:
    world = await started(worlds, 2)
    sessions = [world.silences.watch(name, BOUND_S) for name in ("w0", "w1")]
    world.run(BOUND_S + HEARTBEAT_S)
    assert not world.silences.are_many_silent
    assert [session.is_silent for session in sessions] == [True, True]
    for session in sessions:
        session.close()


async def test_the_loop_is_looked_at_only_while_somebody_is_listened_to() -> None:
    silences = Silences()
    assert silences._timer is None
    peer: Peer = silences.watch("w", BOUND_S)
    before_s = silences.now_s()
    async with asyncio.timeout(10):
        while silences.now_s() == before_s:
            await asyncio.sleep(TICK_S)
    assert silences._timer is not None
    peer.close()
    peer.close()
    assert silences._timer is None


def test_a_standstill_is_longer_than_a_tick() -> None:
    assert STALL_S > TICK_S
