"""Blocks that a draining worker hands over: the hottest go first, arrive unchanged, and leave no block behind."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from headrace.protos import worker_pb2
from headrace.protos.status import Reason, StatusError
from headrace.worker.engine.fetching import Fetching
from headrace.worker.kv.chain import Content
from headrace.worker.kv.fetch import ChainedBlock
from headrace.worker.kv.takeover import Offer, Takeover
from headrace.worker.peers import handover as handover_module
from headrace.worker.peers.handover import Handover
from tests.patience import patience
from tests.worker.conftest import BLOCK_SIZE, VOCAB_SIZE
from tests.worker.peers.test_peers import BOUND_S, LAYOUT, NUM_BLOCKS, PROMPT, SHAPE, Peer, Server, until


class Taker(Peer):
    """A peer that takes over what others hand over."""

    def __init__(self, directory: Path, name: str, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__(directory, name, num_blocks)
        self.takeover = Takeover(self.under_test.scheduler.kv_cache, self.tier)
        scheduler = self.under_test.engine.scheduler
        self.fetching = Fetching(scheduler, None, self.tier, takeover=self.takeover, source=self.source)
        self.under_test.fetch_first = self.fetching.begin_late
        self.handover = Handover(self.source, self.takeover, scheduler.kv_cache, SHAPE.num_bytes, 1 << 30)

    def take(self, source: str, blocks: Sequence[Content], timeout_s: float = 10.0) -> int:
        """Take these blocks, as the engine's thread does."""
        named = [ChainedBlock(block.block_hash or 0, block.parent_hash, block.is_first) for block in blocks]
        offer = Offer(source, named, timeout_s)
        self.takeover.offer(offer)

        def has_ended() -> bool:
            assert not self.fetching.take_ready()
            assert (self.under_test.scheduler.num_fetching > 0) >= (not offer.ended.done())
            self.under_test.scheduler.check()
            return offer.ended.done()

        until(has_ended)
        self.fetching.take_ready()
        self.pool.check()
        assert self.pool.num_free_blocks == self.pool.num_blocks
        assert self.under_test.scheduler.num_fetching == 0
        taken = offer.ended.result()
        assert taken.num_present == sum(self.pool.is_findable(block.block_hash) for block in named)
        return taken.num_blocks


@pytest.fixture
def takers(tmp_path: Path) -> Iterator[tuple[Taker, Taker]]:
    """Two workers, of which the first has computed PROMPT."""
    first, second = Taker(tmp_path, "first"), Taker(tmp_path, "second", NUM_BLOCKS + 7)
    first.ask(PROMPT)
    yield first, second
    first.end()
    second.end()


def prompts_of(count: int, seed: int, num_tokens: int = 3 * BLOCK_SIZE + 2) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)] for _ in range(count)]


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_worker_has_what_it_took_over(
    takers: tuple[Taker, Taker], monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    first, second = takers
    if not is_shared:
        monkeypatch.setattr("headrace.worker.peers.tier.host_id", lambda: "another host")
    blocks = first.pool.hottest_first()
    assert second.take(first.address, blocks) == len(blocks) == 6
    assert second.fetching.take_news()
    assert not second.fetching.take_news()
    assert second.fetching.counters() | {"blocks_taken_over": 6, "blocks_sent": 0} == second.fetching.counters()
    assert first.fetching.counters()["blocks_sent"] == 6
    assert len(second.pool.take_events()[0]) == 6, "routers hear of them"
    assert second.ask(PROMPT).num_cached_tokens == 6 * BLOCK_SIZE
    assert second.take(first.address, blocks) == 0, "it has them already"


def test_the_hottest_blocks_are_named_first_and_after_their_predecessors(takers: tuple[Taker, Taker]) -> None:
    first = takers[0]
    stems = prompts_of(2, 5)
    for stem in stems:
        first.ask(stem)
    first.ask(PROMPT)
    first.ask(stems[0])
    named = first.pool.hottest_first()
    by_hash = {block.block_hash: number for number, block in enumerate(named)}
    assert len(by_hash) == len(named) == first.pool.num_cached_blocks
    for number, block in enumerate(named):
        assert block.is_first or by_hash[block.parent_hash] < number
    assert [block.is_first for block in named] == [True, False, False, True, *[False] * 5, True, False, False]
    assert len(first.pool.chain_to(named[8].block_hash or 0)) == 6
    assert first.pool.chain_to(12345) == []


def test_blocks_in_use_are_the_hottest(takers: tuple[Taker, Taker]) -> None:
    first = takers[0]
    other = prompts_of(1, 6)[0]
    first.ask(other)
    scheduler = first.under_test.scheduler
    scheduler.add(first.request(PROMPT))
    first.under_test.step()
    assert [block.is_first for block in first.pool.hottest_first()][:7] == [True, *[False] * 5, True]
    first.finish(scheduler.running[0], PROMPT)


def test_the_blocks_in_front_stay_while_those_behind_come(takers: tuple[Taker, Taker]) -> None:
    first, second = takers
    blocks = first.pool.hottest_first()
    assert second.take(first.address, blocks[:2]) == 2
    for prompt in prompts_of(7, 3):  # the two are now the first to be evicted
        second.ask(prompt)
    assert second.take(first.address, blocks[2:]) == 4
    assert second.ask(PROMPT).num_cached_tokens == 6 * BLOCK_SIZE


def test_blocks_behind_one_that_was_computed_meanwhile_are_evicted_before_it(takers: tuple[Taker, Taker]) -> None:
    first, second = takers
    gate = threading.Event()
    run = second.tier._run
    second.tier._run = lambda *args: [gate.wait(patience(BOUND_S)), run(*args)]  # type: ignore[method-assign]
    blocks = first.pool.hottest_first()
    named = [ChainedBlock(block.block_hash or 0, block.parent_hash, block.is_first) for block in blocks]
    offer = Offer(first.address, named, BOUND_S)
    second.takeover.offer(offer)
    second.fetching.take_ready()
    prompt = PROMPT[: 2 * BLOCK_SIZE + 2]
    request = second.request(prompt)
    second.under_test.scheduler.add(request)
    while second.under_test.scheduler.has_requests or second.under_test.engine.has_outputs:
        second.under_test.step()
    gate.set()
    until(lambda: not second.fetching.take_ready() and offer.ended.done())
    assert offer.ended.result() == (4, 6)
    second.pool.check()
    assert second.ask(PROMPT).num_cached_tokens == 6 * BLOCK_SIZE


def test_blocks_without_a_predecessor_are_not_taken(takers: tuple[Taker, Taker]) -> None:
    first, second = takers
    blocks = first.pool.hottest_first()
    assert second.take(first.address, blocks[1:]) == 0
    assert second.tier.num_received == 0


def test_only_spare_blocks_are_filled(takers: tuple[Taker, Taker]) -> None:
    first, second = takers
    second.fetching._num_spare = lambda: 2  # type: ignore[method-assign]
    assert second.take(first.address, first.pool.hottest_first()) == 2
    second.fetching._num_spare = lambda: 0  # type: ignore[method-assign]
    assert second.take(first.address, first.pool.hottest_first()) == 0


def test_tokens_that_do_not_make_the_hash_are_refused(tmp_path: Path, takers: tuple[Taker, Taker]) -> None:
    first, second = takers

    async def send(request: worker_pb2.FetchBlocksRequest) -> Any:
        request.host_id = ""
        async for response in first.source.send(request):
            response.token_bytes[2] = bytes(4 * BLOCK_SIZE)
            yield response

    liar = Server(f"unix:{tmp_path}/liar.sock", send)
    assert second.take(f"unix:{tmp_path}/liar.sock", first.pool.hottest_first()) == 2
    assert second.ask(PROMPT).num_cached_tokens == 2 * BLOCK_SIZE
    liar.stop()


def test_a_source_that_is_gone_leaves_no_block_behind(takers: tuple[Taker, Taker]) -> None:
    first, second = takers
    blocks = first.pool.hottest_first()
    first._server.stop()
    assert second.take(first.address, blocks) == 0


def test_random_handovers_beside_requests_never_give_a_wrong_token(takers: tuple[Taker, Taker]) -> None:
    rng = random.Random(9)
    stems = prompts_of(8, 4, 30)
    for _ in range(80):
        prompt = [*rng.choice(stems)[: rng.randint(8, 30)], rng.randrange(VOCAB_SIZE), 5]
        asked, other = rng.sample(takers, 2)
        asked.ask(prompt)
        asked.take(other.address, other.pool.hottest_first()[: rng.randint(1, 20)])
    assert sum(taker.takeover.num_taken for taker in takers) > 50


class EngineLoop:
    """Calls a taker's `take_ready` in a thread, as its engine does."""

    def __init__(self, taker: Taker) -> None:
        self._taker = taker
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._taker.fetching.take_ready()
            time.sleep(0.001)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


async def test_the_worker_takes_when_it_is_told(takers: tuple[Taker, Taker]) -> None:
    first, second = takers
    loop = EngineLoop(second)
    named = [
        worker_pb2.ChainedBlock(hash=block.block_hash or 0, parent_hash=block.parent_hash, is_first=block.is_first)
        for block in first.pool.hottest_first()
    ]
    request = worker_pb2.TakeBlocksRequest(kv_layout=LAYOUT, source=first.address, blocks=named[:3])
    assert await second.handover.take(request) == (3, 3)
    request.blocks.extend(named[3:])
    assert await second.handover.take(request, is_busy=lambda: True) == (3, 6)
    for field, value in (("kv_layout", "another"), ("source", "")):
        wrong = worker_pb2.TakeBlocksRequest(kv_layout=LAYOUT, source=first.address, blocks=named)
        setattr(wrong, field, value)
        with pytest.raises(StatusError, match=field if field == "source" else "layout") as raised:
            await second.handover.take(wrong)
        assert raised.value.field == field
    loop.end()


End: TypeAlias = "asyncio.Future[worker_pb2.HandoverEnd]"


def word() -> End:
    """What a router will say at the end of its handover."""
    return asyncio.get_running_loop().create_future()


async def collected(
    handover: Handover, *, draining: bool = True, how: worker_pb2.HandoverEnd = worker_pb2.HANDOVER_END_DONE
) -> list[worker_pb2.ChainedBlock]:
    """What HandOver names to a router, which then says that the handover has ended."""
    named: list[worker_pb2.ChainedBlock] = []
    end = word()
    async for message in handover.name_blocks(end, draining=draining):
        named.extend(message.blocks)
        if not message.blocks:
            end.set_result(how)
    return named


async def test_a_draining_worker_names_what_fits_once_for_each_drain(takers: tuple[Taker, Taker]) -> None:
    handover = takers[0].handover
    with pytest.raises(StatusError) as refused:
        await collected(handover, draining=False)
    assert refused.value.reason is Reason.INVALID_FIELD
    assert len(await collected(handover)) == 6
    with pytest.raises(StatusError) as refused:
        await collected(handover)
    assert refused.value.reason is Reason.QUEUE_FULL
    handover.reset()
    handover._most = 4
    running = handover.name_blocks(word(), draining=True)
    assert len((await anext(running)).blocks) == 4
    handover.reset()
    await running.aclose()
    later = handover.name_blocks(word(), draining=True)
    assert (await anext(later)).blocks
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await handover.wait(lambda: 1, 5.0)  # the end of the earlier one does not count
    await later.aclose()


@pytest.mark.parametrize("are_all_named", [True, False])
async def test_a_handover_that_breaks_off_is_begun_again(
    takers: tuple[Taker, Taker], monkeypatch: pytest.MonkeyPatch, are_all_named: bool
) -> None:
    handover = takers[0].handover
    monkeypatch.setattr(handover_module, "_BLOCKS_A_MESSAGE", 4)
    num_routers = 1
    waiting = asyncio.create_task(handover.wait(lambda: num_routers, BOUND_S))
    messages = handover.name_blocks(word(), draining=True)
    assert (await anext(messages)).blocks
    if are_all_named:
        while (await anext(messages)).blocks:
            pass
    num_routers = 0  # its watch breaks off, too
    await messages.aclose()
    await asyncio.sleep(3 * handover_module._LOOK_S)
    assert not waiting.done(), "the router may come again"
    assert len(await collected(handover)) == 6
    await waiting
    with pytest.raises(StatusError):
        await collected(handover)


@pytest.mark.parametrize("how", ["breaks off", "knows no other worker"])
async def test_the_next_router_has_its_turn_when_one(takers: tuple[Taker, Taker], how: str) -> None:
    handover = takers[0].handover
    waiting = asyncio.create_task(handover.wait(lambda: 2, BOUND_S))
    end = word()
    first = handover.name_blocks(end, draining=True)
    while (await anext(first)).blocks:
        pass
    second = asyncio.create_task(collected(handover))
    await asyncio.sleep(3 * handover_module._LOOK_S)
    assert not second.done(), "it waits for its turn"
    if how == "breaks off":
        await first.aclose()
    else:
        end.set_result(worker_pb2.HANDOVER_END_NO_TAKERS)
        with pytest.raises(StopAsyncIteration):
            await anext(first)
    assert len(await second) == 6
    await waiting


async def test_a_worker_that_stops_waits_only_for_routers_that_hand_over(
    takers: tuple[Taker, Taker], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = takers

    async def took_s(wait: Callable[[], Any]) -> float:
        start_s = time.monotonic()
        await wait()
        return time.monotonic() - start_s

    assert await took_s(lambda: first.handover.wait(lambda: 0, 5.0)) < 0.2, "nobody watches it"
    assert await took_s(lambda: second.handover.wait(lambda: 1, 5.0)) < 0.2, "it has nothing"
    monkeypatch.setattr(handover_module, "BEGIN_S", 0.1)
    assert 0.05 < await took_s(lambda: first.handover.wait(lambda: 1, 5.0)) < 2.0, "its router does not hand over"
    with pytest.raises(StatusError):
        await collected(first.handover)
    first.handover.reset()
    end = word()
    messages = first.handover.name_blocks(end, draining=True)
    while (await anext(messages)).blocks:
        pass
    waiting = asyncio.create_task(first.handover.wait(lambda: 1, 5.0))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    end.set_result(worker_pb2.HANDOVER_END_DONE)
    assert [message async for message in messages] == []
    await waiting
    first.handover.reset()
    await collected(first.handover, how=worker_pb2.HANDOVER_END_NO_TAKERS)
    monkeypatch.setattr(handover_module, "BEGIN_S", 30.0)
    assert await took_s(lambda: first.handover.wait(lambda: 1, 30.0)) < 2.0, "its only router knows no other worker"
    first.handover.reset()
    messages = first.handover.name_blocks(word(), draining=True)
    await anext(messages)
    assert 0.2 < await took_s(lambda: first.handover.wait(lambda: 1, 0.3)) < 2.0, "the time is over"
    await messages.aclose()
