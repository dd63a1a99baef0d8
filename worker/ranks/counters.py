"""Counters in shared memory, by which ranks wait for one another.

    counters  i64 [ranks, 8]     a cache line each; only its own rank changes it

A rank writes what others need, then its counter; another rank that sees the counter sees what was written before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

_LINE = 8
# A rank looks at the counters so long before it lets others run, and so long before it sleeps between two looks.
_SPIN_S, _YIELD_S, _SLEEP_S = 50e-6, 2e-3, 50e-6


class RankLostError(Exception):
    """Another rank no longer answers."""


def bytes_for(num_ranks: int) -> int:
    """The size in bytes of the memory for the counters of `num_ranks` ranks."""
    return 8 * _LINE * num_ranks


class Counters:
    """One rank's view of the counters in `memory` of `bytes_for` bytes, all 0 when the first rank begins. A rank that
    waits long calls `is_alive`."""

    def __init__(self, memory: memoryview, rank: int, is_alive: Callable[[], bool] = lambda: True) -> None:
        self._counters = memory.cast("B").cast("q")
        self._own = _LINE * rank
        self._is_alive = is_alive
        self._fence_lock = threading.Lock()
        self.waited_s = 0.0
        """Seconds that this rank has waited for others, in all."""

    def of(self, rank: int) -> int:
        """A rank's counter."""
        return int(self._counters[_LINE * rank])

    def set(self, count: int) -> None:
        """Set the rank's own counter, after all its earlier writes."""
        self._fence()
        self._counters[self._own] = count

    def wait(self, ranks: Iterable[int], count: int) -> None:
        """Wait until these ranks' counters have reached `count`. RankLostError if `is_alive` returns False."""
        counters = self._counters
        start = 0.0
        for place in (_LINE * rank for rank in ranks):
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
        self._fence()

    def _fence(self) -> None:
        """Keep earlier memory accesses before later ones, on CPUs that would reorder them. A lock that is taken and
        released does this."""
        for _ in range(2):
            with self._fence_lock:
                pass
