"""Prefixes of models that keep only windows of some layers come from a disk and from other workers.

The runner compares every window with the whole context, so a part of a block that is missing or wrong fails the step.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from headrace.worker.engine import fetching as fetching_module
from headrace.worker.engine.build import build_engine
from headrace.worker.engine.fetching import Fetching
from headrace.worker.kv.block_bytes import BlockBytes, BlockShape
from headrace.worker.kv.cache import KVCache
from headrace.worker.kv.chain import Content
from headrace.worker.kv.disk_store import DiskStore
from headrace.worker.kv.disk_tier import DiskTier, PartsOnDisk
from headrace.worker.kv.fetch import NO_SLOT, ChainedBlock, Fetch, Persistence, Spill
from headrace.worker.kv.groups.window import PARTS_BESIDE, WindowBudget
from headrace.worker.kv.takeover import Offer, Takeover
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.peers.source import BlockSource
from headrace.worker.peers.tier import PeerTier
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.sampler import BatchSampler
from tests.patience import patience
from tests.worker.conftest import BLOCK_SIZE, VOCAB_SIZE, EngineUnderTest, KnownCosts
from tests.worker.fake_runner import expected_tokens
from tests.worker.kv.groups.windowed_runner import WindowedRunner
from tests.worker.peers.test_peers import Server

# A multiple of the block size, as in real models: the part at the beginning of the last window is then held to the end.
WINDOW, STEP = 8, 16
SHAPE = BlockShape(1, BLOCK_SIZE, 8)
PROMPT = random.Random(1).choices(range(VOCAB_SIZE), k=90)
BOUND_S = 20.0


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + patience(BOUND_S)
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


class Trimmed:
    """A worker that trims windows: an engine whose prompts are expensive, so that it fetches what it can."""

    def __init__(self, num_blocks: int = 40, num_slots: int = 24, max_num_seqs: int = 4) -> None:
        runner = WindowedRunner(num_blocks, BLOCK_SIZE, VOCAB_SIZE, num_slots, WINDOW)
        self.contents = BlockBytes([runner.blocks.view(np.uint8).reshape(-1)], [SHAPE])
        self.parts = BlockBytes([runner.parts.view(np.uint8).reshape(-1)], [SHAPE])
        budget = WindowBudget(WINDOW, num_slots, STEP // BLOCK_SIZE)
        engine = build_engine(
            runner,
            BatchSampler(),
            num_blocks,
            StepLimits(max_num_seqs, STEP, STEP, is_exact=True),
            step_costs=KnownCosts(1.0, 50.0),
            groups=[budget],
            persistence=Persistence(spill=self._open_tier()),
        )
        self.under_test = EngineUnderTest(engine, runner)
        self.fetching: Fetching | None = None

    def _open_tier(self) -> Spill | None:
        return None

    @property
    def kv_cache(self) -> KVCache:
        return self.under_test.scheduler.kv_cache

    def send(self, prompt: list[int], max_tokens: int = 2, peer: str = "") -> Request:
        """Send a request as the engine's thread does."""
        assert self.fetching is not None
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
        request = Request("r", prompt, sampling, 1, kv_source=peer, num_source_tokens=len(prompt) if peer else 0)
        self.under_test.tokens[request] = []
        if not self.fetching.begin(request):
            self.under_test.scheduler.add(request)
        return request

    def advance(self) -> None:
        assert self.fetching is not None
        for request in self.fetching.take_ready():
            self.under_test.scheduler.add(request)
        if self.under_test.scheduler.has_requests or self.under_test.engine.has_outputs:
            self.under_test.step()

    def finish(self) -> None:
        """Run until nothing is left; every block and slot must be free then, and every answer right."""
        assert self.fetching is not None
        fetching, scheduler = self.fetching, self.under_test.scheduler

        def is_done() -> bool:
            self.advance()
            return not (scheduler.has_requests or self.under_test.engine.has_outputs or fetching.num_held)

        until(is_done)
        for request, found in self.under_test.tokens.items():
            assert found == expected_tokens(request.prompt_token_ids, len(found), VOCAB_SIZE)
        assert self.kv_cache.num_free_blocks == self.kv_cache.num_blocks
        assert self.kv_cache.figures().num_held_window_slots == 0
        scheduler.check()

    def ask(self, prompt: list[int], max_tokens: int = 2, peer: str = "") -> Request:
        request = self.send(prompt, max_tokens, peer)
        self.finish()
        return request


class WithDisk(Trimmed):
    """A worker with a disk, which others may share."""

    def __init__(self, directory: Path, num_slots: int = 24) -> None:
        self._directory = directory
        super().__init__(num_slots=num_slots)
        self.disk.start()
        self.fetching = Fetching(self.under_test.scheduler, self.disk)
        self.under_test.fetch_first = self.fetching.begin_late

    def _open_tier(self) -> Spill:
        num_bytes = SHAPE.num_bytes
        stores = [DiskStore(self._directory, name, 300 * 8192, num_bytes, BLOCK_SIZE) for name in ("a" * 16, "b" * 16)]
        self.disk = DiskTier(stores[0], self.contents, num_bytes, PartsOnDisk(stores[1], self.parts))
        return self.disk

    def fill(self, seed: int, count: int) -> None:
        """Compute other prompts, so that the cache has nothing left of those before, and wait for the disk."""
        for number in range(count):
            self.ask(random.Random(1000 * seed + number).choices(range(VOCAB_SIZE), k=90))
        until(lambda: is_written(self.disk))


def is_written(disk: DiskTier) -> bool:
    """Whether all evicted blocks are on the disk."""
    return not disk._spills and not disk._num_unflushed


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for blocks as long as a busy machine may take."""
    monkeypatch.setattr(fetching_module, "_LEAST_PATIENCE_S", BOUND_S)


@contextmanager
def with_disk(directory: Path, num_slots: int = 24) -> Iterator[WithDisk]:
    worker = WithDisk(directory, num_slots)
    try:
        yield worker
    finally:
        worker.disk.stop()
        worker.disk.join(patience(BOUND_S))


def test_a_prefix_comes_from_the_disk_with_the_parts_of_its_last_window(tmp_path: Path) -> None:
    with with_disk(tmp_path) as worker:
        worker.ask(PROMPT)
        worker.fill(1, 2)
        request = worker.ask(PROMPT)
        assert request.num_disk_tokens > 60
        assert request.num_cached_tokens >= 84


def test_another_worker_of_the_host_finds_them(tmp_path: Path) -> None:
    with with_disk(tmp_path) as first, with_disk(tmp_path) as second:
        first.ask(PROMPT)
        first.fill(1, 2)
        until(lambda: second.disk.has_part(first.kv_cache.hash_of(Request("r", PROMPT, SAMPLING, 1), 20)))
        assert second.ask(PROMPT).num_disk_tokens >= 84


SAMPLING = SamplingParams(max_tokens=1, seed=0)


def test_only_parts_come_from_the_disk_if_the_blocks_are_in_memory(tmp_path: Path) -> None:
    """Slots are short before blocks are."""
    with with_disk(tmp_path, num_slots=14) as worker:
        worker.ask(PROMPT[:50])
        windows = worker.kv_cache.windows
        assert windows is not None
        for slot in [windows.parts.take_slot() for _ in range(windows.parts.num_available)]:
            windows.parts.place(slot, None)
        until(lambda: is_written(worker.disk))
        cache = worker.kv_cache
        asking = Request("r", PROMPT[:50], SAMPLING, 1)
        assert cache.pool.is_findable(cache.hash_of(asking, 11))
        assert cache.num_computed_by_now(asking) < 48
        num_read = worker.disk.num_read
        request = worker.ask(PROMPT[:50])
        assert request.num_cached_tokens >= 48
        assert worker.disk.num_read == num_read, "no block was read again"


class MemoryTier:
    """A tier that has all that the cache ever evicted, and brings it at random times, or not."""

    def __init__(self, worker: Trimmed, rng: random.Random) -> None:
        self.num_written = self.num_not_written = self.num_read = self.num_slots = self.num_blocks = 0
        self.bytes_per_s, self.has_news = 1e9, False
        self._worker, self._rng = worker, rng
        self._blocks: dict[int, bytes] = {}
        self._parts: dict[int, bytes] = {}
        self._fetches: deque[Fetch] = deque()

    def spill(self, block: int, slot: int, content: Content) -> None:
        if content.block_hash is not None:
            self._blocks[content.block_hash] = self._data(self._worker.contents, block)
            if slot != NO_SLOT:
                self.spill_part(slot, content)

    def spill_part(self, slot: int, content: Content) -> None:
        if content.block_hash is not None:
            self._parts[content.block_hash] = self._data(self._worker.parts, slot)

    def _data(self, contents: BlockBytes, place: int) -> bytes:
        data = np.empty(SHAPE.num_bytes, np.uint8)
        contents.gather(place, data)
        return data.tobytes()

    def has(self, block_hash: int) -> bool:
        return block_hash in self._blocks

    def has_part(self, block_hash: int) -> bool:
        return block_hash in self._parts

    def take_changes(self) -> dict[int, bool]:
        return {}

    def expected_s(self, num_blocks: int) -> float:
        return 0.001 * num_blocks

    def fetch(self, fetch: Fetch) -> None:
        self._fetches.append(fetch)

    def take_ended(self) -> list[Fetch]:
        ended = []
        for fetch in list(self._fetches):
            while self._rng.random() < 0.7 and fetch.num_read < len(fetch.wanted) and self._fill(fetch):
                self.num_read += 1
            if fetch.num_read == len(fetch.wanted) or self._rng.random() < 0.1:
                self._fetches.remove(fetch)
                ended.append(fetch)
        return ended

    def _fill(self, fetch: Fetch) -> bool:
        wanted = fetch.wanted[fetch.num_read]
        if (not wanted.part_only and not self.has(wanted.block_hash)) or (
            wanted.slot != NO_SLOT and not self.has_part(wanted.block_hash)
        ):
            return False

        def write(block: int) -> None:
            if not wanted.part_only:
                self._worker.contents.scatter(block, np.frombuffer(self._blocks[wanted.block_hash], np.uint8))
            if wanted.slot != NO_SLOT:
                part = np.frombuffer(self._parts[wanted.block_hash], np.uint8)
                self._worker.parts.scatter(wanted.slot, part)

        return fetch.fill(write)


class WithMemory(Trimmed):
    """A worker with such a tier."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        super().__init__(rng.choice([28, 40, 60]), rng.choice([16, 24, 40]))

    def _open_tier(self) -> Spill:
        self.tier = MemoryTier(self, self._rng)
        return self.tier


@pytest.mark.parametrize("seed", range(12))
def test_random_loads_with_a_tier_keep_every_promise(seed: int) -> None:
    """Blocks and parts come at random times, in part, or not at all, beside cancelled and preempted requests."""
    rng = random.Random(seed)
    worker = WithMemory(rng)
    tier = worker.tier
    worker.fetching = Fetching(worker.under_test.scheduler, tier)
    worker.under_test.fetch_first = worker.fetching.begin_late
    texts = [rng.choices(range(VOCAB_SIZE), k=90) for _ in range(5)]
    running: list[Request] = []
    for _ in range(60):
        text = rng.choice(texts)
        prompt = [*text[: rng.randint(5, 80)], *rng.choices(range(VOCAB_SIZE), k=rng.choice([0, 3]))]
        running.append(worker.send(prompt, rng.randint(1, 12)))
        for _ in range(rng.randrange(8)):
            worker.advance()
        if rng.random() < 0.1:
            request = running.pop(rng.randrange(len(running)))
            if not worker.fetching.cancel(request) and request not in worker.under_test.last:
                worker.under_test.scheduler.cancel(request)
            worker.under_test.scheduler.check()
    worker.finish()
    assert tier.num_read > 0


class WithPeers(Trimmed):
    """A worker that exchanges blocks with others."""

    def __init__(self, address: str) -> None:
        super().__init__(num_slots=40)
        self.address = address
        self.tier = PeerTier("layout", self.contents, SHAPE.num_bytes, parts=self.parts)
        self.source = BlockSource("layout", self.kv_cache, self.contents, SHAPE.num_bytes, None, self.parts)
        self.takeover = Takeover(self.kv_cache, self.tier)
        self.fetching = Fetching(self.under_test.scheduler, None, self.tier, takeover=self.takeover)
        self.under_test.fetch_first = self.fetching.begin_late
        self._server = Server(address, lambda request: self.source.send(request))

    def end(self) -> None:
        self.tier.stop()
        self._server.stop()


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[tuple[WithPeers, WithPeers]]:
    workers = WithPeers(f"unix:{tmp_path}/first.sock"), WithPeers(f"unix:{tmp_path}/second.sock")
    try:
        yield workers
    finally:
        for worker in workers:
            worker.end()


def test_a_prefix_comes_from_another_worker(peers: tuple[WithPeers, WithPeers]) -> None:
    first, second = peers
    first.ask(PROMPT)
    request = second.ask(PROMPT, peer=first.address)
    assert request.num_peer_tokens == 88
    assert request.num_cached_tokens == 88


def test_a_worker_that_has_lost_a_part_sends_what_comes_before(peers: tuple[WithPeers, WithPeers]) -> None:
    first, second = peers
    first.ask(PROMPT)
    windows = first.kv_cache.windows
    assert windows is not None
    block = first.kv_cache.pool.block_of(first.kv_cache.hash_of(Request("r", PROMPT, SAMPLING, 1), 20))
    assert block is not None
    windows.parts.drop(block)
    request = second.ask(PROMPT, peer=first.address)
    assert request.num_peer_tokens == 80
    assert request.num_cached_tokens == 0


def test_a_draining_worker_hands_blocks_and_their_parts_over(peers: tuple[WithPeers, WithPeers]) -> None:
    first, second = peers
    first.ask(PROMPT)
    named = [
        ChainedBlock(one.block_hash or 0, one.parent_hash, one.is_first, first.source.has_part(one.block_hash or 0))
        for one in first.kv_cache.pool.hottest_first()
    ]
    assert any(block.has_part for block in named)
    offer = Offer(first.address, named, patience(BOUND_S))
    second.takeover.offer(offer)

    def has_ended() -> bool:
        second.advance()
        second.under_test.scheduler.check()
        return offer.ended.done()

    until(has_ended)
    assert offer.ended.result().num_blocks == len(named)
    second.finish()
    assert second.ask(PROMPT).num_cached_tokens >= 84


def test_slots_that_a_fetch_holds_are_not_promised_twice() -> None:
    """A request waits while fetches hold the slots that its window needs."""
    worker = Trimmed(num_slots=STEP // BLOCK_SIZE + WINDOW // BLOCK_SIZE + PARTS_BESIDE)
    windows = worker.kv_cache.windows
    assert windows is not None
    assert windows.num_spare > 0
    held, wanted = worker.kv_cache.take_offered([ChainedBlock(1, 0, is_first=True, has_part=True)], lambda: 10)
    request = Request("r", PROMPT, SAMPLING, 1)
    assert not windows.admit(request)
    assert worker.kv_cache.bring(Fetch(wanted), held) == []
    assert windows.admit(request)
    worker.kv_cache.free(request)
    worker.kv_cache.check()
