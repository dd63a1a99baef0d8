"""Reads adapters' files and writes them into the slots of the adapters' memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from headrace.worker.adapters.files import AdapterError, AdapterFiles
from headrace.worker.adapters.peft import read_peft
from headrace.worker.model.adapter_memory import AdapterMemory, Linear


class Found(NamedTuple):
    """What an adapter's files are: the SHA-256 of their content, hex; the highest rank of a layer; bytes in float32."""

    sha256: str
    rank: int
    num_bytes: int


class FilesChangedError(AdapterError):
    """The files of an adapter are others than before."""


class Reader(Protocol):
    """Reads adapters, in this process or in another one. One call at a time."""

    def read(self, path: Path) -> Found:
        """Read and check an adapter. AdapterError."""
        ...

    def write(self, slot: int, path: Path, sha256: str) -> None:
        """Write an adapter into a slot that no request uses. Reads its files again unless they were the last to be
        read. AdapterError, FilesChangedError if their hash is another one."""
        ...

    def move(self, memory: AdapterMemory, slots: Sequence[int]) -> None:
        """Write to this memory from now on. These slots of the old memory are copied to it."""
        ...


class AdapterReader:
    """Reads adapters for a model with these layers, in this process."""

    def __init__(self, linears: Sequence[Linear], memory: AdapterMemory) -> None:
        self._linears = linears
        self._memory = memory
        self._last: tuple[Path, AdapterFiles] | None = None

    def read(self, path: Path) -> Found:
        """See Reader."""
        self._last = None
        files = read_peft(path, self._linears)
        self._last = path, files
        return Found(files.sha256, files.rank, files.num_bytes)

    def write(self, slot: int, path: Path, sha256: str) -> None:
        """See Reader."""
        last, self._last = self._last, None
        files = last[1] if last is not None and last[0] == path else read_peft(path, self._linears)
        if files.sha256 != sha256:
            raise FilesChangedError(f"the files of {path} have changed")
        self._memory.write(slot, files.weights)

    def move(self, memory: AdapterMemory, slots: Sequence[int]) -> None:
        """See Reader."""
        self._memory.copy_to(memory, slots)
        self._memory = memory
