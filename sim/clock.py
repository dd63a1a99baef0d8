"""Virtual time: events in the order of their times, those of one time in the order in which they were asked for.

Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class VirtualClock:
    """Time in seconds from 0, which moves only when `run` goes from one event to the next."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Call `action` at this time, which is not past."""
        assert when_s >= self.now_s, f"an event at {when_s} s is asked for at {self.now_s} s"
        heapq.heappush(self._events, (when_s, next(self._number), action))

    def run(self) -> None:
        """Go on until no event is left."""
        events = self._events
        while events:
            self.now_s, _, action = heapq.heappop(events)
            action()
