"""Virtual time: runs events in order of time. Events at the same time run in the order of their addition. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class VirtualClock:
    """A clock in seconds that starts at 0. `run` advances it from one event to the next."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        """Schedule a call of `action` at `when_s`, which must not be in the past."""
        assert when_s >= self.now_s, f"an event at {when_s} s was added at {self.now_s} s"
        heapq.heappush(self._events, (when_s, next(self._number), action))

    def run(self) -> None:
        """Run until no event is left."""
        events = self._events
        while events:
            self.now_s, _, action = heapq.heappop(events)
            action()
