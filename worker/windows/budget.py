"""Divides the memory of the KV cache between blocks and the slots for their parts of layers with a sliding window."""

from __future__ import annotations

from typing import NamedTuple

from headrace.worker.windows.manager import PARTS_BESIDE, WindowBudget

# The slots of running requests take at most this share of the memory.
_MOST_FOR_RUNNING = 0.5
# One slot for this many blocks keeps the parts from which requests can continue: a conversation of eight windows needs
# one window of parts.
_BLOCKS_PER_KEPT_PART = 8


class PartSizes(NamedTuple):
    """The bytes of each block of `block_size` tokens without its part, and of each part; and the window of the layers
    in tokens."""

    block_bytes: int
    block_size: int
    part_bytes: int
    window: int


def divide(budget: int, sizes: PartSizes, max_num_seqs: int, step_tokens: int) -> tuple[int, WindowBudget]:
    """The number of blocks in `budget` bytes beside the slots, with one more of each for padding. There are slots for
    the windows of `max_num_seqs` requests and for the `step_tokens` tokens of a step, if these do not take too much.
    Each block has a slot if fewer slots would save nothing. The number of blocks is 0 if there is no room for one."""
    of_request, of_step = sizes.window // sizes.block_size + PARTS_BESIDE, -(-step_tokens // sizes.block_size)
    left = budget - sizes.block_bytes - sizes.part_bytes
    most = int(_MOST_FOR_RUNNING * left) // sizes.part_bytes
    running = max(of_request + of_step, min(max_num_seqs * of_request + of_step, most))
    left -= running * sizes.part_bytes
    num_blocks = max(0, int(left // (sizes.block_bytes + sizes.part_bytes / _BLOCKS_PER_KEPT_PART)))
    num_slots = running + num_blocks // _BLOCKS_PER_KEPT_PART
    if num_slots >= num_blocks:  # in this case each block has its part
        num_blocks = num_slots = max(0, budget // (sizes.block_bytes + sizes.part_bytes) - 1)
        of_step = 0
    return num_blocks, WindowBudget(sizes.window, num_slots, of_step)
