"""Distributes the cached blocks of a draining worker over others. Pure.

Blocks that another worker already has stay where they are. The rest go to the worker with the most room, most recently
used blocks first. The blocks of a chain go to one worker. Where chains diverge, each branch may go to another worker,
which then also gets the preceding blocks that it lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.protos.load_report import LoadReport

# A block that a worker would need only as the predecessor of others counts as this many.
_COPY_COST = 4


class Handed(NamedTuple):
    """A block of the draining worker. `holders` are the others that have it, by number."""

    block_hash: int
    parent_hash: int
    is_first: bool
    holders: frozenset[int] = frozenset()


def rooms(loads: Sequence[LoadReport], num_blocks: int) -> list[int]:
    """How many of `num_blocks` blocks each worker should take: first as many as it has empty ones. If that is not
    enough, all workers lose the same share of their cached blocks, and the draining worker loses the same share of its
    own."""
    free = [load.num_free_blocks for load in loads]
    empty = [max(0, load.num_free_blocks - load.num_reusable_blocks) for load in loads]
    over = max(0, num_blocks - sum(empty))
    used = sum(free) - sum(empty)
    share = over / (over + used) if used else 0.0
    return [some + int(share * (all_free - some)) for some, all_free in zip(empty, free, strict=True)]


def distribute(blocks: Sequence[Handed], room: Sequence[int]) -> list[list[Handed]]:
    """The blocks that each worker should take, given the number that it has room for. `blocks` has the most recently
    used first. There and in the result, each block comes after its predecessor."""
    left = list(room)
    by_hash = {block.block_hash: block for block in blocks}
    parts: list[dict[int, Handed]] = [{} for _ in room]
    heir: dict[int, int] = {}  # the worker that gets the first continuation of a block

    def lacking(block: Handed, worker: int, most: int) -> list[Handed]:
        """The block and its predecessors that a worker lacks, last one first, at most `most` + 1 of them."""
        chain = [block]
        while not chain[-1].is_first and len(chain) <= most:
            before = by_hash.get(chain[-1].parent_hash)
            if before is None or worker in before.holders or before.block_hash in parts[worker]:
                break
            chain.append(before)
        return chain

    for block in blocks:
        if block.holders or any(block.block_hash in part for part in parts):
            continue
        best = -1
        best_score = 0
        continued = heir.pop(block.parent_hash, -1)
        if continued >= 0 and left[continued] > 0:
            best = continued
        else:
            for worker, room_left in enumerate(left):
                cost = _COPY_COST * (len(lacking(block, worker, room_left)) - 1)
                if room_left > cost and room_left - cost > best_score:
                    best = worker
                    best_score = room_left - cost
        if best < 0:
            continue
        chain = lacking(block, best, left[best])
        if len(chain) > left[best]:
            continue
        parts[best].update((each.block_hash, each) for each in reversed(chain))
        left[best] -= len(chain)
        heir[block.block_hash] = best
    return [list(part.values()) for part in parts]
