"""The index of the disk's slots: which slot is replaced, and what processes learn of each other's changes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.worker.kv.disk_store import DiskStore
from tests.worker.kv.test_disk_tier import content, read, store_in, write


class Clock:
    """The time of day, as the test sets it."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "time", made)
    return made


def name_of(number: int) -> int:
    return content(number).block_hash or 0


def while_writing(store: DiskStore, monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """Do something while the store's next block is being written."""
    put, calls = store._put, [then]

    def put_late(*args: object) -> None:
        while calls:
            calls.pop()()
        put(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "_put", put_late)


def test_two_workers_never_write_the_same_slot(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = store_in(tmp_path, 4), store_in(tmp_path, 4)
    for number in range(4):
        write(first, number)
    for _ in range(5):
        first.count_hits([name_of(number) for number in (1, 2, 3)])
    while_writing(first, monkeypatch, lambda: write(second, 11) and None)
    assert write(first, 10)
    second.refresh()
    assert read(first, 10)
    assert read(second, 10)
    assert read(first, 11)
    assert sum(read(first, number) for number in range(4)) == 2


def test_a_block_that_was_written_has_no_more_rights_than_others(tmp_path: Path, clock: Clock) -> None:
    """The mark of a slot that is being written ends with the write."""
    store = store_in(tmp_path, 2)
    for number in range(2):
        write(store, number)
    store.count_hits([name_of(0)])
    for number in range(2, 9):
        clock.now_s += 1
        assert write(store, number)
        assert not read(store, number - 1)
    assert read(store, 0)


def test_with_all_slots_being_written_a_block_is_not_stored(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = store_in(tmp_path, 1), store_in(tmp_path, 1)
    stored: list[bool] = []
    while_writing(first, monkeypatch, lambda: stored.append(write(second, 2)))
    assert write(first, 1)
    assert stored == [False]
    assert read(first, 1)
    assert write(second, 2)
    assert read(second, 2)


def test_the_slot_of_a_writer_that_died_is_used_again(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = store_in(tmp_path, 1), store_in(tmp_path, 1)
    monkeypatch.setattr(first._index, "release", lambda _: False)
    write(first, 1)
    assert not write(second, 2)
    clock.now_s += 61
    assert write(second, 2)
    assert read(second, 2)


def test_a_writer_that_took_too_long_enters_no_block(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = store_in(tmp_path, 1), store_in(tmp_path, 1)

    def late() -> None:
        clock.now_s += 61
        assert write(second, 2)

    while_writing(first, monkeypatch, late)
    write(first, 1)
    assert not read(first, 1)
    assert not read(second, 2), "its bytes were replaced"
    assert first.num_blocks == 0 or not second.num_blocks
    assert write(second, 3)
    assert read(second, 3)


def test_a_failed_write_leaves_its_slot_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in(tmp_path, 1)

    def fails() -> None:
        raise OSError("injected")

    while_writing(store, monkeypatch, fails)
    with pytest.raises(OSError, match="injected"):
        write(store, 1)
    assert not store.has(name_of(1))
    assert write(store, 1)
    assert read(store, 1)


def test_blocks_from_the_time_when_the_clock_was_ahead_are_replaced_in_turn(tmp_path: Path, clock: Clock) -> None:
    store = store_in(tmp_path, 3)
    clock.now_s += 1_000_000
    write(store, 1)
    clock.now_s -= 1_000_000
    for number in range(2, 8):
        clock.now_s += 10
        write(store, number)
    assert [read(store, number) for number in range(1, 8)] == [False] * 4 + [True] * 3


def test_an_index_without_changes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = store_in(tmp_path), store_in(tmp_path)
    for number in range(20):
        write(first, number)
        second.refresh()

    def read_all(_: object) -> None:
        raise AssertionError

    for store in (first, second):
        monkeypatch.setattr(store._index, "_changed_slots", read_all)
        assert store.refresh() is False
    assert write(first, 30), "its own changes are known"
    assert first.refresh() is False


def test_few_changes_are_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = store_in(tmp_path), store_in(tmp_path)
    slots, changed_slots = list[int](), second._index._changed_slots

    def counted(num_changes: int) -> object:
        found = changed_slots(num_changes)
        slots.extend(found.tolist())
        return found

    monkeypatch.setattr(second._index, "_changed_slots", counted)
    monkeypatch.setattr(np, "flatnonzero", None)  # this compares the whole index
    write(first, 1)
    assert second.refresh() is True
    assert len(slots) == 1
    assert read(second, 1)


@pytest.mark.parametrize("num_writes", [1, 250, 256, 300, 2000])
def test_another_worker_knows_the_same_however_far_it_is_behind(tmp_path: Path, num_writes: int) -> None:
    first, second = store_in(tmp_path), store_in(tmp_path)
    for number in range(num_writes):
        write(first, number)
    second.refresh()
    assert second._slot_of == first._slot_of == store_in(tmp_path)._slot_of
    assert sum(read(second, number) for number in range(num_writes)) == min(num_writes, 8)


def test_a_damaged_index_costs_blocks_and_nothing_else(tmp_path: Path) -> None:
    rng = random.Random(4)
    first, second = store_in(tmp_path), store_in(tmp_path)
    path = next(tmp_path.glob("*.index"))
    num_found = 0
    for _ in range(150):
        for store in (first, second):
            number = rng.randrange(20)
            write(store, number)
            store.refresh()
            num_found += read(store, rng.randrange(20))
            store.count_hits([name_of(rng.randrange(20))])
        start = rng.choice([0, 2048, 2048 + 4 * rng.randrange(512), 4096 + 8 * rng.randrange(16)])
        with path.open("r+b") as file:
            file.seek(start)
            file.write(rng.randbytes(8))
    assert num_found > 10


def test_the_slot_that_is_replaced_is_always_the_least_valuable(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.worker.kv import disk_index as index

    monkeypatch.setattr(index, "_NUM_CANDIDATES", 5)
    rng = random.Random(9)
    stores = [store_in(tmp_path, 30) for _ in range(3)]
    num_checked = 0

    def checked(store: DiskStore) -> None:
        choose = store._index._least_valuable

        def choose_checked() -> int | None:
            nonlocal num_checked
            slot = choose()
            assert slot is not None
            worth = index._worth(store._index._entries)
            assert worth[slot] == worth.min()
            num_checked += 1
            return slot

        monkeypatch.setattr(store._index, "_least_valuable", choose_checked)

    for store in stores:
        checked(store)
    for _ in range(3000):
        store, number = rng.choice(stores), rng.randrange(200)
        action = rng.randrange(5)
        if action == 0:
            store.touch(name_of(number))
        elif action == 1:
            store.count_hits([name_of(rng.randrange(200)) for _ in range(4)])
        elif action == 2:
            clock.now_s += rng.choice([0, 1, 500])
        elif action == 3 and rng.random() < 0.2:
            store.refresh()
        else:
            write(store, number)
    assert num_checked > 500


def test_a_scan_finds_many_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in(tmp_path, 600)
    scans, scan = list[int](), store._index._scan
    monkeypatch.setattr(store._index, "_scan", lambda: [scans.append(1), scan()][1])
    for number in range(600):
        write(store, number)
    assert len(scans) <= 4
