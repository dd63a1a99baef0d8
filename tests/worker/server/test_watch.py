"""Reports to watchers: at any moment, a watcher's set of blocks is closed under prefixes."""

from __future__ import annotations

import asyncio
import random

import pytest

from headrace.protos import worker_pb2
from headrace.protos.load_report import LoadReport
from headrace.worker.engine.mailbox import EngineReport, LearnedCost
from headrace.worker.request.request import Request
from headrace.worker.server import watch
from headrace.worker.server.watch import WatchHub, _Watcher
from tests.worker.conftest import make_engine


class Mirror:
    """The set of hashes of one watcher, updated hash by hash."""

    def __init__(self, before: dict[int, int]) -> None:
        self.known: set[int] = set()
        self._before = before  # hash -> the hash before it; not those of first blocks

    def apply(self, events: worker_pb2.KvEvents) -> None:
        if events.reset:
            self.known.clear()
        for block_hash in events.evicted:
            self.known.remove(block_hash)
            assert block_hash not in {self._before.get(other) for other in self.known}
        for block_hash in events.stored:
            assert block_hash not in self.known
            assert self._before.get(block_hash) in (None, *self.known)
            self.known.add(block_hash)


def note_chains(requests: list[Request], before: dict[int, int]) -> None:
    for request in requests:
        before.update(zip(request.block_hashes[1:], request.block_hashes, strict=False))


@pytest.mark.parametrize("seed", range(5))
def test_after_each_hash_of_each_message_what_was_told_is_closed_under_prefixes(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MAX_HASHES", 5)
    rng = random.Random(seed)
    engine = make_engine(num_blocks=30, max_num_seqs=4, max_num_batched_tokens=24)
    pool = engine.scheduler.kv_cache.pool
    hub = WatchHub(1, 4, 4)
    before: dict[int, int] = {}
    requests: list[Request] = []
    pairs: list[tuple[_Watcher, Mirror]] = []
    prefixes = [[rng.randrange(99) for _ in range(rng.randint(1, 40))] for _ in range(4)]
    for number in range(300):
        if number % 50 == 0:
            pairs.append((_Watcher(hub.findable), Mirror(before)))
        if rng.random() < 0.4:
            prompt = [*rng.choice(prefixes), *(rng.randrange(99) for _ in range(rng.randint(1, 8)))]
            options = {"num_prompt_logprobs": 0} if rng.random() < 0.1 else {}
            requests.append(engine.request(prompt, max_tokens=rng.randint(1, 20), **options))
        engine.step()
        note_chains(requests, before)
        if rng.random() < 0.3:
            stored, evicted = pool.take_events()
            report = EngineReport(stored=stored, evicted=evicted)
            hub.publish(report)
            for watcher, _ in pairs:
                watcher.note(report)
        for watcher, mirror in pairs:
            events = watcher.take_events() if rng.random() < 0.2 else None
            if events is not None:
                mirror.apply(events)
    assert pool.num_evictions > 100
    for watcher, mirror in pairs:
        while (events := watcher.take_events()) is not None:
            mirror.apply(events)
        assert mirror.known == set(hub.findable)


async def test_watchers_hear_of_the_disk_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_DISK_HASHES", 3)
    hub = WatchHub(1, 4, 4)
    hub.publish(EngineReport(LoadReport(disk_bytes_per_s=7.0), disk_changes=dict.fromkeys(range(5), True)))
    messages = hub.watch(10.0)
    known: set[int] = set()
    for number in range(2):
        message = await anext(messages)
        assert message.disk_events.reset is (number == 0)
        known |= set(message.disk_events.stored)
    assert known == set(range(5))
    assert message.load.disk_bytes_per_s == 7.0
    hub.publish(EngineReport(disk_changes={9: True, 0: False}))
    hub.publish(EngineReport(disk_changes={9: False}))
    message = await anext(messages)
    assert (set(message.disk_events.evicted), list(message.disk_events.stored)) == ({0, 9}, [])
    hub.publish(EngineReport())
    assert not (await anext(messages)).HasField("disk_events")
    await messages.aclose()
    assert set(hub.on_disk) == {1, 2, 3, 4}


async def test_watchers_hear_of_saved_states() -> None:
    hub = WatchHub(1, 4, 4)
    hub.publish(EngineReport(state_changes={7: True, 8: True}))
    messages = hub.watch(10.0)
    first = (await anext(messages)).state_events
    assert (first.reset, set(first.stored), list(first.evicted)) == (True, {7, 8}, [])
    hub.publish(EngineReport(state_changes={7: False, 9: True}))
    second = (await anext(messages)).state_events
    assert (second.reset, list(second.stored), list(second.evicted)) == (False, [9], [7])
    hub.publish(EngineReport())
    assert not (await anext(messages)).HasField("state_events")
    await messages.aclose()
    assert set(hub.states) == {8, 9}


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Notes the times for which anything sleeps, in seconds, instead of sleeping."""
    found: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        found.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", note)
    return found


@pytest.mark.parametrize(("asked_s", "given_s"), [(0.0, watch.MIN_INTERVAL_S), (0.25, 0.25), (9.0, 0.5)])
async def test_reports_come_no_closer_than_a_watcher_asks(asked_s: float, given_s: float, pauses: list[float]) -> None:
    hub = WatchHub(1, 4, 4)
    told = hub.watch(1.0, asked_s)
    assert (await anext(told)).sequence == 0
    for number in (1, 2):
        hub.publish(EngineReport(LoadReport(num_running=number)))
        assert (await anext(told)).load.num_running == number
    assert pauses == [given_s, given_s]
    await told.aclose()  # type: ignore[attr-defined]


async def test_the_interval_of_a_running_watch_can_be_changed(pauses: list[float]) -> None:
    hub = WatchHub(1, 4, 4)
    told = hub.watch(1.0, 0.1, watcher_id=5)
    await anext(told)
    for number, (watcher_id, asked_s) in enumerate([(6, 0.4), (5, 0.2), (5, 0.0), (5, 9.0)]):
        assert hub.adjust(watcher_id, asked_s) == (watcher_id == 5)
        hub.publish(EngineReport(LoadReport(num_running=number)))
        assert (await anext(told)).load.num_running == number
    assert pauses == [0.1, 0.2, watch.MIN_INTERVAL_S, 0.5]
    await told.aclose()  # type: ignore[attr-defined]
    assert not hub.adjust(5, 0.2)


def test_learned_costs_of_steps_are_reported_once_they_are_known() -> None:
    hub = WatchHub(1, 8, 16)
    assert not hub.load().HasField("decode_steps")
    hub.publish(EngineReport(step_costs={"decode": LearnedCost((8.0, 0.5, 0.25, 2.0, 0.125, 1.5), 40)}))
    load = hub.load()
    assert not load.HasField("prompt_steps")
    cost = load.decode_steps
    assert (cost.step_ms, cost.token_ms, cost.attended_ms, cost.read_ms) == (8.0, 0.5, 0.25, 2.0)
    assert (cost.sequence_ms, cost.change_ms, cost.num_steps) == (0.125, 1.5, 40)
