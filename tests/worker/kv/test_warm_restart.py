"""KV caches that outlive their process: restored blocks, discarded blocks, and death at any moment.

`make test` kills 40 processes in the middle of a line; HEADRACE_SOAK=1 kills 1,000.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.worker.config import ConfigurationError
from headrace.worker.engine.build import build_engine
from headrace.worker.kv import host_memory
from headrace.worker.kv.block_bytes import BlockBytes, BlockShape, aligned
from headrace.worker.kv.fetch import Persistence
from headrace.worker.kv.groups.window import WindowBudget
from headrace.worker.kv.host_memory import HostMemory, open_memory
from headrace.worker.kv.kept_cache import MAX_STARTS, CacheFormat, KeptCache
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.request.request import Request
from headrace.worker.sampling.sampler import BatchSampler
from tests.patience import patience
from tests.worker.conftest import BLOCK_SIZE, CHEAP_STEPS, VOCAB_SIZE, EngineUnderTest
from tests.worker.fake_runner import FakeRunner, expected_tokens
from tests.worker.kv.groups.windowed_runner import WindowedRunner

NUM_BLOCKS = 24
NUM_DEATHS = 1000 if os.environ.get("HEADRACE_SOAK") == "1" else 20
SEED = int(os.environ.get("HEADRACE_SEED", "1"))
FINGERPRINT = "f" * 64
SHAPE = BlockShape(1, BLOCK_SIZE, 8)
FORMAT = CacheFormat("fake", "", NUM_BLOCKS + 1, BLOCK_SIZE, (SHAPE,))
# Of a model with a layer whose window is two blocks. Its parts are in slots, between the blocks of two other layers.
WINDOW, NUM_SLOTS = 8, 22
TRIMMED = CacheFormat("fake", "", NUM_BLOCKS + 1, BLOCK_SIZE, (SHAPE, SHAPE), NUM_SLOTS + 1, (False, True))
ROOT = Path(__file__).parents[3]
TRACED = (
    *(str(ROOT / "worker" / name) for name in ("kv", "engine")),
    *(str(ROOT / "tests/worker" / name) for name in ("fake_runner.py", "kv/groups/windowed_runner.py")),
)
PROMPT = list(range(100, 100 + 4 * BLOCK_SIZE + 3))


def new_memory() -> HostMemory:
    return HostMemory(os.memfd_create("test"))


@dataclass
class Life:
    """A worker's process: an engine over memory that outlives it."""

    kept: KeptCache
    under_test: EngineUnderTest

    @property
    def num_restored(self) -> int:
        return self.under_test.scheduler.kv_cache.pool.num_restored

    def ask(self, prompt: list[int], max_tokens: int = 3) -> Request:
        request = self.under_test.request(prompt, max_tokens)
        self.under_test.run()
        assert self.under_test.tokens[request] == expected_tokens(prompt, max_tokens, VOCAB_SIZE)
        return request


def live(memory: HostMemory, fingerprint: str = FINGERPRINT, wanted: CacheFormat = FORMAT) -> Life:
    """Start as a worker does: check, adopt, warm up, restore."""
    kept = KeptCache(memory, 2)
    arena = kept.adopt(wanted)
    runner = FakeRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE)
    groups = []
    if wanted.num_slots:
        runner = windowed = WindowedRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE, NUM_SLOTS, WINDOW)
        groups.append(WindowBudget(WINDOW, NUM_SLOTS, 16 // BLOCK_SIZE))
    runner.blocks = arena.take((NUM_BLOCKS + 1) * SHAPE.num_bytes).view(np.int64).reshape(-1, BLOCK_SIZE)
    if wanted.num_slots:
        windowed.parts = arena.take((NUM_SLOTS + 1) * SHAPE.num_bytes).view(np.int64).reshape(-1, BLOCK_SIZE)
    limits = StepLimits(4, 16, 16, is_exact=True)
    engine = build_engine(
        runner,
        BatchSampler(),
        NUM_BLOCKS,
        limits,
        step_costs=CHEAP_STEPS,
        persistence=Persistence(kept.journal, kept.part_journal),
        groups=groups,
    )
    engine.scheduler.kv_cache.take_last(kept.old_blocks(), kept.old_slots())
    under_test = EngineUnderTest(engine, runner, is_pipelined=True)
    warm_up = under_test.request([1] * 10, 2)
    under_test.scheduler.waiting.remove(warm_up)
    engine.warm_up(warm_up)
    kept.restore(engine.scheduler.kv_cache, fingerprint)
    kept.note_ready()
    under_test.scheduler.check()
    return Life(kept, under_test)


def after_death(memory: HostMemory) -> HostMemory:
    """A copy of the memory, as the next process finds it."""
    copy = new_memory()
    os.ftruncate(copy.descriptor, memory.size_bytes)
    if memory.size_bytes:
        copy.map()[:] = memory.map()
    return copy


@pytest.mark.parametrize("wanted", [FORMAT, TRIMMED], ids=["whole", "trimmed"])
def test_the_next_process_has_the_prefixes_of_the_one_before(wanted: CacheFormat) -> None:
    memory = new_memory()
    first = live(memory, wanted=wanted)
    first.ask(PROMPT)
    stored = frozenset(first.under_test.scheduler.kv_cache.pool._block_of_hash)
    second = live(after_death(memory), wanted=wanted)
    request = second.ask([*PROMPT, 7, 8, 9])
    # Four whole blocks, and of the last one what was computed before: three tokens of the prompt and one of the answer
    # are in it, and the first three are the same.
    assert request.num_cached_tokens == len(PROMPT)
    assert stored, "nothing was findable"


def test_routers_hear_of_what_was_taken_back_and_of_nothing_else() -> None:
    memory = new_memory()
    live(memory).ask(PROMPT)
    pool = live(memory).under_test.scheduler.kv_cache.pool
    stored, evicted = pool.take_events()
    assert set(stored) == frozenset(pool._block_of_hash)
    assert len(stored) == (len(PROMPT) + 2) // BLOCK_SIZE
    assert not evicted
    assert pool.num_free_blocks == NUM_BLOCKS


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": "e" * 64},
        {"wanted": replace(FORMAT, numerics="another CPU")},
        {"wanted": replace(FORMAT, sizing="--kv-cache-gb 9")},
        {"wanted": TRIMMED},
    ],
)
def test_another_model_or_format_takes_nothing_back(other: dict[str, Any]) -> None:
    memory = new_memory()
    live(memory).ask(PROMPT)
    second = live(memory, **other)
    assert second.num_restored == 0
    assert second.ask(PROMPT).num_cached_tokens == 0
    assert live(memory, **other).num_restored > 0, "the next one of the same kind does"


def test_a_header_of_a_version_with_other_fields_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = new_memory()
    with monkeypatch.context() as patched:
        patched.setattr("headrace.worker.kv.kept_cache.asdict", lambda of: {**asdict(of), "layers": 4})
        live(memory).ask(PROMPT)
    assert live(memory).num_restored == 0


def test_a_cache_that_the_kernel_does_not_map_starts_empty(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = new_memory()
    live(memory).ask(PROMPT)

    def refused() -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr(memory, "map", refused)
        assert KeptCache(memory, 1).format is None
    assert "is not taken back: Cannot allocate memory" in caplog.text


def test_another_size_gives_the_old_memory_back_to_the_kernel() -> None:
    memory = new_memory()
    live(memory).ask(PROMPT)
    kept = KeptCache(memory, 1)
    before = memory.resident_bytes
    kept.adopt(replace(FORMAT, num_blocks=NUM_BLOCKS * 2))
    assert memory.resident_bytes < before
    assert not kept.old_blocks()


@pytest.mark.parametrize("damage", ["first", "last", "header", "fingerprint", "record"])
def test_damage_is_found_and_what_follows_in_the_chain_is_dropped(damage: str) -> None:
    memory = new_memory()
    first = live(memory)
    first.ask(PROMPT)
    pool = first.under_test.scheduler.kv_cache.pool
    request = first.under_test.request(PROMPT)
    pool_blocks = []
    for index in range(4):
        cache = first.under_test.scheduler.kv_cache
        found = pool.find(*cache.key_of(request, index))
        assert found is not None
        pool_blocks.append(found)
    whole = memory.map()
    places = {
        "first": FORMAT.arena_offset + pool_blocks[0] * BLOCK_SIZE * 8,
        "last": FORMAT.arena_offset + pool_blocks[3] * BLOCK_SIZE * 8 + 9,
        "header": 20,
        "fingerprint": (56 << 10) + 3,
        "record": (64 << 10) + 32 + 8 * (NUM_BLOCKS + 1) + 40,
    }
    whole[places[damage]] ^= 4
    second = live(memory)
    hit = second.ask(PROMPT).num_cached_tokens
    # The prompt's last tokens are always computed, so that its fourth block is its last reusable one.
    assert hit == {"first": 0, "last": 3 * BLOCK_SIZE, "header": 0, "fingerprint": 0}.get(damage, hit)
    if damage == "record":
        assert hit < 4 * BLOCK_SIZE + 3


def test_a_prefix_whose_parts_are_damaged_is_used_as_far_as_a_whole_window_is_left() -> None:
    memory = new_memory()
    life = live(memory, wanted=TRIMMED)
    life.ask(PROMPT)
    cache = life.under_test.scheduler.kv_cache
    last = cache.locate(cache.hash_of(life.under_test.request(PROMPT), 3))
    assert last is not None
    slot = cache.slot_of(last[0])
    assert slot is not None
    offset = TRIMMED.arena_offset + aligned((NUM_BLOCKS + 1) * SHAPE.num_bytes) + slot * SHAPE.num_bytes
    memory.map()[offset] ^= 4
    second = live(memory, wanted=TRIMMED)
    assert second.num_restored > 4, "the blocks themselves are whole"
    assert second.ask(PROMPT).num_cached_tokens == 3 * BLOCK_SIZE


def test_the_part_that_was_used_least_recently_is_still_evicted_first() -> None:
    memory = new_memory()
    first = live(memory, wanted=TRIMMED)
    prompts = [[number] * (2 * BLOCK_SIZE) + [5, 6] for number in (11, 12, 13)]
    for prompt in (*prompts, prompts[0]):
        first.ask(prompt, 1)
    second = live(memory, wanted=TRIMMED)
    windows = second.under_test.scheduler.kv_cache.windows
    assert windows is not None
    for slot in [windows.parts.take_slot() for _ in range(NUM_SLOTS - 3)]:
        windows.parts.place(slot, None)
    hits = [second.ask(prompt, 1).num_cached_tokens > 0 for prompt in (prompts[0], prompts[1])]
    assert hits == [True, False]


def test_the_least_recently_used_is_still_evicted_first() -> None:
    memory = new_memory()
    first = live(memory)
    prompts = [[number] * (2 * BLOCK_SIZE) + [5, 6] for number in (11, 12, 13)]
    for prompt in (*prompts, prompts[0]):
        first.ask(prompt, 1)
    second = live(memory)
    pool = second.under_test.scheduler.kv_cache.pool
    pool.release(pool.take(NUM_BLOCKS - 4))
    hits = [second.ask(prompt, 1).num_cached_tokens > 0 for prompt in (prompts[0], prompts[1])]
    assert hits == [True, False]


def test_a_worker_that_never_becomes_ready_gets_an_empty_cache() -> None:
    memory = new_memory()
    live(memory).ask(PROMPT)
    for _ in range(MAX_STARTS):
        assert KeptCache(memory, 1).old_blocks(), "dies before it is ready"
    assert KeptCache(memory, 1).format is None
    assert live(memory).num_restored == 0


class KilledError(BaseException):
    """SIGKILL, in the middle of a line."""


@contextmanager
def killing(memory: HostMemory, countdown: int, found: list[HostMemory]) -> Iterator[None]:
    """Die after a number of executed lines of the engine, in any thread: append a copy of the memory to `found`. If
    another thread makes the copy, wait for it: the next life changes the memory."""
    left, counting, copied = countdown, threading.Lock(), threading.Event()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(TRACED):
            return None
        if event == "line":
            with counting:
                left -= 1
                dies = left == 0
            if dies:
                found.append(after_death(memory))
                copied.set()
        if left <= 0:
            raise KilledError
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        if left <= 0:
            assert copied.wait(patience(60)), "the thread that dies makes the copy"


def prompts(rng: random.Random) -> Iterator[tuple[list[int], int]]:
    """Prompts that share beginnings of every length, and answers."""
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(6, 40))] for _ in range(3)]
    while True:
        stem = rng.choice(stems)
        tail = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(2, 6))]
        yield [*stem[: rng.randint(2, len(stem))], *tail], rng.randint(1, 9)


# The thread that checks blocks is killed too.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("wanted", [FORMAT, TRIMMED], ids=["whole", "trimmed"])
def test_deaths_at_any_line_never_give_a_wrong_token(wanted: CacheFormat) -> None:
    rng = random.Random(SEED)
    memory, num_restored, num_died, num_in_start = new_memory(), 0, 0, 0
    asked = prompts(rng)
    while num_died < NUM_DEATHS:
        found: list[HostMemory] = []
        life: Life | None = None
        is_in_start = rng.random() < 0.25
        try:
            with killing(memory, rng.randint(1, 400) if is_in_start else rng.randint(400, 30_000), found):
                life = live(memory, wanted=wanted)
                num_restored += life.num_restored
                for _ in range(6):
                    serve(life, [next(asked) for _ in range(rng.randint(1, 4))])
        except KilledError:
            pass
        if found:
            num_died += 1
            num_in_start += life is None
            os.close(memory.descriptor)
            memory = found[0]
    assert num_restored > NUM_DEATHS, "deaths must leave something to take back"
    assert num_in_start >= NUM_DEATHS // 20
    last = live(memory, wanted=wanted)
    for prompt, max_tokens in (next(asked) for _ in range(20)):
        last.ask(prompt, max_tokens)


def serve(life: Life, batch: list[tuple[list[int], int]]) -> None:
    """Run requests in parallel. Each must get the right tokens, regardless of the restored blocks."""
    requests = [life.under_test.request(prompt, max_tokens) for prompt, max_tokens in batch]
    life.under_test.run()
    for request, (prompt, max_tokens) in zip(requests, batch, strict=True):
        assert life.under_test.tokens[request] == expected_tokens(prompt, max_tokens, VOCAB_SIZE)


@pytest.mark.parametrize("shape", [BlockShape(3, 8, 24), BlockShape(1, 8, 3), BlockShape(2, 8, 5)])
@pytest.mark.parametrize("distance", [0, 64, 72])
def test_a_checksum_covers_the_tokens_of_its_block_in_every_layer_and_nothing_else(
    shape: BlockShape, distance: int
) -> None:
    rng = np.random.default_rng(0)
    num_blocks, num_layers = 5, 3
    stride = num_blocks * shape.num_bytes + distance
    memory = rng.integers(0, 256, num_layers * stride + 64, np.uint8)
    caches = [memory[start : start + num_blocks * shape.num_bytes] for start in range(0, num_layers * stride, stride)]
    contents = BlockBytes(caches, [shape] * num_layers)
    for num_tokens in (shape.tokens, 3):
        before = contents.checksum(2, num_tokens)
        for layer in range(num_layers):
            for block in range(num_blocks):
                view = caches[layer].reshape(num_blocks, *shape)[block]
                for token in range(shape.tokens):
                    view[rng.integers(shape.heads), token, rng.integers(shape.token_bytes)] ^= 1 << rng.integers(8)
                    is_covered = block == 2 and token < num_tokens
                    assert (contents.checksum(2, num_tokens) != before) == is_covered
                    before = contents.checksum(2, num_tokens)


def test_a_file_is_private_found_again_and_locked(tmp_path: Path) -> None:
    memory = open_memory(str(tmp_path), "worker/0")
    live(memory).ask(PROMPT)
    assert memory.path is not None
    assert memory.path.stat().st_mode & 0o777 == 0o600
    assert open_memory(str(tmp_path), "worker/1").path != memory.path
    os.close(memory.descriptor)
    again = open_memory(str(tmp_path), "worker/0")
    assert live(again).num_restored > 0
    again.remove()
    assert open_memory(str(tmp_path), "worker/0").size_bytes == 0


def test_two_workers_never_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_LOCK_PATIENCE_S", 0.1)
    memory = open_memory(str(tmp_path), "worker/0")
    with pytest.raises(ConfigurationError, match="in use by another worker"):
        open_memory(str(tmp_path), "worker/0")
    assert memory.size_bytes == 0


def test_files_of_workers_that_did_not_come_back_are_removed(tmp_path: Path) -> None:
    gone, in_use, fresh = (open_memory(str(tmp_path), name) for name in ("gone", "in use", "fresh"))
    for memory in (gone, in_use):
        os.utime(memory.descriptor, (1, 1))
    os.close(gone.descriptor)
    os.close(fresh.descriptor)
    open_memory(str(tmp_path), "new")
    assert [memory.path.exists() for memory in (gone, in_use, fresh) if memory.path] == [False, True, True]


@pytest.mark.parametrize("where", ["fd:x", "fd:997", "/nowhere/at/all"])
def test_memory_that_cannot_be_used_is_refused(where: str) -> None:
    with pytest.raises(ConfigurationError, match="--kv-memory"):
        open_memory(where, "worker")


def test_a_file_that_others_can_read_or_a_link_is_refused(tmp_path: Path) -> None:
    path = open_memory(str(tmp_path), "worker").path
    assert path is not None
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="0600"):
        open_memory(str(tmp_path), "worker")
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        open_memory(str(tmp_path), "worker")


def test_a_file_system_without_room_is_refused(tmp_path: Path) -> None:
    memory = open_memory(str(tmp_path), "worker")
    with pytest.raises(ConfigurationError, match="has room for"):
        memory.resize(1 << 60)


def test_a_file_that_its_worker_removes_as_it_ends_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process may have opened it before that."""
    before = open_memory(str(tmp_path), "worker")

    locked = host_memory._locked

    def ends_before_the_lock(descriptor: int) -> bool:
        monkeypatch.setattr(host_memory, "_locked", locked)
        before.remove()
        os.close(before.descriptor)
        return locked(descriptor)

    monkeypatch.setattr(host_memory, "_locked", ends_before_the_lock)
    after = open_memory(str(tmp_path), "worker")
    assert after.path is not None
    assert os.path.samestat(after.path.stat(), os.fstat(after.descriptor))


def test_workers_of_one_directory_leave_room_for_what_others_will_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = open_memory(str(tmp_path), "first"), open_memory(str(tmp_path), "second")
    room = second.room_bytes
    assert room is not None
    # Other programs use the disk, too.
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=100 << 10, f_frsize=1 << 10, f_blocks=1))
    first.resize(70 << 20)
    assert second.room_bytes == 30 << 20
    second.resize(30 << 20)
    with pytest.raises(ConfigurationError, match="beside other workers"):
        second.resize(31 << 20)
    assert first.room_bytes == 70 << 20
    first.resize(70 << 20)


def test_a_file_that_cannot_be_removed_or_a_name_that_is_too_long_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = open_memory(str(tmp_path), "worker")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refused)
    memory.remove()
    assert "cannot be removed: Permission denied" in caplog.text
    with pytest.raises(ConfigurationError, match="cannot be used: File name too long"):
        open_memory(str(tmp_path / ("x" * 300)), "worker")
