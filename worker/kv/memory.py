"""Decides how much memory the KV cache may use, within the available memory and that of a NUMA node."""

from __future__ import annotations

from pathlib import Path

from headrace.common.host_memory import GIB, available_bytes
from headrace.worker.config import ConfigurationError, WorkerConfig


def available_on_node(node: int, root: Path = Path("/")) -> int | None:
    """Free and reclaimable bytes of a NUMA node (/sys/devices/system/node/node*/meminfo); None if unknown."""
    try:
        text = (root / f"sys/devices/system/node/node{node}/meminfo").read_text()
    except OSError:
        return None
    found = {
        words[2].rstrip(":"): int(words[3]) * 1024 for words in map(str.split, text.splitlines()) if len(words) > 3
    }
    return sum(found.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable"))


def kv_cache_budget(asked: int | None, share: float, available: int, most: int | None = None) -> int:
    """The size of the KV cache in bytes: `asked` if given, otherwise a share of `available`, but at most `most`. Raises
    ConfigurationError if `asked` exceeds `available`."""
    if asked is None:
        budget = int(available * share)
        return budget if most is None else min(budget, most)
    if asked > available:
        raise ConfigurationError(
            f"--kv-cache-gb asks for {asked / GIB:.1f} GiB, but only {available / GIB:.1f} GiB of memory are available "
            f"to this process; choose a smaller size, or omit the flag to use {share:.0%} of the available memory"
        )
    return asked


def no_room(budget: int, block_bytes: int) -> ConfigurationError:
    """The error if `budget` bytes hold no block."""
    return ConfigurationError(
        f"a KV cache of {budget / GIB:.3f} GiB holds no block of {block_bytes / GIB:.3f} GiB; "
        "ask for more with --kv-cache-gb, or free memory"
    )


def num_blocks_for(
    config: WorkerConfig,
    block_bytes: int,
    kept_bytes: int = 0,
    room_bytes: int | None = None,
    *,
    most_blocks: int | None = None,
) -> int:
    """How many blocks of `block_bytes` the KV cache gets, at least 1 and, if no size is asked for, at most
    `most_blocks`. See `budget_for`. ConfigurationError if there is no room."""
    budget = budget_for(config, kept_bytes, room_bytes)
    if most_blocks is not None and config.kv_cache_bytes is None:
        budget = min(budget, most_blocks * block_bytes)
    num_blocks = budget // block_bytes - 1  # the runner allocates one more, for padding
    if num_blocks < 1:
        raise no_room(budget, block_bytes)
    return num_blocks


def budget_for(config: WorkerConfig, kept_bytes: int = 0, room_bytes: int | None = None) -> int:
    """The memory for the KV cache in bytes. The cache already occupies `kept_bytes`, and its file system has
    `room_bytes`. ConfigurationError if the flags ask for more than there is."""
    on_node = available_on_node(config.memory_node) if config.memory_node is not None else None
    most = int((on_node + kept_bytes) * config.kv_cache_node_share) if on_node is not None else None
    available = available_bytes() + kept_bytes
    if room_bytes is not None:
        # Subtract the memory that the cache takes beside its blocks.
        most = min(int(0.98 * room_bytes) - (4 << 20), available if most is None else most)
    return kv_cache_budget(config.kv_cache_bytes, config.kv_cache_share, available, most)
