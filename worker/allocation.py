"""Allocates the memory that a model keeps between steps, and divides it among the groups of its layers: KV blocks,
parts of blocks for layers with a sliding window, states of recurrent layers, and the draft model's part of blocks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from headrace.common.host_memory import GIB, available_bytes
from headrace.worker.config import ConfigurationError, WorkerConfig
from headrace.worker.host.binding import Region
from headrace.worker.kv.arena import KVArena
from headrace.worker.kv.cache import GroupBudget
from headrace.worker.kv.groups import recurrent, window
from headrace.worker.kv.groups.evicting import EvictionBudget
from headrace.worker.kv.groups.recurrent import SLOTS_OF_REQUEST, StateBudget, StateSizes
from headrace.worker.kv.groups.window import PartSizes, WindowBudget
from headrace.worker.kv.kept_cache import CacheFormat, KeptCache
from headrace.worker.kv.layers import LayerGroup, LayerKind, group_of
from headrace.worker.kv.memory import budget_for, no_room, num_blocks_for
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.numerics import kv_numerics
from headrace.worker.request.step import FIRST_STATE_SLOT

if TYPE_CHECKING:
    from headrace.worker.draft_heads.eagle_runner import EagleRunner
    from headrace.worker.draft_heads.medusa_runner import MedusaRunner
    from headrace.worker.model.runner import OpenVINOModelRunner

log = logging.getLogger("headrace.worker")

# The slots of running requests take at most this share of the memory.
_MOST_FOR_RUNNING = 0.5


class Allocation(NamedTuple):
    """The KV cache, the limits of steps that fit it, the cache that outlives the process if there is one, and what the
    groups of layers got beside the blocks."""

    num_blocks: int
    region: Region
    limits: StepLimits
    kept: KeptCache | None
    groups: Sequence[GroupBudget] = ()


def allocate(
    config: WorkerConfig,
    runner: OpenVINOModelRunner,
    limits: StepLimits,
    kept: KeptCache | None,
    draft: OpenVINOModelRunner | EagleRunner | MedusaRunner | None,
) -> Allocation:
    """Allocate all memory. ConfigurationError if it does not fit."""
    draft_bytes = draft.block_bytes if draft is not None else 0
    recurrent_layers = group_of(runner.layer_groups, LayerKind.RECURRENT)
    window_layers = group_of(runner.layer_groups, LayerKind.WINDOW)
    hint_at_windows(config, runner)
    groups: list[GroupBudget] = [EvictionBudget()] if config.cache_eviction is not None else []
    if kept is not None and recurrent_layers is not None:
        kept.discard()  # it has no states
        kept = None
    if window_layers is not None:
        num_blocks, windows, arena = _allocate_with_parts(config, runner, window_layers, limits, kept, draft_bytes)
        groups.append(windows)
    elif recurrent_layers is not None:
        num_blocks, states, limits = _divide_with_states(
            config, runner, recurrent_layers, budget_for(config), limits, draft_bytes
        )
        arena = runner.allocate(num_blocks, huge_pages=config.huge_pages)
        groups.append(states)
    else:
        num_blocks, arena = _allocate_cache(config, runner, limits, kept, draft_bytes)
    if draft is not None:
        draft.allocate(num_blocks, huge_pages=config.huge_pages)
    return Allocation(num_blocks, Region(arena.address, arena.size_bytes), limits, kept, groups)


def hint_at_windows(config: WorkerConfig, runner: OpenVINOModelRunner) -> None:
    """Log that the KV cache could hold more tokens, or that --window-cache has no effect."""
    if group_of(runner.layer_groups, LayerKind.WINDOW) is not None:
        return
    if group_of(runner.layer_groups, LayerKind.RECURRENT) is not None:
        return
    if config.trims_windows:
        log.warning("--window-cache trim has no effect on this model: no layer has a sliding window")
    elif runner.windows.layers:
        log.info(
            "%d layers see no more than the last %d tokens; with --window-cache trim the KV cache may hold several "
            "times as many tokens",
            len(runner.windows.layers),
            runner.windows.num_tokens,
        )


def _allocate_with_parts(
    config: WorkerConfig,
    runner: OpenVINOModelRunner,
    layers: LayerGroup,
    limits: StepLimits,
    kept: KeptCache | None,
    draft_bytes: int,
) -> tuple[int, WindowBudget, KVArena]:
    """Allocate blocks, and slots for their parts for layers with a window. Another `draft_bytes` of each block are
    allocated elsewhere. ConfigurationError if there is no room."""
    sizes = PartSizes(runner.block_bytes + draft_bytes, runner.block_size, layers.block_bytes, layers.window)
    if kept is None:
        num_blocks, windows = _divide_between_parts(runner, sizes, budget_for(config), limits)
        return num_blocks, windows, runner.allocate(num_blocks, windows.num_slots, huge_pages=config.huge_pages)
    with kept.memory.sizing():
        like = _format_of(config, runner, limits, draft_bytes)
        found = _found_format(kept, like, draft_bytes)
        if found is None:
            budget = budget_for(config, kept_bytes(kept), kept.memory.room_bytes)
            num_blocks, windows = _divide_between_parts(runner, sizes, budget, limits)
        else:
            num_blocks, num_slots = found.num_blocks - 1, found.num_slots - 1
            of_step = -(-limits.max_num_batched_tokens // runner.block_size)
            windows = window.budget_of(num_blocks, num_slots, layers.window, of_step)
        wanted = replace(like, num_blocks=num_blocks + 1, num_slots=windows.num_slots + 1)
        arena = runner.allocate(num_blocks, windows.num_slots, make_arena=lambda: kept.adopt(wanted))
        return num_blocks, windows, arena


def _divide_between_parts(
    runner: OpenVINOModelRunner, sizes: PartSizes, budget: int, limits: StepLimits
) -> tuple[int, WindowBudget]:
    """Divide `budget` bytes between blocks and their parts for layers with a window. ConfigurationError if there is no
    room."""
    num_blocks, windows = window.divide(budget, sizes, limits.max_num_seqs, limits.max_num_batched_tokens)
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


def _divide_with_states(
    config: WorkerConfig,
    runner: OpenVINOModelRunner,
    layers: LayerGroup,
    budget: int,
    limits: StepLimits,
    draft_bytes: int,
) -> tuple[int, StateBudget, StepLimits]:
    """Divide `budget` bytes between blocks and slots for states, and allocate the slots. Returns the number of blocks,
    the slots, and the limits with the number of requests for which there are slots. ConfigurationError if there is no
    room."""
    sizes = StateSizes(runner.block_bytes + draft_bytes, runner.block_size, layers.block_bytes)
    limits = replace(limits, max_num_seqs=most_requests(config, budget, sizes, limits.max_num_seqs))
    num_blocks, states = recurrent.divide(budget, sizes, limits.max_num_seqs)
    if num_blocks < 1:
        raise no_room(budget, sizes.block_bytes)
    precisions = runner.allocate_states(states.num_slots, huge_pages=config.huge_pages)
    log.info(
        "recurrent layers: %d slots of %.2f MiB (%s) for states take %.2f GiB of the KV cache's memory; a cached "
        "prefix is used as far as a state of it is saved, every %d tokens of a prompt and at its end",
        states.num_slots,
        sizes.slot_bytes / (1 << 20),
        precisions,
        states.num_slots * sizes.slot_bytes / GIB,
        states.interval,
    )
    return num_blocks, states, limits


def most_requests(config: WorkerConfig, budget: int, sizes: StateSizes, max_num_seqs: int) -> int:
    """How many requests may run, at most `max_num_seqs`, so that their slots leave room for blocks in `budget` bytes.
    ConfigurationError if the flags ask for more, or if there is no room for one."""
    room = int(_MOST_FOR_RUNNING * budget) // sizes.slot_bytes - FIRST_STATE_SLOT
    possible = room // SLOTS_OF_REQUEST
    if possible < (config.max_num_seqs or 1):
        raise ConfigurationError(
            f"a KV cache of {budget / GIB:.3f} GiB has room for {max(0, possible)} requests, each of which needs "
            f"{SLOTS_OF_REQUEST * sizes.slot_bytes / GIB:.3f} GiB for the states of recurrent layers; ask for more "
            "with --kv-cache-gb, or for fewer requests with --max-num-seqs"
        )
    return min(max_num_seqs, possible)


def _allocate_cache(
    config: WorkerConfig, runner: OpenVINOModelRunner, limits: StepLimits, kept: KeptCache | None, draft_bytes: int
) -> tuple[int, KVArena]:
    """Allocate whole blocks. Another `draft_bytes` of each block are allocated elsewhere."""
    block_bytes = runner.block_bytes + draft_bytes
    if kept is None:
        num_blocks = num_blocks_for(config, block_bytes, most_blocks=runner.most_blocks(config.kv_cache_node_share))
        return num_blocks, runner.allocate(num_blocks, huge_pages=config.huge_pages)
    with kept.memory.sizing():
        like = _format_of(config, runner, limits, draft_bytes)
        found = _found_format(kept, like, draft_bytes)
        if found is None:
            most = runner.most_blocks(config.kv_cache_node_share, kept_bytes(kept))
            room = kept.memory.room_bytes
            num_blocks = num_blocks_for(config, block_bytes, kept_bytes(kept), room, most_blocks=most)
        else:
            num_blocks = found.num_blocks - 1
        wanted = replace(like, num_blocks=num_blocks + 1)
        return num_blocks, runner.allocate(num_blocks, make_arena=lambda: kept.adopt(wanted))


def _format_of(config: WorkerConfig, runner: OpenVINOModelRunner, limits: StepLimits, draft_bytes: int) -> CacheFormat:
    """The format of the cache, without the numbers of its blocks and slots."""
    sizing = f"{config.kv_cache_bytes} {config.kv_cache_share} {config.memory_node} {config.kv_cache_node_share}"
    if draft_bytes:
        sizing += f" {draft_bytes}"
    if runner.in_slots:  # slots are divided by these
        sizing += f" {limits.max_num_seqs} {limits.max_num_batched_tokens}"
    numerics = kv_numerics(runner, limits)
    return CacheFormat(numerics, sizing, 0, runner.block_size, runner.block_shapes, in_slots=runner.in_slots)


def _found_format(kept: KeptCache, like: CacheFormat, draft_bytes: int) -> CacheFormat | None:
    """The format of the previous process's cache, if it is `like` the wanted one and still fits. Available memory
    varies, and a cache with another number of blocks could not be restored."""
    found = kept.format_like(like)
    if found is None or found.cache_bytes + found.num_blocks * draft_bytes > available_bytes() + kept_bytes(kept):
        return None
    return found


def kept_bytes(kept: KeptCache | None) -> int:
    """The resident memory in bytes that the previous process's KV cache takes; 0 without one."""
    return 0 if kept is None else kept.memory.resident_bytes
