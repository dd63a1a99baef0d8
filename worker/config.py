"""The configuration of a worker, fixed at start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class ConfigurationError(Exception):
    """The configuration cannot be used. The text says what is wrong and what to change. Exit status 2."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """All settings of a worker. `None` means that the worker chooses a value."""

    model_dir: Path
    name: str
    worker_id: str
    listen: str
    advertise: str
    routers: tuple[str, ...] = ()
    redis_url: str | None = None
    drain_timeout_s: float = 2.0
    threads: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_share: float = 0.4
    kv_precision: str = "u8"
    execution_mode: str = "performance"
    decode_graph: bool | None = None
    speculation: str | None = None
    draft_model: Path | None = None
    """Directory of a smaller model, or of heads, that proposes tokens."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_mixed_tokens: int | None = None
    max_num_waiting: int = 1024
    max_ttft_s: float = 60.0
    stuck_after_s: float = 60.0
    target_tpot_ms: float | None = None
    max_context_tokens: int | None = None
    pooling: str | None = None
    """How an embedding model's vectors of tokens become one: cls, mean or last; None: as its files say."""
    normalizes: bool | None = None
    """Whether an embedding model's vectors have length 1; None: as its files say."""
    metrics: str | None = None
    tls_dir: Path | None = None
    insecure: bool = False
    join_token_file: Path | None = None
    probe: str | None = None
    memory_node: int | None = None
    kv_cache_node_share: float = 0.4
    huge_pages: bool = True
    kv_memory: str | None = None
    keep_kv_memory: bool = False
    kv_disk: Path | None = None
    kv_disk_gb: float = 16.0
    kv_disk_key: Path | None = None
    kv_peers: bool = True
    kv_handover_gb: float = 4.0
    cache_eviction: str | None = None
    trims_windows: bool = False
    """Whether layers with a sliding window keep only their windows."""
    max_images: int = 16
    """How many images a request may have; 0 serves text only."""
    max_image_pixels: int | None = None
    """The most pixels that a model sees of an image, if it takes images in their own size."""
    image_threads: int | None = None
    """Threads that encode images; None: as many as compute."""
    image_cache_gb: float = 1.0
    """Memory for the states of images, in GiB."""
    role: str = "both"
    adapters: tuple[tuple[str, Path], ...] = ()
    """Names and paths of LoRA adapters."""
    max_adapters: int = 0
    """How many are in memory at a time; 0 serves without adapters."""
