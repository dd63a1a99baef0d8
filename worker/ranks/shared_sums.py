"""Sums over ranks in memory that their processes share.

Each rank writes its part, says so in a counter, waits for the counters of the others, and adds up all parts in the
order of ranks, so all have the same bits. Two buffers alternate: a rank writes to one again only after each other rank
has begun the sum after it, and so has read it.

    counters  i64 [ranks, 8]                 a cache line each: how many parts a rank has written
    parts     f32 [2, ranks, capacity]
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
_LINE = 8
# A rank looks at the counters so long before it lets others run, and so long before it sleeps between two looks.
_SPIN_S, _YIELD_S, _SLEEP_S = 50e-6, 2e-3, 50e-6


class RankLostError(Exception):
    """Another rank no longer answers."""


def bytes_for(num_ranks: int, capacity: int) -> int:
    """The size of the memory for sums of up to `capacity` numbers."""
    return 8 * _LINE * num_ranks + 4 * 2 * num_ranks * capacity


class SharedSums:
    """One rank's end of the sums in `memory` of at least `bytes_for` bytes, all 0 when the first rank begins.
    `is_alive` is asked while a rank waits long; RankLostError when it says no."""

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        num_ranks: int,
        capacity: int,
        is_alive: Callable[[], bool] = lambda: True,
    ) -> None:
        end = 8 * _LINE * num_ranks
        self._counters = memory[:end].cast("q")
        numbers = np.frombuffer(memory, np.float32, 2 * num_ranks * capacity, end)
        self._parts: npt.NDArray[np.float32] = numbers.reshape(2, num_ranks, capacity)
        self._rank = rank
        self._others = [_LINE * other for other in range(num_ranks) if other != rank]
        self._is_alive = is_alive
        self._fence_lock = threading.Lock()
        self._count = self._counters[_LINE * rank]
        self.waited_s = 0.0
        """Seconds that this rank has waited for others, in all."""

    def add(self, _number: int, part: Array, total: Array) -> None:
        """Write the sum of all ranks' parts to `total`, both of the same shape; the ranks must call this equally often,
        with equal shapes."""
        size = math.prod(part.shape)
        parts = self._parts[self._count & 1, :, :size]
        parts[self._rank] = part.reshape(-1)
        self._count += 1
        self._fence()
        self._counters[_LINE * self._rank] = self._count
        self._wait()
        self._fence()
        flat = total.reshape(-1)
        np.add(parts[0], parts[1], out=flat)
        for other in parts[2:]:
            np.add(flat, other, out=flat)

    def _fence(self) -> None:
        """Keep the order of what is read and written before and after, on CPUs that would change it: a lock that is
        released and taken again."""
        for _ in range(2):
            with self._fence_lock:
                pass

    def _wait(self) -> None:
        counters, count = self._counters, self._count
        start = 0.0
        for place in self._others:
            while counters[place] < count:
                now = time.perf_counter()
                start = start or now
                if now - start > _YIELD_S:
                    if not self._is_alive():
                        raise RankLostError("another rank no longer answers")
                    time.sleep(_SLEEP_S)
                elif now - start > _SPIN_S:
                    time.sleep(0)
        if start:
            self.waited_s += time.perf_counter() - start
