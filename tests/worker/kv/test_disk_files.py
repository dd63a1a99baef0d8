"""The files of the disk's tier: workers that need room remove the stores that nobody uses, and no others."""

from __future__ import annotations

import fcntl
import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.worker.config import ConfigurationError
from headrace.worker.kv import disk_files as files
from headrace.worker.kv.disk_store import DiskStore
from tests.worker.conftest import BLOCK_SIZE
from tests.worker.kv.test_disk_tier import BLOCK_BYTES, SLOT_BYTES, read, write

OLD, OLDER, NEW = "0123456789abcdef", "00000000000000aa", "fedcba9876543210"
NUM_SLOTS = 8
STORE_BYTES = NUM_SLOTS * SLOT_BYTES


def store_of(directory: Path, identity: str, num_slots: int = NUM_SLOTS) -> DiskStore:
    return DiskStore(directory, identity, num_slots * SLOT_BYTES, BLOCK_BYTES, BLOCK_SIZE)


def blocks_of(directory: Path, identity: str) -> Path:
    return directory / f"headrace-kv-{identity}.blocks"


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def leave(directory: Path, identity: str, used_s: float) -> None:
    """A store that nobody uses."""
    store = store_of(directory, identity)
    assert write(store, 1)
    store.close()
    for path in directory.glob(f"headrace-kv-{identity}.*"):
        os.utime(path, (used_s, used_s))


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with room for two stores and a half."""

    def fstatvfs(_: int) -> Any:
        used = 0
        for path in tmp_path.glob("*.blocks"):
            try:
                used += path.stat().st_size
            except FileNotFoundError:
                continue
        return SimpleNamespace(f_bavail=max(0, int(2.5 * STORE_BYTES) - used), f_frsize=1)

    monkeypatch.setattr(os, "fstatvfs", fstatvfs)
    return tmp_path


def test_a_store_that_nobody_uses_makes_room_for_another(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    leave(small_disk, OLDER, 1000.0)
    leave(small_disk, OLD, 2000.0)
    store = store_of(small_disk, NEW)
    assert names_in(small_disk) == {f"headrace-kv-{each}.{kind}" for each in (OLD, NEW) for kind in ("blocks", "index")}
    assert f"removed {blocks_of(small_disk, OLDER)} (0.0 GiB)" in caplog.text
    assert write(store, 1)
    assert read(store_of(small_disk, OLD), 1)


def test_with_room_nothing_is_removed(small_disk: Path) -> None:
    leave(small_disk, OLD, 1000.0)
    store_of(small_disk, NEW)
    assert read(store_of(small_disk, OLD), 1)


def test_a_start_counts_as_a_use(small_disk: Path) -> None:
    leave(small_disk, OLDER, 1000.0)
    leave(small_disk, OLD, 2000.0)
    store_of(small_disk, OLDER).close()
    store_of(small_disk, NEW)
    assert not blocks_of(small_disk, OLD).exists()
    assert read(store_of(small_disk, OLDER), 1)


def test_stores_in_use_stay_and_the_error_names_them(small_disk: Path) -> None:
    used = [store_of(small_disk, identity) for identity in (OLD, OLDER)]
    with pytest.raises(ConfigurationError, match=rf"too little room .*{OLDER}.blocks \(0.0 GiB, in use\), .*{OLD}"):
        store_of(small_disk, NEW)
    assert all(write(store, 1) and read(store, 1) for store in used)
    used[0].close()
    store_of(small_disk, NEW)
    assert not blocks_of(small_disk, OLD).exists()
    assert read(used[1], 1)


def test_only_stores_of_this_user_are_removed(small_disk: Path) -> None:
    outside = small_disk / "outside"
    outside.write_bytes(b"kept")
    link = blocks_of(small_disk, OLD)
    link.symlink_to(outside)
    twice = blocks_of(small_disk, OLDER)
    os.link(outside, twice)
    directory = blocks_of(small_disk, "1" * 16)
    directory.mkdir()
    others = [small_disk / name for name in (f"headrace-kv-{'2' * 16}", "headrace-kv-mine.blocks", f"{'3' * 16}.index")]
    for path in others:
        path.write_bytes(bytes(STORE_BYTES))
    (small_disk / "large.blocks").write_bytes(bytes(2 * STORE_BYTES))
    before = names_in(small_disk)
    with pytest.raises(ConfigurationError, match="too little room"):
        store_of(small_disk, NEW)
    assert before <= names_in(small_disk)
    assert outside.read_bytes() == b"kept"


def test_an_index_without_blocks_is_removed_too(small_disk: Path) -> None:
    for identity in (OLD, OLDER):
        leave(small_disk, identity, 1000.0)
    index = small_disk / f"headrace-kv-{'4' * 16}.index"
    index.write_bytes(b"left over")
    os.utime(index, (10.0, 10.0))
    store_of(small_disk, NEW)
    assert not index.exists()
    assert not blocks_of(small_disk, "4" * 16).exists()


def test_a_store_of_another_size_is_refused_before_others_are_removed(small_disk: Path) -> None:
    leave(small_disk, OLD, 1000.0)
    leave(small_disk, OLDER, 1000.0)
    with pytest.raises(ConfigurationError, match=f"{OLD}.blocks was created with another --kv-disk-gb"):
        store_of(small_disk, OLD, 2 * NUM_SLOTS)
    assert read(store_of(small_disk, OLDER), 1)


@pytest.mark.parametrize("kind", ["blocks", "index"])
@pytest.mark.parametrize("what", ["group", "others", "link", "owner"])
def test_files_that_others_may_have_changed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, what: str
) -> None:
    """Someone who writes to the file can put other keys and values into answers."""
    leave(tmp_path, OLD, 1000.0)
    path = tmp_path / f"headrace-kv-{OLD}.{kind}"
    if what == "owner":
        found = path.stat().st_ino
        fstat = os.fstat

        def of_another_user(descriptor: int) -> os.stat_result:
            about = fstat(descriptor)
            values = [*about]
            values[4] += 1
            return os.stat_result(values) if about.st_ino == found else about

        monkeypatch.setattr(os, "fstat", of_another_user)
    elif what == "link":
        os.link(path, tmp_path / "other")
    else:
        path.chmod(0o660 if what == "group" else 0o604)
    with pytest.raises(ConfigurationError, match=rf"{path} must be .* only this user .*; remove it"):
        store_of(tmp_path, OLD)
    monkeypatch.undo()
    assert path.exists()
    path.unlink()
    assert write(store_of(tmp_path, OLD), 2)


def test_an_error_names_the_file(tmp_path: Path) -> None:
    blocks_of(tmp_path, OLD).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match=rf"{OLD}.blocks: Too many levels of symbolic links"):
        store_of(tmp_path, OLD)
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_that_is_removed_while_it_is_opened_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(tmp_path, OLD, 1000.0)
    removed = []

    def flock(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH and not removed:
            files._remove_unused(tmp_path, OLD)
            removed.append(not blocks_of(tmp_path, OLD).exists())
        fcntl.flock(descriptor, operation)

    monkeypatch.setattr(files, "fcntl", SimpleNamespace(**{**vars(fcntl), "flock": flock}))
    store = store_of(tmp_path, OLD)
    assert removed == [True]
    assert write(store, 1)
    assert read(store_of(tmp_path, OLD), 1)


def test_workers_that_start_at_the_same_time_never_lose_a_store_that_they_use(small_disk: Path) -> None:
    identities = [f"{number:016x}" for number in range(4)]
    wrong: list[str] = []
    num_opened = 0

    def work(seed: int) -> None:
        nonlocal num_opened
        rng = random.Random(seed)
        for _ in range(25):
            identity = rng.choice(identities)
            try:
                store = store_of(small_disk, identity)
            except ConfigurationError as error:
                if "too little room" not in str(error):
                    wrong.append(str(error))
                continue
            num_opened += 1
            write(store, seed)
            store.refresh()
            if not read(store, seed):
                wrong.append("lost a block")
            if not os.path.samestat(os.fstat(store._blocks), blocks_of(small_disk, identity).stat()):
                wrong.append("another file")
            store.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert num_opened > 20
