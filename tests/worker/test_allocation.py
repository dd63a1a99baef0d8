"""A KV cache that outlives the process, on a file system that has lost room since the cache was made."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.worker.allocation import allocate
from headrace.worker.config import ConfigurationError
from headrace.worker.kv.block_bytes import BlockShape
from headrace.worker.kv.host_memory import HostMemory, open_memory
from headrace.worker.kv.kept_cache import CacheFormat, KeptCache
from headrace.worker.model.step_limits import StepLimits
from tests.worker.configs import worker_config
from tests.worker.idle_runner import idle_runner

MIB = 1 << 20
LIMITS = StepLimits(4, 16, 16, is_exact=True)


class FileSystem:
    """What the kernel says of the file system of KV caches. Nothing is really used."""

    def __init__(self, free_mib: int) -> None:
        self.free_mib = free_mib

    def __call__(self, _: object) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=self.free_mib, f_frsize=MIB, f_blocks=1)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FileSystem:
    disk = FileSystem(64)
    monkeypatch.setattr(os, "fstatvfs", disk)
    return disk


def start(directory: Path, kv_cache_bytes: int | None = None) -> CacheFormat:
    """Start a worker and kill it. Returns the format of its cache."""
    memory = open_memory(str(directory), "w")
    try:
        return allocated(memory, kv_cache_bytes)
    finally:
        os.close(memory.descriptor)


def allocated(memory: HostMemory, kv_cache_bytes: int | None) -> CacheFormat:
    kept = KeptCache(memory, 1)
    kept.old_blocks()
    config = worker_config(kv_cache_bytes=kv_cache_bytes)
    allocate(config, idle_runner(BlockShape(1, 8, 8192)), LIMITS, kept, None)
    assert kept.format is not None
    return kept.format


def test_a_cache_that_may_grow_beyond_the_room_is_made_anew(
    tmp_path: Path, disk: FileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    first = start(tmp_path)
    assert start(tmp_path) == first
    assert not caplog.text
    disk.free_mib = 32
    second = start(tmp_path)
    assert second.total_bytes < 33 * MIB < first.total_bytes
    assert "has room for 0.03 GiB" in caplog.text
    assert "is not taken back" in caplog.text
    assert start(tmp_path) == second


def test_room_that_is_lost_while_the_model_loads_counts_too(tmp_path: Path, disk: FileSystem) -> None:
    first = start(tmp_path)
    memory = open_memory(str(tmp_path), "w")
    kept = KeptCache(memory, 1)
    assert kept.format == first
    disk.free_mib = 32
    allocate(worker_config(), idle_runner(BlockShape(1, 8, 8192)), LIMITS, kept, None)
    assert memory.size_bytes < 33 * MIB


def test_a_cache_of_a_given_size_is_refused_without_room_and_stays(tmp_path: Path, disk: FileSystem) -> None:
    first = start(tmp_path, 48 * MIB)
    disk.free_mib = 32
    with pytest.raises(ConfigurationError, match=r"has room for 0\.03 GiB beside other workers"):
        start(tmp_path, 48 * MIB)
    disk.free_mib = 64
    memory = open_memory(str(tmp_path), "w")
    assert KeptCache(memory, 1).format == first


def test_a_full_file_system_gets_no_more_pages(tmp_path: Path, disk: FileSystem) -> None:
    """To read a page that was never written takes memory, too. Without room that ends the process."""
    start(tmp_path, 48 * MIB)
    disk.free_mib = 0
    memory = open_memory(str(tmp_path), "w")
    mapped = []
    memory.map = lambda: mapped.append(1)  # type: ignore[method-assign, assignment, return-value]
    assert KeptCache(memory, 1).format is None
    assert not mapped
