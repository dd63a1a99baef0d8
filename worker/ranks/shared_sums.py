"""Sums over ranks in memory that their processes share.

Each rank writes its part, says so in a counter, waits for the counters of the others, and adds up all parts in the
order of ranks, so all have the same bits. Two buffers alternate: a rank writes to one again only after each other rank
has begun the sum after it, and so has read it. A part that is larger than a buffer is summed up piece by piece.

    counters  see `counters`                 how many pieces a rank has written
    parts     f32 [2, ranks, capacity]
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from headrace.worker.ranks import counters
from headrace.worker.ranks.counters import Counters

Array = npt.NDArray[np.float32]


def bytes_for(num_ranks: int, capacity: int) -> int:
    """The size in bytes of the memory for sums of up to `capacity` numbers at a time."""
    return counters.bytes_for(num_ranks) + 4 * 2 * num_ranks * capacity


class SharedSums:
    """One rank's view of the sums in `memory` of at least `bytes_for` bytes, all 0 when the first rank begins. A rank
    that waits long calls `is_alive`. RankLostError if that returns False."""

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        num_ranks: int,
        capacity: int,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        end = counters.bytes_for(num_ranks)
        self._counters = Counters(memory[:end], rank, is_alive)
        numbers = np.frombuffer(memory, np.float32, 2 * num_ranks * capacity, end)
        self._parts: Array = numbers.reshape(2, num_ranks, capacity)
        self._rank = rank
        self._others = [other for other in range(num_ranks) if other != rank]
        self._count = self._counters.of(rank)

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others, in all."""
        return self._counters.waited_s

    def add(self, _number: int, part: Array, total: Array) -> None:
        """Write the sum of all ranks' parts to `total`, which has the same shape as `part`. All ranks must call it
        equally often, with equal shapes."""
        flat, totals = part.reshape(-1), total.reshape(-1)
        capacity = self._parts.shape[2]
        for start in range(0, flat.size, capacity):
            self._add_piece(flat[start : start + capacity], totals[start : start + capacity])

    def _add_piece(self, part: Array, total: Array) -> None:
        parts = self._parts[self._count & 1, :, : part.size]
        parts[self._rank] = part
        self._count += 1
        self._counters.set(self._count)
        self._counters.wait(self._others, self._count)
        np.add(parts[0], parts[1], out=total)
        for other in parts[2:]:
            np.add(total, other, out=total)
