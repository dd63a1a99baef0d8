"""The configuration of a worker, fixed at start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class ConfigurationError(Exception):
    """The configuration cannot be used. The text says what is wrong and what to change. Exit status 2."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """All settings of a worker. `None` means that the worker chooses a value. Defaults are those of its flags."""

    model_dir: Path
    name: str
    worker_id: str
    listen: str
    advertise: str
    routers: tuple[str, ...]
    redis_url: str | None
    drain_timeout_s: float
    threads: int | None
    tensor_parallel: int
    """Among how many ranks the model is divided; 1: it is whole."""
    rank_cpus: tuple[tuple[int, ...], ...]
    """The CPUs of each rank, this process's first; empty if the model is whole."""
    pipeline: int
    """Among how many stages the layers of the model are divided; 1: all are here."""
    stages: tuple[str, ...]
    """The addresses of the other stages; empty if they join."""
    await_stages: str | None
    """Where stages offer themselves; None if `stages` has them, or if there are none."""
    serves_stage: bool
    """Whether this process is a stage of other workers, and no worker."""
    join: str | None
    """Where it offers itself as a stage; None: workers have its address."""
    kv_cache_bytes: int | None
    kv_cache_share: float
    kv_precision: str
    execution_mode: str
    decode_graph: bool | None
    speculation: str | None
    draft_model: Path | None
    """Directory of a smaller model, or of heads, that proposes tokens."""
    draft_tree_tokens: int | None
    """The most tokens of a tree of proposals; None for drafts without branches."""
    draft_tree_depth: int | None
    draft_tree_top_k: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_num_mixed_tokens: int | None
    max_num_waiting: int
    max_ttft_s: float
    stuck_after_s: float
    target_tpot_ms: float | None
    max_context_tokens: int | None
    pooling: str | None
    """How an embedding model's vectors of tokens become one: cls, mean or last; None: as its files say."""
    normalizes: bool | None
    """Whether an embedding model's vectors have length 1; None: as its files say."""
    metrics: str | None
    vllm_metrics: bool
    """Whether the metrics are shown under the names of vLLM too."""
    kv_events: str | None
    """ZeroMQ address for the changes of the prefix cache; None: they are not published."""
    kv_events_replay: str | None
    kv_events_topic: str | None
    tls_dir: Path | None
    insecure: bool
    join_token_file: Path | None
    probe: str | None
    memory_node: int | None
    kv_cache_node_share: float
    huge_pages: bool
    kv_memory: str | None
    keep_kv_memory: bool
    kv_disk: Path | None
    kv_disk_gb: float
    kv_disk_key: Path | None
    kv_peers: bool
    kv_handover_gb: float
    cache_eviction: str | None
    trims_windows: bool
    """Whether layers with a sliding window keep only their windows."""
    max_images: int
    """How many images a request may have; 0 serves text only."""
    max_image_pixels: int | None
    """The most pixels that a model sees of an image, if it takes images in their own size."""
    image_threads: int | None
    """Threads that encode images; None: as many as `threads`."""
    image_cache_gb: float
    """Memory for the states of images, in GiB."""
    role: str
    step_log: Path | None
    """File to which each step is written; None: none."""
    adapters: tuple[tuple[str, Path], ...]
    """Names and paths of LoRA adapters."""
    max_adapters: int
    """How many are in memory at a time; 0 serves without adapters."""
