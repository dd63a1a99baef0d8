"""The requirements of a model: bytes to download, disk space, and memory to serve it. They are shown and checked before
the download."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from headrace.cli.models.shape import ModelShape
from headrace.common.commands import CommandError
from headrace.common.host_memory import GIB, available_bytes
from headrace.common.kernel_files import ROOT
from headrace.common.worker_flags import IMAGE_CACHE_GB

# A worker's process without weights and KV cache, as in docs/how-to/sizing.md.
PROCESS_BYTES = GIB // 2
# Weights of 4 bits in a worker: reordered for the kernels, with scales in float32 (docs/decisions/graphs.md). Weights
# of more bits take a smaller multiple.
_IN_MEMORY = 1.65
# The process that encodes images: its weights with what it computes of a tile (docs/decisions/models.md), the rest.
_VISION_IN_MEMORY = 2.5
_VISION_PROCESS_BYTES = GIB // 2
USUAL_CONTEXT_TOKENS = 8192
# A converted model beside its GGUF file, with tokenizers and the overhead of the file system.
_CONVERTED_SHARE = 1.1
_SPARE_DISK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Requirements:
    """All values are in bytes. `present_bytes` of the download exist from an earlier attempt. `weight_bytes` is the
    size of the weights for text, `vision_bytes` that of those for images. `shape` is None if the model does not state
    it."""

    download_bytes: int
    present_bytes: int
    weight_bytes: int
    is_converted: bool
    shape: ModelShape | None = None
    scratch_bytes: int = 0
    """Disk that the conversion takes temporarily."""
    vision_bytes: int = 0

    @property
    def all_weight_bytes(self) -> int:
        """The size of all weights."""
        return self.weight_bytes + self.vision_bytes

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the download that are missing."""
        return max(0, self.download_bytes - self.present_bytes)

    @property
    def made_bytes(self) -> int:
        """Bytes that the conversion writes."""
        return (int(self.all_weight_bytes * _CONVERTED_SHARE) if self.is_converted else 0) + self.scratch_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes that remain to be written, if download and model are on one file system."""
        return self.fetched_bytes + self.made_bytes + _SPARE_DISK_BYTES

    def __str__(self) -> str:
        here = f" ({_gb(self.present_bytes)} of it are here)" if self.present_bytes else ""
        disk = f"{_gb(self.download_bytes)} to download{here}, {_gb(self.disk_bytes)} of disk"
        return f"{disk}; serving takes {memory_sentence(self.weight_bytes, self.vision_bytes, self.shape)}"


def worker_bytes(weight_bytes: int, vision_bytes: int = 0) -> int:
    """The memory of a worker without its KV cache, as measured with weights of 4 bits; with weights for images, also
    that of the process which encodes them, and of the states that the worker keeps."""
    return int(_IN_MEMORY * weight_bytes) + PROCESS_BYTES + image_bytes(vision_bytes)


def image_bytes(vision_bytes: int, cache_gb: float | None = None) -> int:
    """The memory for images, with weights of this size; 0 without any. The worker keeps `cache_gb` GiB of their states,
    or the default of --image-cache-gb."""
    if not vision_bytes:
        return 0
    cache_bytes = int((IMAGE_CACHE_GB.default if cache_gb is None else cache_gb) * GIB)
    return int(_VISION_IN_MEMORY * vision_bytes) + _VISION_PROCESS_BYTES + cache_bytes


def memory_sentence(weight_bytes: int, vision_bytes: int, shape: ModelShape | None) -> str:
    """A sentence about the memory that serving needs."""
    base = f"{worker_bytes(weight_bytes, vision_bytes) / GIB:.1f} GiB of memory"
    if shape is None:
        return f"{base} and the KV cache"
    context = min(USUAL_CONTEXT_TOKENS, shape.context_tokens or USUAL_CONTEXT_TOKENS)
    return f"{base} and {kv_cache_gib(shape, context):.1f} GiB for each context of {context} tokens"


def kv_cache_gib(shape: ModelShape, context_tokens: int) -> float:
    """GiB of KV cache that one context takes."""
    return shape.kv_bytes_per_token * context_tokens / GIB


def check_disk(name: str, needed: Requirements, hub_cache: Path, own_cache: Path) -> None:
    """Raise CommandError if the download does not fit into the Hub's cache, or the model into our own. Without a
    conversion, the model is links to the download, or a copy on another file system."""
    if hub_cache.stat().st_dev == own_cache.stat().st_dev:
        _check_free(name, needed.disk_bytes, own_cache, "HEADRACE_CACHE and HF_HOME")
        return
    made_bytes = needed.made_bytes if needed.is_converted else needed.download_bytes
    _check_free(name, needed.fetched_bytes + _SPARE_DISK_BYTES, hub_cache, "HF_HOME")
    _check_free(name, made_bytes + _SPARE_DISK_BYTES, own_cache, "HEADRACE_CACHE")


def _check_free(name: str, num_bytes: int, folder: Path, variable: str) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise CommandError(
            f"{name} needs {_gb(num_bytes)} of disk in {folder}, and {_gb(free)} are free; free some "
            f"(headrace models prune, headrace models rm), or set {variable} to a larger disk"
        )


def check_weights_fit(name: str, weight_bytes: int, num_workers: float = 1, root: Path = ROOT) -> None:
    """Raise CommandError if the weights of all workers are larger than the memory that is available. Workers usually
    need more, but not in all formats."""
    available = available_bytes(root)
    needed = num_workers * (weight_bytes + PROCESS_BYTES)
    if needed > available:
        each = f" for {num_workers} workers (--workers)" if num_workers > 1 else ""
        raise CommandError(
            f"{name} needs {needed / GIB:.1f} GiB of memory{each} before its KV cache, and {available / GIB:.1f} GiB "
            "are available; choose a smaller model or quantisation"
        )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1_000_000_000 else f"{num_bytes / 1e6:.1f} MB"
