"""The memory that models take, and the limit for all of them together."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from headrace.cli.models.requirements import PROCESS_BYTES, worker_bytes
from headrace.common.commands import CommandError
from headrace.common.host_memory import GIB, available_bytes

# The share of the available memory that models take together, if some are loaded on demand and no budget is given.
_BUDGET_SHARE = 0.8
# The share of a budget for the KV caches of all models together.
_KV_CACHE_SHARE = 0.4
# A worker makes a second copy of weights of at most this share of the available memory, on CPUs with AMX (see
# docs/decisions/graphs.md#decode-graph).
_SECOND_COPY_SHARE = 0.1


def budget_of(memory_gb: float | None, *, on_demand: bool) -> int | None:
    """Bytes that all models may take together; None for no limit. Without a given size, only models that are loaded on
    demand have one."""
    if memory_gb is not None:
        return int(memory_gb * GIB)
    return int(_BUDGET_SHARE * available_bytes()) if on_demand else None


def kv_cache_gb(budget_bytes: int, kv_share: float, num_workers: int) -> float:
    """The size of each worker's KV cache in GiB, for a model with a share in the KV caches of all models."""
    return _KV_CACHE_SHARE * kv_share * budget_bytes / num_workers / GIB


def weights_in_worker(weight_bytes: int, *, has_amx: bool, has_adapters: bool) -> int:
    """An estimate of a worker's memory without its KV cache and without images; not below the actual value."""
    copies = 1 + has_adapters + (has_amx and weight_bytes <= _SECOND_COPY_SHARE * available_bytes())
    return copies * (worker_bytes(weight_bytes) - PROCESS_BYTES) + PROCESS_BYTES


def check_budget(sizes: Sequence[tuple[str, int, bool]], budget_bytes: int) -> None:
    """Raise CommandError if models can never be loaded within the budget. Each comes with its name, its bytes and
    whether it is pinned."""
    pinned_bytes = sum(num_bytes for _, num_bytes, is_pinned in sizes if is_pinned)
    remedy = "raise --memory-gb, or take smaller models or KV caches"
    if pinned_bytes > budget_bytes:
        raise CommandError(
            f"the models that are always loaded need {pinned_bytes / GIB:.1f} GiB of memory, and the budget is "
            f"{budget_bytes / GIB:.1f} GiB; {remedy}, or load some on demand"
        )
    for name, num_bytes, is_pinned in sizes:
        if not is_pinned and num_bytes + pinned_bytes > budget_bytes:
            beside = f" beside {pinned_bytes / GIB:.1f} GiB for models that are always loaded" if pinned_bytes else ""
            raise CommandError(
                f"{name} needs {num_bytes / GIB:.1f} GiB of memory{beside}, and the budget is "
                f"{budget_bytes / GIB:.1f} GiB; {remedy}"
            )


def private_bytes(pids: Sequence[int]) -> int:
    """Bytes of memory that processes have allocated, without files and shared memory. Those of ended ones are 0."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/status").read_text()
            total += sum(int(kib) << 10 for kib in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB$", text, re.MULTILINE))
    return total
