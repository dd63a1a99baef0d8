"""Memory in files on a disk: where it lies, and what is left when it is given back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.worker.weights import file_memory
from headrace.worker.weights.file_memory import FileMemory, give_back_files, is_on_disk


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_memory, "_PIECE_BYTES", 1 << 20)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that counts as one on a disk."""
    monkeypatch.setattr(file_memory, "is_on_disk", lambda directory: directory == tmp_path)
    return tmp_path


def mapped_bytes(directory: Path) -> int:
    """Bytes of this process's mappings of files below a directory."""
    sizes = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(directory) in line:
            start, end = line.split()[0].split("-")
            sizes += int(end, 16) - int(start, 16)
    return sizes


def test_arrays_lie_in_a_file_and_keep_their_values(disk: Path, small_pieces: None) -> None:
    memory = FileMemory([disk])
    arrays = [memory.array(size) for size in (300_000, 700_000, 700_000, 3_000_000, 100)]
    assert [array.size for array in arrays] == [300_000, 700_000, 700_000, 3_000_000, 100]
    assert all(array.ctypes.data % 64 == 0 and not array.any() for array in arrays)
    for number, array in enumerate(arrays):
        array[:] = number + 1
    assert mapped_bytes(disk) >= 4_400_000
    assert list(disk.iterdir()) == []
    assert give_back_files() >= 4_400_000
    assert [set(np.unique(array).tolist()) for array in arrays] == [{1}, {2}, {3}, {4}, {5}]


def test_without_room_on_a_disk_memory_is_ordinary(
    disk: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_memory, "_SPARE_BYTES", 1 << 60)
    memory = FileMemory([disk])
    array = memory.array(400_000)
    assert (array.size, array.any(), array.ctypes.data % 64) == (400_000, False, 0)
    assert mapped_bytes(disk) == 0


def test_a_file_system_in_memory_is_no_disk(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    place = tmp_path / "place"
    place.mkdir()
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\ntmpfs {place} tmpfs rw 0 0\n")
    assert is_on_disk(tmp_path, mounts)
    assert not is_on_disk(place, mounts)
    mounts.write_text(f"tmpfs / tmpfs rw 0 0\n/dev/sda {place} xfs rw 0 0\n")
    assert not is_on_disk(tmp_path, mounts)
    assert is_on_disk(place, mounts)
    assert not is_on_disk(place, tmp_path / "none")
    assert not is_on_disk(tmp_path / "none", mounts)
