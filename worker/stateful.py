"""Models with recurrent layers: divides the memory of the KV cache between blocks and the slots for states, and refuses
flags that do not work with such models."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from headrace.worker.config import ConfigurationError, WorkerConfig
from headrace.worker.kv.memory import GIB, no_room
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.request.step import FIRST_STATE_SLOT
from headrace.worker.states.slots import StateBudget

if TYPE_CHECKING:
    from headrace.worker.model.runner import OpenVINOModelRunner

log = logging.getLogger("headrace.worker")

# Saved states take at most this share of the memory of their tokens' blocks.
_STATES_PER_KV = 1 / 8
# At most one state is saved for this many blocks, even if states are tiny.
_LEAST_BLOCKS = 8
# The slots of running requests take at most this share of the memory.
_MOST_FOR_RUNNING = 0.5
# A running request may read one slot and write another.
_SLOTS_OF_REQUEST = 2
_NO_STATE = "continues only where a state of its recurrent layers is saved, and states stay in memory"


class Sizes(NamedTuple):
    """The bytes of each block of `block_size` tokens, and of each slot."""

    block_bytes: int
    block_size: int
    slot_bytes: int


def refuse_flags(config: WorkerConfig) -> None:
    """Raise ConfigurationError for flags that a model with recurrent layers cannot have."""
    if config.kv_disk is not None:
        raise ConfigurationError(f"--kv-disk is of no use with this model: it {_NO_STATE}; leave the flag out")
    if config.role != "both":
        problem = f"--role {config.role} is of no use with this model: it {_NO_STATE}; leave the flag out"
        raise ConfigurationError(problem)
    if config.decode_graph:
        raise ConfigurationError(
            "--decode-graph on is not possible with this model: the two graphs would need states of different "
            "precisions; leave the flag out"
        )
    wanted = "--draft-model" if config.draft_model is not None else f"--speculation {config.speculation}"
    if config.draft_model is not None or config.speculation not in (None, "auto", "off"):
        raise ConfigurationError(
            f"{wanted} is not possible with this model: the states of its recurrent layers cannot be cut back when a "
            "draft is rejected; leave the flag out"
        )


def divide_memory(
    config: WorkerConfig, runner: OpenVINOModelRunner, budget: int, limits: StepLimits
) -> tuple[int, StateBudget, StepLimits]:
    """Divide `budget` bytes, and allocate the slots. Returns the number of blocks, the slots, and the limits with the
    number of requests for which there are slots. ConfigurationError if there is no room, or for flags that do not work
    with such a model."""
    refuse_flags(config)
    assert runner.state_tables is not None, "the model has no recurrent layers"
    sizes = Sizes(runner.block_bytes, runner.block_size, runner.state_tables.slot_bytes)
    limits = replace(limits, max_num_seqs=most_requests(config, budget, sizes, limits.max_num_seqs))
    num_blocks, states = divide(budget, sizes, limits.max_num_seqs)
    if num_blocks < 1:
        raise no_room(budget, sizes.block_bytes)
    runner.allocate_states(states.num_slots, huge_pages=config.huge_pages)
    log.info(
        "recurrent layers: %d slots of %.2f MiB (%s) for states take %.2f GiB of the KV cache's memory; a cached "
        "prefix is used as far as a state of it is saved, every %d tokens of a prompt and at its end",
        states.num_slots,
        sizes.slot_bytes / (1 << 20),
        runner.state_tables.precisions,
        states.num_slots * sizes.slot_bytes / GIB,
        states.interval,
    )
    return num_blocks, states, limits


def most_requests(config: WorkerConfig, budget: int, sizes: Sizes, max_num_seqs: int) -> int:
    """How many requests may run, at most `max_num_seqs`, so that their slots leave room for blocks in `budget` bytes.
    ConfigurationError if the flags ask for more, or if there is no room for one."""
    room = int(_MOST_FOR_RUNNING * budget) // sizes.slot_bytes - FIRST_STATE_SLOT
    possible = room // _SLOTS_OF_REQUEST
    if possible < (config.max_num_seqs or 1):
        raise ConfigurationError(
            f"a KV cache of {budget / GIB:.3f} GiB has room for {max(0, possible)} requests, each of which needs "
            f"{_SLOTS_OF_REQUEST * sizes.slot_bytes / GIB:.3f} GiB for the states of recurrent layers; ask for more "
            "with --kv-cache-gb, or for fewer requests with --max-num-seqs"
        )
    return min(max_num_seqs, possible)


def divide(budget: int, sizes: Sizes, max_num_seqs: int) -> tuple[int, StateBudget]:
    """The number of blocks in `budget` bytes beside the slots and one block for padding. 0 or less if there is no
    room."""
    num_blocks_between = max(_LEAST_BLOCKS, -(-sizes.slot_bytes // int(_STATES_PER_KV * sizes.block_bytes)))
    left = budget - (_SLOTS_OF_REQUEST * max_num_seqs + FIRST_STATE_SLOT) * sizes.slot_bytes
    num_blocks = int(left // (sizes.block_bytes + sizes.slot_bytes / num_blocks_between)) - 1
    num_slots = _SLOTS_OF_REQUEST * max_num_seqs + max(0, num_blocks) // num_blocks_between
    return num_blocks, StateBudget(num_slots, num_blocks_between * sizes.block_size)
