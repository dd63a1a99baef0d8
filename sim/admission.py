"""Admission control of a simulated router: requests wait there until a worker has room, or are refused.

As `headrace.router.dispatch.admission`, for one model and one tenant: a request is placed at once if a worker has room
and none waits, and otherwise queued, unless its predicted wait is too long. A queue is looked at when a request of the
router ends, and as often as workers report.

Pure: the caller passes the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from headrace.sim.router import SimulatedRouter


class SimulatedAdmission:
    """The queue of one router. No request waits for longer than `max_wait_s`. `place` places a request whose turn has
    come, and `refuse` ends one; both get its number."""

    def __init__(
        self, router: SimulatedRouter, max_wait_s: float, place: Callable[[int], None], refuse: Callable[[int], None]
    ) -> None:
        self._router = router
        self._max_wait_s = max_wait_s
        self._place = place
        self._refuse = refuse
        self._waiting: deque[tuple[int, float]] = deque()

    @property
    def has_waiting(self) -> bool:
        """Whether a request waits."""
        return bool(self._waiting)

    def arrived(self, number: int, now_s: float) -> None:
        """Place a request that has come to the router, refuse it, or let it wait."""
        if not self._waiting and self._router.has_room(now_s):
            self._place(number)
        elif self._router.predicted_wait_s(len(self._waiting), now_s) > self._max_wait_s:
            self._refuse(number)
        else:
            self._waiting.append((number, now_s))

    def look(self, now_s: float) -> None:
        """Place the next requests in the queue, as long as there is room, and refuse those that have waited too
        long."""
        waiting = self._waiting
        while waiting:
            number, since_s = waiting[0]
            if now_s - since_s > self._max_wait_s:
                waiting.popleft()
                self._refuse(number)
            elif self._router.has_room(now_s):
                waiting.popleft()
                self._place(number)
            else:
                return
