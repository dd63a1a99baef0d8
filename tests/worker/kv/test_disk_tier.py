"""KV blocks on a disk: stored blocks are read back unchanged, and damaged ones never are."""

from __future__ import annotations

import errno
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from headrace.protos.block_hash import next_hash, token_bytes_of
from headrace.worker.config import ConfigurationError
from headrace.worker.engine import fetching
from headrace.worker.engine.build import build_engine
from headrace.worker.engine.fetching import Fetching
from headrace.worker.kv import disk_tier
from headrace.worker.kv.block_bytes import BlockBytes, BlockShape
from headrace.worker.kv.chain import Content
from headrace.worker.kv.disk_store import DiskStore
from headrace.worker.kv.disk_tier import DiskTier, Fetch
from headrace.worker.kv.fetch import NO_SLOT, LearnedTime, Persistence
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request, RequestState
from headrace.worker.sampling.sampler import BatchSampler
from tests.patience import patience
from tests.worker.conftest import BLOCK_SIZE, VOCAB_SIZE, EngineUnderTest, KnownCosts
from tests.worker.fake_runner import FakeRunner, expected_tokens

BLOCK_BYTES = 10_000
NUM_BLOCKS = 24
SLOT_BYTES = 4096 + 12_288
BOUND_S = 20.0


KEY = bytes(range(32))


def store_in(directory: Path, num_slots: int = 8, key: bytes | None = None) -> DiskStore:
    return DiskStore(directory, "id", num_slots * SLOT_BYTES, BLOCK_BYTES, BLOCK_SIZE, key)


def content(number: int) -> Content:
    tokens = token_bytes_of([number] * BLOCK_SIZE)
    return Content(next_hash(7, tokens), 7, tokens, is_first=True)


def data_of(number: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)


def write(store: DiskStore, number: int) -> bool:
    block_hash, parent_hash, tokens, _ = content(number)
    assert block_hash is not None
    return store.write(block_hash, parent_hash, tokens, data_of(number))


def read(store: DiskStore, number: int) -> bool:
    """Whether the block is found; if it is, its bytes must be right."""
    block_hash, parent_hash, tokens, _ = content(number)
    assert block_hash is not None
    data = np.zeros(BLOCK_BYTES, np.uint8)
    if not store.read(block_hash, parent_hash, tokens, data):
        return False
    assert (data == data_of(number)).all()
    return True


def test_another_process_finds_what_was_written(tmp_path: Path) -> None:
    first, second = store_in(tmp_path), store_in(tmp_path)
    assert write(first, 1)
    assert not write(first, 1), "once is enough"
    assert not read(second, 1), "not known yet"
    second.refresh()
    assert read(second, 1)
    assert not write(second, 1)
    assert read(store_in(tmp_path), 1)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("key", [None, KEY])
def test_routers_hear_what_has_come_and_gone(tmp_path: Path, key: bytes | None) -> None:
    first, second = store_in(tmp_path, 2, key), store_in(tmp_path, 2, key)
    names = {number: content(number)[0] for number in range(4)}
    write(first, 0)
    write(first, 1)
    assert first.take_changes() == {names[0]: True, names[1]: True}
    assert first.take_changes() == {}
    second.refresh()
    seen = second.take_changes()
    if key is None:
        assert seen == {names[0]: True, names[1]: True}
    else:
        assert seen == {}, "only the hash that is looked for is known"
        assert second.has(names[0] or 0)
        assert second.take_changes() == {names[0]: True}
    write(second, 2)
    changes = second.take_changes()
    assert changes[names[2]] is True
    assert list(changes.values()).count(False) == (1 if key is None or names[0] in changes else 0)
    first.refresh()
    assert (False in first.take_changes().values()) is True
    third = store_in(tmp_path, 2, key)
    known = set(third.take_changes())
    assert known == (set() if key else {block_hash for block_hash in names.values() if third.has(block_hash or 0)})


def test_the_least_used_and_oldest_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    store = store_in(tmp_path, 3)
    for number in (1, 2, 3):
        now += 10
        write(store, number)
    store.count_hits([content(1).block_hash or 0])
    now += 10
    write(store, 4)
    assert [read(store, number) for number in (1, 2, 3, 4)] == [True, False, True, True]


def test_of_a_chain_that_was_found_the_end_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)
    store = store_in(tmp_path, 3)
    for number in (1, 2, 3):
        write(store, number)
    hashes = [content(number).block_hash or 0 for number in (2, 3, 1)]
    store.count_hits(hashes)
    write(store, 4)
    write(store, 5)
    assert [read(store, number) for number in (1, 2, 3, 4, 5)] == [False, True, True, False, True]


def test_what_memory_had_until_now_is_recent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    store = store_in(tmp_path, 3)
    for number in (1, 2, 3):
        now += 10
        write(store, number)
    now += 10
    store.touch(content(1).block_hash or 0)
    write(store, 4)
    assert [read(store, number) for number in (1, 2, 3, 4)] == [True, False, True, True]


@pytest.mark.parametrize("place", [3, 17, 39, 4096, 4096 + BLOCK_BYTES - 1])
def test_a_flipped_bit_is_found_and_the_block_forgotten(tmp_path: Path, place: int) -> None:
    store = store_in(tmp_path, 1)
    write(store, 1)
    path = next(tmp_path.glob("*.blocks"))
    raw = bytearray(path.read_bytes())
    raw[place] ^= 8
    path.write_bytes(raw)
    assert not read(store, 1)
    assert store.num_blocks == 0
    assert write(store, 1)
    assert read(store, 1)


def test_truncated_files_lose_blocks_and_nothing_else(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for number in range(8):
        write(store, number)
    os.truncate(next(tmp_path.glob("*.blocks")), 3 * SLOT_BYTES + 5000)
    assert sum(read(store, number) for number in range(8)) == 3


def test_a_reservation_that_was_killed_is_completed(tmp_path: Path) -> None:
    write(store_in(tmp_path), 1)
    os.truncate(next(tmp_path.glob("*.blocks")), 3 * SLOT_BYTES + 5000)
    store = store_in(tmp_path)
    assert read(store, 1)
    assert next(tmp_path.glob("*.blocks")).stat().st_size == 8 * SLOT_BYTES
    with pytest.raises(ConfigurationError, match="another --kv-disk-gb"):
        store_in(tmp_path, 9)


def test_a_disk_that_becomes_full_has_room_for_the_whole_index(tmp_path: Path) -> None:
    """A store to a mapped page without room on the disk would be a SIGBUS."""
    directory = tmp_path / "large"
    slots = 2000
    DiskStore(directory, "id", slots * 8192, 16, BLOCK_SIZE)
    index = next(directory.glob("*.index")).stat()
    assert 512 * index.st_blocks >= index.st_size > 16 * slots


def test_a_block_that_cannot_be_read_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in(tmp_path)
    write(store, 1)

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(store, "_get", fails)
    with pytest.raises(OSError, match="injected"):
        read(store, 1)
    assert not store.has(content(1).block_hash or 0)
    assert not read(store, 1)


def test_a_collision_of_hashes_is_no_hit(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    write(store, 1)
    block_hash, parent_hash, _, _ = content(1)
    assert block_hash is not None
    other = token_bytes_of([9] * BLOCK_SIZE)
    assert not store.read(block_hash, parent_hash, other, np.zeros(BLOCK_BYTES, np.uint8))


@pytest.mark.parametrize(
    ("size", "message"), [(100, "is too small for a block"), (1 << 50, "too little room"), (9 * SLOT_BYTES, "another")]
)
def test_a_size_that_is_not_possible_is_refused(tmp_path: Path, size: int, message: str) -> None:
    if message == "another":
        store_in(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        DiskStore(tmp_path, "id", size, BLOCK_BYTES, BLOCK_SIZE)


_WRITER = """
import sys
from pathlib import Path
from tests.worker.kv.test_disk_tier import read, store_in, write
store = store_in(Path(sys.argv[1]))
print("ready", flush=True)
number = int(sys.argv[2])
while True:
    number = (number * 5 + 3) % 31
    write(store, number)
    store.refresh()
    read(store, (number * 7) % 31)
"""


def test_processes_that_are_killed_while_they_write_never_leave_a_wrong_block(tmp_path: Path) -> None:
    rng = random.Random(1)
    store = store_in(tmp_path)
    num_found = 0
    for number in range(6):
        writers = [
            subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path), str(seed)], stdout=subprocess.PIPE)
            for seed in (number, number + 3)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
        end_s = time.monotonic() + rng.uniform(0.05, 0.3)
        while time.monotonic() < end_s:
            store.refresh()
            num_found += sum(read(store, block) for block in range(31))
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        store.refresh()
        num_found += sum(read(store, block) for block in range(31))
    assert num_found > 6


class Worker:
    """An engine over a fake runner whose evicted blocks go to the disk, and the thread's work in between steps."""

    def __init__(self, directory: Path, key: bytes | None = None) -> None:
        shape = BlockShape(1, BLOCK_SIZE, 8)
        runner = FakeRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE)
        contents = BlockBytes([runner.blocks.view(np.uint8).reshape(-1)], [shape])
        self.store = DiskStore(directory, "fake", 200 * 8192, shape.num_bytes, BLOCK_SIZE, key)
        self.tier = DiskTier(self.store, contents, shape.num_bytes)
        costs, limits = KnownCosts(1.0, 50.0), StepLimits(4, 16, 16, is_exact=True)
        kept = Persistence(spill=self.tier)
        engine = build_engine(runner, BatchSampler(), NUM_BLOCKS, limits, step_costs=costs, persistence=kept)
        self.under_test = EngineUnderTest(engine, runner)
        self.pool = engine.scheduler.kv_cache.pool
        self.fetching = Fetching(engine.scheduler, self.tier)
        self.under_test.fetch_first = self.fetching.begin_late
        self.tier.start()

    def request(self, prompt: list[int], max_tokens: int = 2) -> Request:
        return Request("r", prompt, SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0), 1)

    def ask(self, prompt: list[int], max_tokens: int = 2) -> Request:
        """Send a request as the engine's thread does, and check the answer."""
        request = self.request(prompt, max_tokens)
        self.under_test.tokens[request] = []
        if self.fetching.begin(request):
            until(lambda: self.under_test.scheduler.has_requests or self.add_ready())
        else:
            self.under_test.scheduler.add(request)
        while self.under_test.scheduler.has_requests or self.under_test.engine.has_outputs or self.fetching.num_held:
            self.under_test.step()
            self.add_ready()
        assert self.under_test.tokens[request] == expected_tokens(prompt, max_tokens, VOCAB_SIZE)
        return request

    def add_ready(self) -> bool:
        ready = self.fetching.take_ready()
        for request in ready:
            self.under_test.scheduler.add(request)
        return bool(ready)

    def evict_all(self) -> None:
        """Evict everything to the disk with other prompts."""
        self.pool.release(self.pool.take(NUM_BLOCKS))
        until(lambda: not self.tier._spills and not self.tier._num_unflushed)
        assert self.pool.num_cached_blocks == 0


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + patience(BOUND_S)
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr(disk_tier, "WRITE_SHARE", 1.0)
    # A busy machine may read slowly.
    monkeypatch.setattr(fetching, "_LEAST_PATIENCE_S", BOUND_S)
    made = Worker(tmp_path)
    yield made
    made.tier.stop()


PROMPT = list(range(200, 200 + 6 * BLOCK_SIZE + 2))


def test_what_was_evicted_comes_back_from_the_disk(worker: Worker) -> None:
    worker.ask(PROMPT)
    worker.evict_all()
    request = worker.ask([*PROMPT[:-2], 1, 2, 3])
    assert request.num_cached_tokens == 6 * BLOCK_SIZE
    assert worker.tier.num_read == 6
    assert worker.pool.take_events()[0], "routers hear of them"
    worker.pool.check()
    assert worker.pool.num_free_blocks == NUM_BLOCKS


def test_only_what_memory_lacks_is_read(worker: Worker) -> None:
    worker.ask(PROMPT)
    worker.evict_all()
    worker.ask(PROMPT[: 3 * BLOCK_SIZE + 2])
    assert worker.tier.num_read == 3
    worker.ask(PROMPT)
    assert worker.tier.num_read == 6


def test_another_worker_of_the_host_reads_what_this_one_wrote(worker: Worker, tmp_path: Path) -> None:
    worker.ask(PROMPT)
    worker.evict_all()
    other = Worker(tmp_path)
    assert other.ask(PROMPT).num_cached_tokens == 6 * BLOCK_SIZE
    other.tier.stop()


def test_an_idle_worker_learns_what_others_of_the_host_wrote(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "_LOOK_S", 0.01)
    other, arrivals = Worker(tmp_path), list[int]()
    other.tier.on_arrival = lambda: arrivals.append(1)
    worker.ask(PROMPT)
    worker.evict_all()
    written = {block_hash for block_hash, is_there in worker.tier.take_changes().items() if is_there}
    assert len(written) == 6
    until(lambda: all(other.tier.has(block_hash) for block_hash in written))
    until(lambda: other.tier.has_news and bool(arrivals))
    assert written <= set(other.tier.take_changes()), "the report to routers has them"
    assert other.tier.num_blocks == 6
    other.tier.stop()


def test_an_idle_worker_reports_nothing_if_nothing_changed(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "_LOOK_S", 0.001)
    looks, refresh = list[int](), worker.store.refresh
    monkeypatch.setattr(worker.store, "refresh", lambda: [looks.append(1), refresh()][1])
    with worker.tier._changed:
        worker.tier._next_look_s = 0.0
        worker.tier._changed.notify()
    until(lambda: len(looks) > 3)
    assert not worker.tier.has_news


def test_a_look_at_the_index_that_fails_ends_nothing(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    tries, refresh = list[int](), worker.store.refresh

    def fails_once() -> bool:
        tries.append(1)
        if len(tries) == 1:
            raise MemoryError("injected")
        return refresh()

    monkeypatch.setattr(disk_tier, "_PAUSE_AFTER_FAILURE_S", 0.0)
    monkeypatch.setattr(worker.store, "refresh", fails_once)
    with worker.tier._changed:
        worker.tier._next_look_s = 0.0
        worker.tier._changed.notify()
    until(lambda: len(tries) > 1)
    worker.ask(PROMPT)
    worker.evict_all()
    assert worker.ask(PROMPT).num_cached_tokens == 6 * BLOCK_SIZE


def test_the_engines_thread_never_touches_the_mapped_index(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store to a page of a mapped file waits for the disk while that writes the page back."""
    monkeypatch.setattr(disk_tier, "_LOOK_S", 0.01)
    threads, touched, stamp = set[threading.Thread](), list[int](), worker.store._index._stamp

    def stamped(slot: int) -> None:
        threads.add(threading.current_thread())
        touched.append(slot)
        stamp(slot)

    monkeypatch.setattr(worker.store._index, "_stamp", stamped)
    worker.ask(PROMPT)
    worker.evict_all()
    assert worker.ask(PROMPT).num_cached_tokens == 6 * BLOCK_SIZE
    num_before = len(touched)
    worker.evict_all()
    until(lambda: len(touched) == num_before + 6)
    assert threads == {worker.tier}


def test_the_queue_of_blocks_in_use_is_bounded(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    tier = DiskTier(store, BlockBytes([np.zeros(256, np.uint8)], [BlockShape(1, BLOCK_SIZE, 8)]), BLOCK_BYTES)
    write(store, 1)
    for _ in range(2 * disk_tier.MAX_TOUCHED):
        tier.spill(0, NO_SLOT, content(1))
    assert len(tier._touched) == disk_tier.MAX_TOUCHED


def test_a_prompt_that_is_cheaper_to_compute_is_computed(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.ask(PROMPT)
    worker.evict_all()
    worker.tier.read_time = LearnedTime(3600.0)
    assert worker.ask(PROMPT).num_cached_tokens == 0
    worker.tier.stop()


def test_images_that_are_slow_to_encode_are_worth_a_slow_disk(worker: Worker) -> None:
    """The time of the encoder counts, for the blocks that are to be read."""
    asked = list[tuple[int, int]]()

    def encode_s(request: Request, begin: int, end: int) -> float:
        asked.append((begin, end))
        return 1e6

    worker.fetching = Fetching(worker.under_test.scheduler, worker.tier, encode_s=encode_s)
    worker.under_test.fetch_first = worker.fetching.begin_late
    worker.ask(PROMPT)
    worker.evict_all()
    worker.tier.read_time = LearnedTime(3600.0)
    num_cached = worker.ask(PROMPT).num_cached_tokens
    assert num_cached > 0
    assert (0, num_cached) in asked


def test_damage_on_the_disk_costs_a_computation_and_no_wrong_token(worker: Worker, tmp_path: Path) -> None:
    worker.ask(PROMPT)
    worker.evict_all()
    path = next(tmp_path.glob("*.blocks"))
    raw = bytearray(path.read_bytes())
    slots = [slot for slot in range(6) if raw[slot * 8192 : slot * 8192 + 8] != bytes(8)]
    raw[slots[2] * 8192 + 4096 + 5] ^= 1
    path.write_bytes(raw)
    assert worker.ask(PROMPT).num_cached_tokens < 6 * BLOCK_SIZE
    assert worker.pool.num_free_blocks == NUM_BLOCKS
    worker.pool.check()


def test_a_request_that_is_cancelled_while_it_waits_leaves_no_block_behind(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.ask(PROMPT)
    worker.evict_all()
    gate = hanging(worker, monkeypatch)
    request = worker.request(PROMPT)
    assert worker.fetching.begin(request)
    assert worker.fetching.num_held == 1
    assert worker.pool.num_free_blocks == NUM_BLOCKS - 6
    assert worker.fetching.cancel(request)
    assert not worker.fetching.cancel(request)
    assert request.state is RequestState.FINISHED
    assert worker.fetching.num_held == 0
    gate.set()
    until(lambda: bool(worker.fetching.take_ready()) or worker.pool.num_free_blocks == NUM_BLOCKS)
    worker.pool.check()
    assert not worker.under_test.scheduler.has_requests
    stats = worker.under_test.scheduler.stats
    assert stats.requests_admitted == stats.requests_finished + stats.requests_cancelled


def test_a_disk_that_hangs_costs_the_computation(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_LEAST_PATIENCE_S", 0.25)
    worker.ask(PROMPT)
    worker.evict_all()
    gate = hanging(worker, monkeypatch)
    monkeypatch.setattr("headrace.worker.engine.fetching._PATIENCE", 0.0)
    start_s = time.monotonic()
    worker.ask(PROMPT)
    assert 0.2 < time.monotonic() - start_s < BOUND_S
    assert worker.tier.num_read == 0
    gate.set()
    until(lambda: worker.fetching.take_ready() == [] and worker.under_test.scheduler.num_fetching == 0)
    worker.pool.check()
    assert worker.pool.num_free_blocks == NUM_BLOCKS


def test_a_disk_that_hangs_gives_the_blocks_of_a_large_prompt_back(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the prompt can be computed before the read returns, and the late bytes harm nobody."""
    prompts = [[start + number for number in range(16 * BLOCK_SIZE + 2)] for start in (200, 300)]
    for prompt in prompts:
        worker.ask(prompt)
        worker.evict_all()
    gate = hanging(worker, monkeypatch)
    requests = [worker.request(prompt) for prompt in prompts]
    for request in requests:
        worker.under_test.tokens[request] = []
        assert worker.fetching.begin(request)
    assert worker.pool.num_free_blocks == 0
    until(lambda: worker.tier._busy_since_s > 0)
    for held in worker.fetching._held.values():
        held.deadline_s = 0.0
    assert worker.add_ready()
    assert worker.fetching.num_held == 0
    assert worker.pool.num_free_blocks == NUM_BLOCKS
    for _ in range(4):
        worker.under_test.step()
    assert requests[0].num_computed_tokens
    gate.set()
    until(lambda: worker.tier._reading is None and not worker.tier._fetches)
    worker.add_ready()
    worker.under_test.run()
    for request, prompt in zip(requests, prompts, strict=True):
        assert worker.under_test.tokens[request] == expected_tokens(prompt, 2, VOCAB_SIZE)
    assert worker.tier.num_read == 0
    worker.pool.check()


def test_a_request_that_no_longer_waits_for_its_blocks_is_not_counted_as_held(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_LEAST_PATIENCE_S", 0.0)
    monkeypatch.setattr(fetching, "_PATIENCE", 0.0)
    worker.ask(PROMPT)
    worker.evict_all()
    gate = hanging(worker, monkeypatch)
    assert worker.fetching.begin(worker.request(PROMPT))
    assert worker.fetching.num_held == 1
    until(lambda: bool(worker.add_ready()))
    assert len(worker.under_test.scheduler.waiting) == 1
    assert worker.fetching.num_held == 0, "the scheduler counts it now"
    gate.set()
    until(lambda: worker.fetching.take_ready() == [] and worker.under_test.scheduler.num_fetching == 0)


def hanging(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Reads wait for the event."""
    gate = threading.Event()
    read_really = worker.store.read

    def read_late(*args: object) -> bool:
        gate.wait(patience(BOUND_S))
        return read_really(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(worker.store, "read", read_late)
    return gate


def test_requests_with_the_same_prefix_fetch_it_once(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n choices of a chat, or many chats with one system prompt."""
    worker.ask(PROMPT)
    worker.evict_all()
    gate = hanging(worker, monkeypatch)
    prompts = [[*PROMPT[:-2], number, *range(300, 330)] for number in range(4)]
    requests = begin_all(worker, prompts)
    assert worker.fetching.num_held == 4
    assert worker.pool.num_free_blocks == NUM_BLOCKS - 6
    gate.set()
    finish_all(worker, requests, prompts)
    assert worker.tier.num_read == 6
    assert [request.num_cached_tokens for request in requests] == [6 * BLOCK_SIZE] * 4
    assert sum(request.num_disk_tokens for request in requests) == 6 * BLOCK_SIZE


def test_a_request_fetches_what_the_fetch_of_another_one_left(worker: Worker) -> None:
    longer = [*PROMPT[:-2], *range(300, 300 + 4 * BLOCK_SIZE + 2)]
    for prompt in (PROMPT, longer):
        worker.ask(prompt)
        worker.evict_all()
    assert worker.tier.num_read == 6, "of the second one"
    prompts = [PROMPT, longer, longer, PROMPT]
    finish_all(worker, begin_all(worker, prompts), prompts)
    assert worker.tier.num_read == 6 + 6 + 4


def test_when_the_request_that_fetches_is_cancelled_another_one_fetches(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.ask(PROMPT)
    worker.evict_all()
    gate = hanging(worker, monkeypatch)
    requests = begin_all(worker, [PROMPT] * 5)
    for cancelled in (requests[0], requests[2]):
        assert worker.fetching.cancel(cancelled)
        assert not worker.fetching.cancel(cancelled)
    assert worker.fetching.num_held == 3
    assert worker.pool.num_free_blocks == NUM_BLOCKS
    assert not worker.add_ready()
    assert worker.fetching.num_held == 3
    assert worker.pool.num_free_blocks == NUM_BLOCKS - 6
    gate.set()
    rest = [requests[1], requests[3], requests[4]]
    finish_all(worker, rest, [PROMPT] * 3)
    assert worker.tier.num_read == 6
    assert all(request.num_cached_tokens == 6 * BLOCK_SIZE for request in rest)


def test_a_request_waits_for_others_no_longer_than_for_itself(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many fetches it waits for."""
    monkeypatch.setattr(fetching, "_LEAST_PATIENCE_S", 0.25)
    now_s = 0.0
    worker.fetching._clock = lambda: now_s
    worker.ask(PROMPT)
    worker.evict_all()
    gate = hanging(worker, monkeypatch)
    patient, *others = begin_all(worker, [PROMPT] * 4)[::-1]
    compute_s = worker.under_test.scheduler.step_costs.prompts.chunk_ms(0, 6 * BLOCK_SIZE) / 1000
    for cancelled in others[::-1]:
        now_s += 0.3 * compute_s
        assert worker.fetching.cancel(cancelled)
        assert not worker.add_ready()
    assert worker.fetching.num_held == 1
    now_s = 1.99 * compute_s
    assert not worker.add_ready()
    now_s = 2.01 * compute_s
    assert worker.add_ready()
    assert worker.pool.num_free_blocks == NUM_BLOCKS
    worker.under_test.run()
    assert worker.under_test.tokens[patient] == expected_tokens(PROMPT, 2, VOCAB_SIZE)
    gate.set()


def test_a_request_may_give_up_the_fetch_of_another_one_before_that_does(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_LEAST_PATIENCE_S", 0.25)
    now_s = 0.0
    worker.fetching._clock = lambda: now_s
    worker.ask(PROMPT)
    worker.evict_all()
    gate = hanging(worker, monkeypatch)
    first, pressed = worker.request(PROMPT), worker.request(PROMPT)
    pressed.deadline_s = 0.1
    for request in (first, pressed):
        worker.under_test.tokens[request] = []
        assert worker.fetching.begin(request)
    now_s = 0.3
    assert worker.fetching.take_ready() == [pressed]
    assert worker.fetching.num_held == 1
    worker.under_test.scheduler.add(pressed)
    worker.under_test.step()
    assert pressed.num_computed_tokens, "it is not held a second time when its turn comes"
    gate.set()
    finish_all(worker, [first, pressed], [PROMPT, PROMPT])


def test_nobody_waits_for_a_long_fetch_of_which_a_short_part_is_needed(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.ask(PROMPT)
    worker.evict_all()
    worker.tier.read_time = LearnedTime(0.04)
    gate = hanging(worker, monkeypatch)
    requests = begin_all(worker, [PROMPT])
    assert not worker.fetching.begin(worker.request([*PROMPT[:BLOCK_SIZE], 1, 2]))
    gate.set()
    finish_all(worker, requests, [PROMPT])


def test_a_request_whose_turn_comes_waits_for_the_fetch_of_another_one(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.ask(PROMPT)
    worker.evict_all()
    gate = hanging(worker, monkeypatch)
    first, second = worker.request(PROMPT), worker.request(PROMPT)
    scheduler = worker.under_test.scheduler
    for request in (first, second):
        worker.under_test.tokens[request] = []
        scheduler.add(request)
    worker.under_test.step()
    assert (scheduler.waiting, scheduler.running, worker.fetching.num_held) == ([], [], 2)
    assert worker.pool.num_free_blocks == NUM_BLOCKS - 6
    gate.set()
    finish_all(worker, [first, second], [PROMPT] * 2)
    assert worker.tier.num_read == 6
    assert scheduler.stats.requests_admitted == scheduler.stats.requests_finished == 3


def test_only_tokens_of_prompts_that_were_found_count_as_read_from_the_disk(worker: Worker) -> None:
    """Not those that are evicted before their request is scheduled, nor those of the beginning of an answer."""

    def num_counted() -> int:
        return worker.fetching.counters()["prompt_tokens_from_disk"]

    worker.ask(PROMPT)
    worker.evict_all()
    [request] = begin_all(worker, [PROMPT])
    until(worker.add_ready)
    worker.evict_all()
    request.was_fetched_for = True
    finish_all(worker, [request], [PROMPT])
    assert (worker.tier.num_read, request.num_cached_tokens, num_counted()) == (6, 0, 0)
    worker.evict_all()
    sampling = SamplingParams(max_tokens=4 * BLOCK_SIZE, seed=0, temperature=0.0)
    resumed = Request("r", PROMPT[: 3 * BLOCK_SIZE], sampling, 1, resume_token_ids=PROMPT[3 * BLOCK_SIZE :])
    worker.under_test.tokens[resumed] = list(resumed.resume_token_ids)
    assert worker.fetching.begin(resumed)
    until(worker.add_ready)
    worker.under_test.run()
    assert (worker.tier.num_read, resumed.num_cached_tokens, num_counted()) == (12, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE)


def begin_all(worker: Worker, prompts: list[list[int]]) -> list[Request]:
    """Hold requests that all have to wait."""
    requests = [worker.request(prompt) for prompt in prompts]
    for request in requests:
        worker.under_test.tokens[request] = []
        assert worker.fetching.begin(request)
    return requests


def finish_all(worker: Worker, requests: list[Request], prompts: list[list[int]]) -> None:
    """Answer the requests, and check the answers and the blocks."""

    def step() -> bool:
        worker.add_ready()
        worker.under_test.step()
        return all(request.state is RequestState.FINISHED for request in requests)

    until(step)
    for request, prompt in zip(requests, prompts, strict=True):
        assert worker.under_test.tokens[request] == expected_tokens(prompt, 2, VOCAB_SIZE)
    worker.pool.check()
    assert worker.pool.num_free_blocks == NUM_BLOCKS


def test_a_full_disk_stores_nothing_and_harms_nobody(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(worker.store, "write", full)
    worker.ask(PROMPT)
    worker.evict_all()
    assert worker.tier.num_written == 0
    assert worker.ask(PROMPT).num_cached_tokens == 0


@pytest.mark.parametrize("error", [OSError(errno.EIO, "injected"), MemoryError("injected")])
def test_a_failure_costs_the_computation_and_the_disk_is_left_alone_for_a_while(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    worker.ask(PROMPT)
    worker.evict_all()
    tries = []

    def fails(*_: object) -> bool:
        tries.append(1)
        raise error

    read_really = worker.store.read
    monkeypatch.setattr(worker.store, "read", fails)
    assert worker.ask(PROMPT).num_cached_tokens == 0
    worker.evict_all()
    assert worker.ask(PROMPT).num_cached_tokens == 0
    assert len(tries) == 1, "nobody waited for it again"
    assert worker.pool.num_free_blocks == NUM_BLOCKS
    monkeypatch.setattr(worker.store, "read", read_really)
    worker.evict_all()
    worker.tier._no_reads_until_s = 0.0
    assert worker.ask(PROMPT).num_cached_tokens == 6 * BLOCK_SIZE


def test_nobody_waits_for_a_disk_that_hangs_already(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    other = PROMPT[::-1]
    worker.ask(PROMPT)
    worker.ask(other)
    worker.evict_all()
    gate = hanging(worker, monkeypatch)
    assert worker.fetching.begin(worker.request(PROMPT))
    until(lambda: worker.tier._busy_since_s > 0)
    worker.tier._busy_since_s -= 60.0
    assert not worker.fetching.begin(worker.request(other))
    next(iter(worker.fetching._held.values())).since_s -= 60.0
    assert not worker.fetching.begin(worker.request(PROMPT))
    gate.set()
    until(worker.add_ready)


def test_what_is_learned_of_speed_survives_a_pause_and_is_forgotten_in_time() -> None:
    now_s = 0.0
    learned = LearnedTime(0.001, lambda: now_s)
    for _ in range(50):
        learned.observe(0.002)
    assert learned.seconds == pytest.approx(0.002, rel=0.01)
    learned.observe(30.0)
    assert learned.seconds < 0.01, "one pause says little"
    for _ in range(60):
        learned.observe(0.5)
    assert learned.seconds == pytest.approx(0.5, rel=0.01)
    now_s = 60.0
    assert learned.seconds == pytest.approx(0.25, rel=0.02)
    now_s = 3600.0
    assert learned.seconds == pytest.approx(0.001, rel=0.01)
    for _ in range(50):
        learned.observe(0.0005)
    now_s += 3600.0
    assert learned.seconds == pytest.approx(0.0005, rel=0.01), "a fast one stays"


def test_a_request_waits_no_longer_than_its_deadline_and_the_expected_time_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(tmp_path)
    prompts = iter([[start + token for token in PROMPT] for start in (0, 100, 200, 300)])
    for start in (0, 100, 200, 300):
        worker.ask([start + token for token in PROMPT])
    worker.evict_all()
    gate, fetches = hanging(worker, monkeypatch), []
    fetch = worker.tier.fetch
    monkeypatch.setattr(worker.tier, "fetch", lambda each: [fetches.append(each), fetch(each)])
    costs = worker.under_test.scheduler.step_costs.prompts
    compute_s = costs.chunk_ms(0, 6 * BLOCK_SIZE) / 1000
    for deadline_s in (math.inf, time.monotonic() + compute_s + 1.0, time.monotonic()):
        request = worker.request(next(prompts))
        request.deadline_s = deadline_s
        assert worker.fetching.begin(request)
    monkeypatch.setattr(type(costs), "chunk_ms", lambda *_: 3_600_000.0)
    assert worker.fetching.begin(worker.request(next(prompts)))
    patient, pressed, late, long = (each.timeout_s for each in fetches)
    assert patient == pytest.approx(2 * compute_s)
    assert 0.25 < pressed < 1.1
    assert late == 0.25
    assert 5.0 <= long < 60.0
    gate.set()
    until(lambda: not worker.add_ready() and not worker.under_test.scheduler.num_fetching)
    worker.tier.stop()


def test_a_request_that_needs_the_whole_pool_waits_for_what_the_disk_fills(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.ask(PROMPT)
    worker.evict_all()
    gate = hanging(worker, monkeypatch)
    held = worker.request(PROMPT)
    worker.under_test.tokens[held] = []
    assert worker.fetching.begin(held)
    large = worker.request(list(range(NUM_BLOCKS * BLOCK_SIZE - 4)), 3)
    worker.under_test.tokens[large] = []
    worker.under_test.scheduler.add(large)
    for _ in range(30):
        worker.under_test.engine.advance(lambda _: None, worker.fetching.begin_late)
    assert not large.first_token_s
    gate.set()
    until(worker.add_ready)
    worker.under_test.run()
    assert worker.under_test.tokens[large] == expected_tokens(list(range(NUM_BLOCKS * BLOCK_SIZE - 4)), 3, VOCAB_SIZE)
    assert worker.under_test.tokens[held] == expected_tokens(PROMPT, 2, VOCAB_SIZE)


def test_a_request_that_waits_for_blocks_copies_no_beginning_for_a_step_that_does_not_come(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.ask(PROMPT)
    worker.evict_all()
    stem = list(range(500, 500 + 3 * BLOCK_SIZE + 3))
    worker.ask(stem)
    gate = hanging(worker, monkeypatch)
    held = worker.request(PROMPT)
    worker.under_test.tokens[held] = []
    assert worker.fetching.begin(held)
    others = worker.pool.take(worker.pool.num_free_blocks - 5)  # the stem's blocks, and one more
    prompt = [*stem[:-1], *range(600, 600 + 5 * BLOCK_SIZE)]
    request = worker.request(prompt)
    worker.under_test.tokens[request] = []
    worker.under_test.scheduler.add(request)
    for _ in range(3):
        assert not worker.under_test.step()
    gate.set()
    until(worker.add_ready)
    worker.pool.release(others)
    worker.under_test.run()
    assert worker.under_test.tokens[request] == expected_tokens(prompt, 2, VOCAB_SIZE)


def test_only_what_the_request_may_reuse_is_read(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that gives up blocks computes the last tokens of its prompt itself."""
    worker.ask(PROMPT)
    worker.evict_all()
    cache = worker.under_test.scheduler.kv_cache
    monkeypatch.setattr(cache, "num_reusable", lambda request: request.num_prompt_tokens - 9)
    worker.ask(PROMPT)
    assert worker.tier.num_read == (len(PROMPT) - 9) // BLOCK_SIZE


def test_no_more_is_read_than_the_pool_has_room_for_beside_the_cached_beginning(worker: Worker) -> None:
    worker.ask(PROMPT)
    worker.evict_all()
    worker.ask(PROMPT[: 3 * BLOCK_SIZE + 2])
    others = worker.pool.take(NUM_BLOCKS - 5)
    request = worker.request(PROMPT)
    worker.under_test.tokens[request] = []
    assert worker.fetching.begin(request)
    assert worker.pool.num_free_blocks == 0
    until(worker.add_ready)
    worker.pool.release(others)
    worker.under_test.run()
    assert request.num_cached_tokens == 5 * BLOCK_SIZE
    assert worker.under_test.tokens[request] == expected_tokens(PROMPT, 2, VOCAB_SIZE)
    worker.pool.check()


def test_what_has_no_room_when_it_comes_is_read_when_its_turn_comes(worker: Worker) -> None:
    worker.ask(PROMPT)
    worker.evict_all()
    scheduler = worker.under_test.scheduler
    long, request = worker.request([1, 2, 3], NUM_BLOCKS * BLOCK_SIZE - 4), worker.request(PROMPT)
    worker.under_test.tokens[long], worker.under_test.tokens[request] = [], []
    scheduler.add(long)
    worker.under_test.step()
    assert not worker.fetching.begin(request), "all blocks may be needed by the first"
    scheduler.add(request)
    worker.under_test.step()
    assert (scheduler.waiting, scheduler.running, scheduler.num_fetching) == ([], [long], 1)
    until(worker.add_ready)
    worker.under_test.run()
    assert request.num_disk_tokens == request.num_cached_tokens == 6 * BLOCK_SIZE
    assert worker.under_test.tokens[request] == expected_tokens(PROMPT, 2, VOCAB_SIZE)
    assert scheduler.stats.requests_admitted == scheduler.stats.requests_finished == 3
    assert worker.pool.num_free_blocks == NUM_BLOCKS


def test_many_requests_at_once_in_a_small_pool_get_the_right_tokens_and_leave_no_block(worker: Worker) -> None:
    rng = random.Random(6)
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(60)] for _ in range(8)]
    scheduler, running, num_done = worker.under_test.scheduler, list[Request](), 0
    while num_done < 300 or running:
        if num_done < 300 and len(running) < 6 and rng.random() < 0.4:
            prompt = [*rng.choice(stems)[: rng.randint(4, 60)], rng.randrange(VOCAB_SIZE), 5]
            request = worker.request(prompt, rng.randint(1, 30))
            worker.under_test.tokens[request] = []
            running.append(request)
            if not worker.fetching.begin(request):
                scheduler.add(request)
        elif running and rng.random() < 0.02:
            request = running.pop(rng.randrange(len(running)))
            if not worker.fetching.cancel(request):
                scheduler.cancel(request)
            num_done += 1
        worker.add_ready()
        worker.under_test.step()
        worker.pool.check()
        for request in [each for each in running if each.state is RequestState.FINISHED]:
            running.remove(request)
            num_done += 1
            prompt, max_tokens = request.token_ids[: request.num_prompt_tokens], request.sampling.max_tokens
            assert worker.under_test.tokens[request] == expected_tokens(prompt, max_tokens, VOCAB_SIZE)
    until(lambda: worker.fetching.take_ready() == [] and scheduler.num_fetching == 0)
    assert worker.tier.num_read > 25
    assert worker.pool.num_free_blocks == NUM_BLOCKS


def test_random_prompts_in_a_small_pool_always_get_the_right_tokens(worker: Worker) -> None:
    rng = random.Random(5)
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(40)] for _ in range(6)]
    for _ in range(150):
        stem = rng.choice(stems)
        worker.ask([*stem[: rng.randint(4, 40)], rng.randrange(VOCAB_SIZE), 5], rng.randint(1, 6))
        worker.pool.check()
    assert worker.tier.num_read > 25


def test_a_fetch_of_nothing_known_reads_nothing(worker: Worker) -> None:
    fetch = Fetch([])
    worker.tier.fetch(fetch)
    until(lambda: worker.tier.take_ended() == [fetch])
