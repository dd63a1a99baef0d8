"""Memory of mapped files that is given back."""

from __future__ import annotations

import mmap
from pathlib import Path

from headrace.worker.host.mapped_files import give_back, mappings_of, private_bytes

SIZE = 4 << 20


def test_pages_of_a_mapped_file_are_given_back_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "weights of a model.bin"
    path.write_bytes(b"w" * SIZE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as mapped:
        assert mapped[:].count(b"w") == SIZE
        assert [mapping.resident for mapping in mappings_of(path)] == [SIZE]
        assert give_back(path) == SIZE
        assert [mapping.resident for mapping in mappings_of(path)] == [0]
        assert mapped[:].count(b"w") == SIZE


def test_what_was_written_to_a_private_mapping_stays(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"w" * SIZE)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), SIZE, flags=mmap.MAP_PRIVATE) as mapped:
        mapped[:1] = b"x"
        assert give_back(path) == 0
        assert mapped[:1] == b"x"


def test_a_file_that_is_not_mapped_has_nothing_to_give(tmp_path: Path) -> None:
    assert give_back(tmp_path / "missing.bin") == 0


def test_own_memory_is_counted() -> None:
    before = private_bytes()
    block = b"\1" * (64 << 20)
    assert private_bytes() - before > 0.9 * len(block)
