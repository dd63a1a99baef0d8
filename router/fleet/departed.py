"""Remembers which models departed workers served. An answer that only such a worker can continue waits for its return.

Pure: no I/O and no clock. Times are in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections import OrderedDict


class Departed:
    """Workers that no longer take requests, by name, each with the identity of its model. A worker is forgotten after
    `remember_s`, or as soon as it takes requests again, for any model. Beyond `max_workers`, the oldest are forgotten.
    """

    def __init__(self, remember_s: float, max_workers: int) -> None:
        self._remember_s = remember_s
        self._max_workers = max_workers
        self._workers: OrderedDict[str, tuple[str, float]] = OrderedDict()  # in order of departure

    def went(self, worker_id: str, model_identity: str, now_s: float) -> None:
        """Record that a worker no longer takes requests."""
        self._workers[worker_id] = (model_identity, now_s)
        self._workers.move_to_end(worker_id)
        if len(self._workers) > self._max_workers:
            self._workers.popitem(last=False)

    def came(self, worker_id: str) -> None:
        """Record that a worker takes requests again."""
        self._workers.pop(worker_id, None)

    def may_come_back(self, model_identity: str, now_s: float) -> bool:
        """Whether a worker of this model left recently and has not come back with another model."""
        return any(
            identity == model_identity and now_s - went_s < self._remember_s
            for identity, went_s in self._workers.values()
        )
