"""Decides how much memory the KV cache may use, within the available memory and that of a NUMA node."""

from __future__ import annotations

from pathlib import Path

from headrace.common.host_memory import GIB, available_bytes
from headrace.worker.config import ConfigurationError

__all__ = ["GIB", "available_bytes", "available_on_node", "kv_cache_budget"]


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
