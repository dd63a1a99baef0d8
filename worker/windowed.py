"""Models whose layers keep only their sliding windows: divides the memory of the KV cache, and refuses flags that need
whole blocks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headrace.worker.config import ConfigurationError, WorkerConfig
from headrace.worker.kv.memory import GIB, no_room
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.windows.budget import PartSizes, divide
from headrace.worker.windows.manager import WindowBudget

if TYPE_CHECKING:
    from headrace.worker.model.runner import OpenVINOModelRunner

log = logging.getLogger("headrace.worker")


def refuse_flags(config: WorkerConfig) -> None:
    """Raise ConfigurationError for flags that contradict --window-cache trim."""
    wanted = None
    if config.kv_disk is not None:
        wanted = "--kv-disk"
    elif config.role != "both":
        wanted = f"--role {config.role}"
    elif config.cache_eviction is not None:
        wanted = "--cache-eviction"
    if config.trims_windows and wanted is not None:
        raise ConfigurationError(
            f"--window-cache trim is not possible with {wanted}, which needs blocks with all their layers; leave out "
            "one of them"
        )


def hint_at_windows(config: WorkerConfig, runner: OpenVINOModelRunner) -> None:
    """Log that the KV cache could hold more tokens, or that --window-cache has no effect."""
    if config.trims_windows:
        why = (
            "some layers keep recurrent states" if runner.state_tables is not None else "no layer has a sliding window"
        )
        log.warning("--window-cache trim has no effect on this model: %s", why)
    elif runner.windows.layers and runner.state_tables is None:
        log.info(
            "%d layers see no more than the last %d tokens; with --window-cache trim the KV cache may hold several "
            "times as many tokens",
            len(runner.windows.layers),
            runner.windows.num_tokens,
        )


def divide_between(
    runner: OpenVINOModelRunner, budget: int, limits: StepLimits, draft_bytes: int
) -> tuple[int, WindowBudget]:
    """Divide `budget` bytes. Another `draft_bytes` of each block are allocated elsewhere. Returns the number of blocks,
    and the slots. ConfigurationError if there is no room."""
    sizes = PartSizes(runner.block_bytes + draft_bytes, runner.block_size, runner.part_bytes, runner.windows.num_tokens)
    num_blocks, windows = divide(budget, sizes, limits.max_num_seqs, limits.max_num_batched_tokens)
    if num_blocks < 1:
        raise no_room(budget, sizes.block_bytes + sizes.part_bytes)
    whole = budget // (sizes.block_bytes + sizes.part_bytes) - 1
    log.info(
        "%d layers keep the last %d tokens of requests: the KV cache has %d blocks, and %d slots for these layers "
        "(%.2f GiB); it would have %d blocks if they kept all tokens",
        len(runner.windows.layers),
        sizes.window,
        num_blocks,
        windows.num_slots,
        windows.num_slots * sizes.part_bytes / GIB,
        whole,
    )
    return num_blocks, windows
