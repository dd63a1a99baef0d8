"""Reads adapters' files and writes them into the slots of the adapters' memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from headrace.worker.adapters.files import AdapterError, AdapterFiles
from headrace.worker.adapters.gguf import read_gguf
from headrace.worker.adapters.peft import read_peft
from headrace.worker.model.adapter_memory import AdapterMemory, Linear


class Layers(NamedTuple):
    """The linear layers that adapters may change, and the number of heads of keys."""

    linears: Sequence[Linear]
    num_kv_heads: int


class Found(NamedTuple):
    """Facts about an adapter's files: the SHA-256 of their content, hex; the highest rank of a layer; bytes in
    float32."""

    sha256: str
    rank: int
    num_bytes: int


class FilesChangedError(AdapterError):
    """The files of an adapter have changed since they were read."""


class Reader(Protocol):
    """Reads adapters, in this process or in another one. One call at a time."""

    def read(self, path: Path) -> Found:
        """Read the files of an adapter and check that they fit the model. AdapterError."""
        ...

    def write(self, slot: int, path: Path, sha256: str) -> None:
        """Write an adapter into a slot that no request uses. Reads its files again unless they were the last ones that
        were read. AdapterError; FilesChangedError if their hash has changed."""
        ...

    def move(self, memory: AdapterMemory, slots: Sequence[int]) -> None:
        """Write to this memory from now on. Copies these slots of the old memory to it."""
        ...


def read_adapter(path: Path, layers: Layers) -> AdapterFiles:
    """Read and check an adapter for a model with these layers: PEFT's directory, or a GGUF file. AdapterError."""
    if path.suffix.lower() == ".gguf":
        return read_gguf(path, layers.linears, layers.num_kv_heads)
    if path.is_file():
        raise AdapterError(f"{path} is a file; give the directory that PEFT wrote, or a .gguf file")
    return read_peft(path, layers.linears)


class AdapterReader:
    """Reads adapters for a model with these layers, in this process."""

    def __init__(self, layers: Layers, memory: AdapterMemory) -> None:
        self._layers = layers
        self._memory = memory
        self._last: tuple[Path, AdapterFiles] | None = None

    def read(self, path: Path) -> Found:
        """See Reader."""
        self._last = None
        files = read_adapter(path, self._layers)
        self._last = path, files
        return Found(files.sha256, files.rank, files.num_bytes)

    def write(self, slot: int, path: Path, sha256: str) -> None:
        """See Reader."""
        last, self._last = self._last, None
        files = last[1] if last is not None and last[0] == path else read_adapter(path, self._layers)
        if files.sha256 != sha256:
            raise FilesChangedError(f"the files of {path} have changed")
        self._memory.write(slot, files.weights)

    def move(self, memory: AdapterMemory, slots: Sequence[int]) -> None:
        """See Reader."""
        self._memory.copy_to(memory, slots)
        self._memory = memory
