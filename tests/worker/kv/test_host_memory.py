"""A directory of KV caches that other programs and users share."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.worker.config import ConfigurationError
from headrace.worker.kv import host_memory
from headrace.worker.kv.host_memory import HostMemory, open_memory

NOBODY = 65534
SAME_FORM = "headrace-kv-0123456789abcdef"


def lock_of(directory: Path) -> Path:
    return directory / f"headrace-kv-{os.geteuid()}.lock"


def locked(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def make_foreign(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the file to another user, or where only root could do that, become one."""
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)


def test_nobody_who_locks_the_directory_stops_a_start(tmp_path: Path) -> None:
    memory = open_memory(str(tmp_path), "worker")
    directory = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    with memory.sizing():
        assert lock_of(tmp_path).stat().st_mode & 0o777 == 0o600
    os.close(directory)
    assert [path.name for path in tmp_path.iterdir()] == [memory.path.name if memory.path else ""]


def test_a_lock_that_is_not_given_back_is_an_error_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_memory, "_SIZING_PATIENCE_S", 0.1)
    memory = open_memory(str(tmp_path), "worker")
    held = locked(lock_of(tmp_path))
    caplog.set_level(logging.INFO)
    with pytest.raises(ConfigurationError, match=f"{lock_of(tmp_path)} is locked"), memory.sizing():
        pytest.fail("the other one has the lock")
    assert "waits" in caplog.text
    os.close(held)
    with memory.sizing():
        pass


def test_workers_size_their_caches_one_after_the_other(tmp_path: Path) -> None:
    memories = [open_memory(str(tmp_path), str(number)) for number in range(4)]
    counting = threading.Lock()
    inside, most = 0, 0

    def size(memory: HostMemory) -> None:
        nonlocal inside, most
        for _ in range(20):
            with memory.sizing():
                with counting:
                    inside += 1
                    most = max(most, inside)
                with counting:
                    inside -= 1

    threads = [threading.Thread(target=size, args=(memory,)) for memory in memories]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert not lock_of(tmp_path).exists()


def test_a_lock_that_is_a_link_or_of_another_user_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, lock = open_memory(str(tmp_path), "worker"), lock_of(tmp_path)
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match=f"{lock} cannot be opened"), memory.sizing():
        pass
    assert not (tmp_path / "elsewhere").exists()
    lock.unlink()
    lock.touch(0o600)
    if os.geteuid() == 0:
        make_foreign(lock, monkeypatch)
        with pytest.raises(ConfigurationError, match=f"{lock} must be a file that only this user"), memory.sizing():
            pass


def room(monkeypatch: pytest.MonkeyPatch, memory: HostMemory) -> int | None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=100, f_frsize=1 << 20, f_blocks=1))
        return memory.room_bytes


def test_files_that_are_no_caches_of_this_user_take_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = open_memory(str(tmp_path), "worker")
    sparse = tmp_path / "headrace-kv-x"
    sparse.touch()
    os.truncate(sparse, 1 << 40)
    (tmp_path / "headrace-kv-fedcba9876543210").symlink_to(sparse)
    assert room(monkeypatch, memory) == 100 << 20
    sparse.rename(tmp_path / SAME_FORM)
    assert room(monkeypatch, memory) == 0, "a cache of another worker"
    make_foreign(tmp_path / SAME_FORM, monkeypatch)
    assert room(monkeypatch, memory) == 100 << 20


@pytest.mark.parametrize("name", [f"{SAME_FORM}.blocks", f"{SAME_FORM}.index", "headrace-kv-1000.lock", "headrace-kv-"])
def test_files_of_a_disk_store_and_others_are_not_removed(tmp_path: Path, name: str) -> None:
    for path in (tmp_path / name, tmp_path / SAME_FORM):
        path.touch(0o600)
        os.utime(path, (1, 1))
    open_memory(str(tmp_path), "worker")
    assert (tmp_path / name).exists()
    assert not (tmp_path / SAME_FORM).exists(), "a cache that no worker uses"


def test_a_cache_that_was_made_anew_meanwhile_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker may have removed the stale file, and be serving with another one of the same name."""
    path = tmp_path / SAME_FORM
    path.touch(0o600)
    os.utime(path, (1, 1))
    locked_before = host_memory._locked

    def begins_before_the_lock(descriptor: int) -> bool:
        monkeypatch.setattr(host_memory, "_locked", locked_before)
        path.unlink()
        path.touch(0o600)
        return locked_before(descriptor)

    monkeypatch.setattr(host_memory, "_locked", begins_before_the_lock)
    open_memory(str(tmp_path), "worker")
    assert path.exists()


def test_a_cache_that_was_used_meanwhile_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / SAME_FORM
    path.touch(0o600)
    os.utime(path, (1, 1))
    locked_before = host_memory._locked

    def ends_before_the_lock(descriptor: int) -> bool:
        monkeypatch.setattr(host_memory, "_locked", locked_before)
        os.utime(path)
        return locked_before(descriptor)

    monkeypatch.setattr(host_memory, "_locked", ends_before_the_lock)
    open_memory(str(tmp_path), "worker")
    assert path.exists()
    os.utime(path, (1, 1))
    open_memory(str(tmp_path), "other")
    assert not path.exists()
