"""Allocates the memory of a model: the KV cache, the draft model's part in it, and the states of recurrent layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headrace.worker.config import WorkerConfig
from headrace.worker.host.binding import Region
from headrace.worker.kv.arena import KVArena
from headrace.worker.kv.kept_cache import CacheFormat, KeptCache
from headrace.worker.kv.memory import available_bytes, budget_for, num_blocks_for
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.numerics import kv_numerics
from headrace.worker.stateful import divide_memory
from headrace.worker.states.slots import StateBudget
from headrace.worker.windowed import divide_between, hint_at_windows
from headrace.worker.windows.manager import WindowBudget

if TYPE_CHECKING:
    from headrace.worker.heads.eagle_runner import EagleRunner
    from headrace.worker.heads.medusa_runner import MedusaRunner
    from headrace.worker.model.runner import OpenVINOModelRunner


class Allocation(NamedTuple):
    """The KV cache, the limits of steps that fit it, the slots of states if there are any, the cache that outlives the
    process if there is one, and the slots of layers with a sliding window if these keep only their windows."""

    num_blocks: int
    region: Region
    limits: StepLimits
    states: StateBudget | None
    kept: KeptCache | None
    windows: WindowBudget | None = None


def allocate(
    config: WorkerConfig,
    runner: OpenVINOModelRunner,
    limits: StepLimits,
    kept: KeptCache | None,
    draft: OpenVINOModelRunner | EagleRunner | MedusaRunner | None,
) -> Allocation:
    """Allocate all memory that a model keeps between steps. ConfigurationError if it does not fit."""
    if runner.has_parts:
        if kept is not None:
            kept.discard()  # it has whole blocks
        draft_bytes = draft.block_bytes if draft is not None else 0
        num_blocks, windows = divide_between(runner, budget_for(config), limits, draft_bytes)
        arena = runner.allocate(num_blocks, windows.num_slots, huge_pages=config.huge_pages)
        if draft is not None:
            draft.allocate(num_blocks, huge_pages=config.huge_pages)
        return Allocation(num_blocks, Region(arena.address, arena.size_bytes), limits, None, None, windows)
    hint_at_windows(config, runner)
    if runner.state_tables is None:
        num_blocks, arena = _allocate_cache(config, runner, limits, kept, draft)
        return Allocation(num_blocks, Region(arena.address, arena.size_bytes), limits, None, kept)
    if kept is not None:
        kept.discard()  # of no use without states
    num_blocks, states, limits = divide_memory(config, runner, budget_for(config), limits)
    arena = runner.allocate(num_blocks, huge_pages=config.huge_pages)
    return Allocation(num_blocks, Region(arena.address, arena.size_bytes), limits, states, None)


def _allocate_cache(
    config: WorkerConfig,
    runner: OpenVINOModelRunner,
    limits: StepLimits,
    kept: KeptCache | None,
    draft: OpenVINOModelRunner | EagleRunner | MedusaRunner | None,
) -> tuple[int, KVArena]:
    """Allocate the KV cache, and the part of the draft model in its blocks. Returns the number of blocks, and the
    memory of the former."""
    draft_bytes = draft.block_bytes if draft is not None else 0
    num_blocks, arena = _allocate_own(config, runner, kv_numerics(runner, limits), kept, draft_bytes)
    if draft is not None:
        draft.allocate(num_blocks, huge_pages=config.huge_pages)
    return num_blocks, arena


def _allocate_own(
    config: WorkerConfig, runner: OpenVINOModelRunner, numerics: str, kept: KeptCache | None, draft_bytes: int
) -> tuple[int, KVArena]:
    """Allocate the KV cache. Another `draft_bytes` of each block are allocated elsewhere."""
    shapes, block_bytes = runner.block_shapes, runner.block_bytes + draft_bytes
    sizing = f"{config.kv_cache_bytes} {config.kv_cache_share} {config.memory_node} {config.kv_cache_node_share}"
    sizing += f" {draft_bytes}" if draft_bytes else ""
    if kept is None:
        num_blocks = num_blocks_for(config, block_bytes)
        return num_blocks, runner.allocate(num_blocks, huge_pages=config.huge_pages)
    with kept.memory.sizing():
        # Available memory varies, and a cache with another number of blocks could not be restored.
        before = kept.num_blocks_for(numerics, sizing, shapes)
        if before is not None and before * block_bytes <= available_bytes() + kept_bytes(kept):
            num_blocks = before - 1
        else:
            num_blocks = num_blocks_for(config, block_bytes, kept_bytes(kept), kept.memory.room_bytes)
        wanted = CacheFormat(numerics, sizing, num_blocks + 1, runner.block_size, shapes)
        return num_blocks, runner.allocate(num_blocks, make_arena=lambda: kept.adopt(wanted))


def kept_bytes(kept: KeptCache | None) -> int:
    """Memory that already belongs to the KV cache."""
    return 0 if kept is None else kept.memory.resident_bytes
