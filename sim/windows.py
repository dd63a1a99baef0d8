"""How the memory of a simulated worker is divided if some layers keep only a window of each request. Pure."""

from __future__ import annotations

from headrace.worker.kv.groups.window import PartSizes, WindowBudget, divide

__all__ = ["WindowBudget", "divided"]


def divided(
    num_bytes: int,
    block_bytes: int,
    part_bytes: int,
    block_size: int,
    window: int,
    max_num_seqs: int,
    step_tokens: int,
) -> tuple[int, WindowBudget]:
    """The blocks of `block_size` tokens that `num_bytes` hold, and the slots beside them, as a worker divides them.
    `block_bytes` are those of a block without its part for the layers that keep `window` tokens, and `part_bytes` those
    of the part."""
    return divide(num_bytes, PartSizes(block_bytes, block_size, part_bytes, window), max_num_seqs, step_tokens)
