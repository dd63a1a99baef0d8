"""A worker that drains: its blocks are distributed over the others, and they take them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from headrace.common.observers import Observers
from headrace.protos import router_pb2, worker_pb2
from headrace.protos.block_hash import block_hashes, root_hash
from headrace.protos.load_report import LoadReport
from headrace.protos.status import Reason, StatusError, abort, error_of
from headrace.router.draining import Handovers
from headrace.router.fleet.links import LinkState, WorkerLink
from headrace.router.placement.block_distribution import Handed, distribute, rooms
from tests.patience import patience
from tests.router.conftest import StartRouter, StartWorker
from tests.router.fake_worker import BLOCK_SIZE, FakeWorker, until


def chain(start: int, length: int, parent: int = 0, holders: frozenset[int] = frozenset()) -> list[Handed]:
    """Blocks with the hashes from `start` on, after `parent` if that is not 0."""
    return [Handed(start + n, start + n - 1 if n else parent, not n and not parent, holders) for n in range(length)]


def hashes(part: Sequence[Handed]) -> list[int]:
    return [block.block_hash for block in part]


def test_empty_blocks_are_used_first_and_then_all_lose_the_same_share() -> None:
    empty = LoadReport(num_blocks=100, num_free_blocks=100)
    full = LoadReport(num_blocks=100, num_free_blocks=100, num_cached_blocks=100)
    assert rooms([empty, full], 100) == [100, 0]
    assert rooms([full, full, full], 100) == [25, 25, 25]
    assert rooms([LoadReport(num_blocks=100)], 50) == [0]


def test_a_chain_stays_together_and_chains_are_spread() -> None:
    first, second = chain(100, 10), chain(200, 10)
    parts = distribute([*first, *second], [12, 15])
    assert [hashes(part) for part in parts] == [hashes(second), hashes(first)]


def test_chains_that_part_may_go_different_ways_with_what_is_in_front() -> None:
    stem = chain(100, 3)
    branches = [chain(200 + 100 * n, 20, parent=102) for n in range(4)]
    parts = distribute([*stem, *(block for branch in branches for block in branch)], [100, 100])
    assert all(hashes(part)[:3] == hashes(stem) for part in parts)
    assert sorted(len(part) for part in parts) == [43, 43]


def test_what_others_have_stays_there() -> None:
    held = chain(100, 4, holders=frozenset({1}))
    rest = chain(104, 4, parent=103)
    parts = distribute([*held, *rest], [10, 10])
    assert [hashes(part) for part in parts] == [[], hashes(rest)]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_handed_over_each_block_comes_after_its_predecessor_and_fits(seed: int) -> None:
    rng = random.Random(seed)
    blocks: list[Handed] = []
    for number in range(1, 300):
        parent = rng.choice([None, *blocks[-20:]]) if rng.random() < 0.3 else (blocks[-1] if blocks else None)
        holders = frozenset({2}) if (parent is None or parent.holders) and rng.random() < 0.3 else frozenset[int]()
        blocks.append(Handed(number, parent.block_hash if parent else 0, parent is None, holders))
    room = [rng.randrange(0, 150) for _ in range(3)]
    parts = distribute(blocks, room)
    for worker, part in enumerate(parts):
        assert len(part) <= room[worker]
        there = {block.block_hash for block in blocks if worker in block.holders}
        for block in part:
            assert block.is_first or block.parent_hash in there, "a block would come before its predecessor"
            assert block.block_hash not in there
            there.add(block.block_hash)
    if sum(room) > 3 * len(blocks):
        assert {block.block_hash for part in parts for block in part} >= {b.block_hash for b in blocks if not b.holders}


DONE, NO_TAKERS = [worker_pb2.HANDOVER_END_DONE], [worker_pb2.HANDOVER_END_NO_TAKERS]


class Exchanging(FakeWorker):
    """A fake worker that names its blocks when it drains, and notes what it is to take."""

    def __init__(self, name: str, **script: Any) -> None:
        super().__init__(name, **script)
        self.card.kv_layout, self.card.kv_block_bytes = "layout", 1000
        self.named: list[worker_pb2.ChainedBlock] = []
        self.is_handing_over = False
        self.num_handovers = 0
        self.ends: list[int] = []  # as routers said
        self.turn = asyncio.Lock()
        self.known: set[int] = set()  # blocks that it has, and has not reported
        self.taken: list[worker_pb2.TakeBlocksRequest] = []
        self.takes_none = self.is_slow = False
        self.most_taken: int | None = None  # if another one has not refused yet, it refuses after that many blocks
        self.fails_to_take = False  # refuses with an error
        self.others: list[Exchanging] = []
        self.has_refused = False

    async def HandOver(self, request_iterator: Any, context: Any) -> Any:
        async with self.turn:
            if worker_pb2.HANDOVER_END_DONE in self.ends:
                await abort(context, StatusError(Reason.QUEUE_FULL, "another router has done it", retry_after_s=1.0))
            self.num_handovers += 1
            self.is_handing_over = True
            try:
                yield worker_pb2.HandOverResponse(blocks=self.named)
                yield worker_pb2.HandOverResponse()
                async for request in request_iterator:
                    if request.end:
                        self.ends.append(request.end)
                        return
            finally:
                self.is_handing_over = False

    async def TakeBlocks(self, request: worker_pb2.TakeBlocksRequest, context: Any) -> Any:
        self.taken.append(request)
        while self.is_slow:
            await asyncio.sleep(0.01)
        num_taken = sum(len(each.blocks) for each in self.taken[:-1])
        if self.most_taken is not None and num_taken >= self.most_taken and not any(o.has_refused for o in self.others):
            self.has_refused = True
            if self.fails_to_take:
                await abort(context, StatusError(Reason.QUEUE_FULL, "no room", retry_after_s=1.0))
            return worker_pb2.TakeBlocksResponse()
        num_blocks, num_known = len(request.blocks), sum(block.hash in self.known for block in request.blocks)
        if self.takes_none:
            return worker_pb2.TakeBlocksResponse(num_present=num_known)
        return worker_pb2.TakeBlocksResponse(num_blocks=num_blocks - num_known, num_present=num_blocks)

    def has(self, tokens: Sequence[int]) -> None:
        root = root_hash(self.card.fingerprint)
        found = block_hashes(root, tokens, BLOCK_SIZE)
        self.report(stored=found)
        for parent, block_hash in zip([root, *found[:-1]], found, strict=True):
            self.named.append(worker_pb2.ChainedBlock(hash=block_hash, parent_hash=parent, is_first=parent == root))


@pytest.fixture
async def workers() -> AsyncIterator[list[Exchanging]]:
    made = [Exchanging(name) for name in "abc"]
    for worker in made:
        await worker.start()
    yield made
    for worker in made:
        await worker.kill()


async def test_the_blocks_of_a_draining_worker_go_to_the_others(
    start_router: StartRouter, workers: list[Exchanging]
) -> None:
    router, (leaving, *others) = await start_router(*workers), workers
    leaving.has(range(100, 100 + 200 * BLOCK_SIZE))
    await until(lambda: len(router.fleet.index) == 200)
    leaving.report(draining=True)
    await until(lambda: leaving.ends == DONE)
    (taker,) = [worker for worker in others if worker.taken]
    assert [block for request in taker.taken for block in request.blocks] == leaving.named
    assert {(request.source, request.kv_layout) for request in taker.taken} == {(leaving.address, "layout")}
    assert len(taker.taken) > 2, "in parts"
    await until(lambda: router.metrics.handovers._value.get() == 1)
    assert router.metrics.blocks_handed_over._value.get() == 200


async def test_a_handover_ends_when_nothing_can_be_taken(start_router: StartRouter, workers: list[Exchanging]) -> None:
    await start_router(*workers)
    leaving, *others = workers
    leaving.has(range(100, 100 + 200 * BLOCK_SIZE))
    for worker in others:
        worker.takes_none = True
    leaving.report(draining=True)
    await until(lambda: leaving.ends == DONE)
    assert [len(worker.taken) for worker in others] == [1, 1], "each is asked once"
    for worker in others:
        worker.report(draining=True)
        await until(lambda found=worker: bool(found.ends))
    assert not leaving.taken, "there is nobody left who takes requests"
    assert [worker.ends for worker in (leaving, *others)] == [DONE, DONE, NO_TAKERS]


@pytest.mark.parametrize("fails", [False, True])
async def test_what_one_worker_does_not_take_goes_to_another(
    start_router: StartRouter, workers: list[Exchanging], fails: bool
) -> None:
    router, (leaving, *others) = await start_router(*workers), workers
    leaving.has(range(100, 100 + 200 * BLOCK_SIZE))
    await until(lambda: len(router.fleet.index) == 200)
    for worker in others:
        worker.fails_to_take, worker.most_taken = fails, 64
    others[0].others, others[1].others = [others[1]], [others[0]]
    leaving.report(draining=True)
    await until(lambda: leaving.ends == DONE)
    first, second = sorted(others, key=lambda worker: len(worker.taken))
    assert [len(request.blocks) for request in first.taken] == [64, 64]
    given = [block for request in second.taken for block in request.blocks]
    assert given == leaving.named, "with the blocks before those that were not taken"
    await until(lambda: router.metrics.handovers._value.get() == 1)
    assert router.metrics.blocks_handed_over._value.get() == 64 + 200


async def test_a_worker_that_has_blocks_already_takes_those_behind_them(
    start_router: StartRouter, workers: list[Exchanging]
) -> None:
    """As after a handover that broke off, whose last blocks have not been reported yet."""
    router, (leaving, taker, other) = await start_router(*workers), workers
    leaving.has(range(100, 100 + 200 * BLOCK_SIZE))
    await until(lambda: len(router.fleet.index) == 200)
    other.report(draining=True)
    await router.until_ready(2)
    taker.known = {block.hash for block in leaving.named[:100]}
    leaving.report(draining=True)
    await until(lambda: leaving.ends == DONE)
    assert [block for request in taker.taken for block in request.blocks] == leaving.named
    await until(lambda: router.metrics.blocks_handed_over._value.get() == 100)


class StubLink:
    """The parts of a link that decide on a handover."""

    worker_id = address = "a"
    card = worker_pb2.ModelCard(kv_layout="l")
    state = LinkState.READY


def stubbed(monkeypatch: pytest.MonkeyPatch) -> tuple[Handovers, StubLink, list[str]]:
    """Handovers, a link, and what happens: each handover begins, and ends when it is cancelled and cleaned up."""
    log: list[str] = []

    async def hand_over(self: Handovers, link: Any) -> None:
        log.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            log.append("ended")

    monkeypatch.setattr(Handovers, "_hand_over", hand_over)
    fleet = SimpleNamespace(states=Observers[WorkerLink]())
    return Handovers(cast("Any", fleet), cast("Any", None)), StubLink(), log


def change(handovers: Handovers, link: Any, *states: LinkState) -> None:
    for state in states:
        link.state = state
        handovers._state_changed(link)


async def test_a_handover_that_was_cancelled_before_it_began_does_not_prevent_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handovers, link, log = stubbed(monkeypatch)
    change(handovers, link, LinkState.DRAINING, LinkState.READY)
    await until(lambda: not handovers._running)
    change(handovers, link, LinkState.DRAINING)
    await until(lambda: log == ["begun"])
    await handovers.close()
    assert log == ["begun", "ended"]


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_drain_that_is_undone_and_begun_again_hands_over(
    monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    handovers, link, log = stubbed(monkeypatch)
    change(handovers, link, LinkState.DRAINING)
    if has_begun:
        await until(lambda: log == ["begun"])
    change(handovers, link, LinkState.READY, LinkState.DRAINING)
    first = ["begun", "ended"] if has_begun else []
    await until(lambda: sorted(log) == sorted([*first, "begun"]))
    change(handovers, link, LinkState.SUSPECT, LinkState.DRAINING)
    assert len(handovers._running) == 1
    await handovers.close()
    assert sorted(log) == sorted([*first, "begun", "ended"])
    assert not handovers._running


async def test_a_worker_that_takes_requests_again_hands_nothing_over(
    start_router: StartRouter, workers: list[Exchanging]
) -> None:
    await start_router(*workers)
    leaving, *others = workers
    leaving.has(range(100, 100 + 200 * BLOCK_SIZE))
    for worker in others:
        worker.is_slow = True
    leaving.report(draining=True)
    await until(lambda: any(worker.taken for worker in others))
    leaving.report(draining=False)
    await until(lambda: not leaving.is_handing_over)
    assert sum(len(worker.taken) for worker in others) == 1
    assert leaving.ends == [], "it has broken off"


async def test_one_of_several_routers_hands_over(start_router: StartRouter, workers: list[Exchanging]) -> None:
    router, (leaving, *others) = await start_router(*workers), workers
    second = await start_router(leaving, *others)
    leaving.has(range(100, 100 + 10 * BLOCK_SIZE))
    await until(lambda: len(router.fleet.index) == len(second.fleet.index) == 10)
    leaving.report(draining=True)
    await until(lambda: not leaving.is_handing_over and sum(len(worker.taken) for worker in others) == 1)
    assert leaving.num_handovers == 1


async def test_another_router_finishes_what_one_has_begun(start_router: StartRouter, workers: list[Exchanging]) -> None:
    leaving, *others = workers
    first = await start_router(*workers)
    leaving.has(range(100, 100 + 200 * BLOCK_SIZE))
    await until(lambda: len(first.fleet.index) == 200)
    for worker in others:
        worker.is_slow = True
    leaving.report(draining=True)
    await until(lambda: any(worker.taken for worker in others))
    second = await start_router(*workers, num_ready=2)
    await until(lambda: len(second.fleet.index) == 200)
    assert leaving.num_handovers == 1, "the second one waits for its turn"
    await first.server.stop(0.0)
    for worker in others:
        worker.is_slow = False
    await until(lambda: leaving.ends == DONE)
    await until(lambda: second.metrics.handovers._value.get() == 1)
    assert first.metrics.handovers._value.get() == 0
    assert second.metrics.blocks_handed_over._value.get() == 200


async def test_a_router_that_knows_no_other_worker_leaves_the_blocks_to_one_that_does(
    start_router: StartRouter, workers: list[Exchanging]
) -> None:
    """As one that has just started, and has not reached the others yet."""
    leaving, *others = workers
    leaving.has(range(100, 100 + 10 * BLOCK_SIZE))
    await start_router(leaving)
    leaving.report(draining=True)
    await until(lambda: leaving.ends == NO_TAKERS)
    await start_router(*workers, num_ready=2)
    await until(lambda: leaving.ends == NO_TAKERS + DONE)
    assert [block for worker in others for request in worker.taken for block in request.blocks] == leaving.named


async def test_a_worker_without_handover_drains_as_before(start_router: StartRouter, start_worker: StartWorker) -> None:
    worker = await start_worker()
    worker.card.kv_layout = "layout"
    router = await start_router(worker)
    worker.report(draining=True)
    await until(lambda: router.fleet.num_ready == 0)
    worker.report(draining=False)
    await router.until_ready(1)
    await router.generate(list(range(100, 120)))


# --- operators --------------------------------------------------------------------------------------------------------


async def test_an_operator_drains_a_worker_by_its_name_or_address(
    start_router: StartRouter, start_worker: StartWorker
) -> None:
    one, other = [await start_worker(name) for name in ("one", "other")]
    router = await start_router(one, other)
    await router.until_ready(2)
    answer = await router.router.DrainWorker(router_pb2.DrainWorkerRequest(worker="one"), timeout=patience(10))
    assert (answer.worker_id, answer.num_running) == ("one", 3)
    await router.until_ready(1)
    request = router_pb2.DrainWorkerRequest(worker=one.address, undo=True)
    assert (await router.router.DrainWorker(request)).worker_id == "one", "without a deadline, too"
    await router.until_ready(2)
    assert (one.drains, other.drains) == ([False, True], [])


async def test_a_worker_that_is_unknown_or_gone_is_named(start_router: StartRouter, start_worker: StartWorker) -> None:
    one, twin = [await start_worker(name) for name in ("one", "one")]
    router = await start_router(one, twin)
    await router.until_ready(2)
    for name, said in (("nosuch", "there is one, one"), ("", "there is no worker ''"), ("one", twin.address)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.router.DrainWorker(router_pb2.DrainWorkerRequest(worker=name))
        error = error_of(refused.value)
        assert (error.reason, error.field) == (Reason.INVALID_FIELD, "worker")
        assert said in error.message
    assert one.drains == twin.drains == []
    await twin.kill()
    with pytest.raises(grpc.aio.AioRpcError) as lost:
        await router.router.DrainWorker(router_pb2.DrainWorkerRequest(worker=twin.address), timeout=patience(10))
    assert "worker one" in error_of(lost.value).message
