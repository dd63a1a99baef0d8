"""Remembers which models departed workers served. An answer that only such a worker can continue waits for its return.

Pure: no I/O and no clock. Times are in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set


class Departed:
    """Workers that no longer take requests, by name, each with the identities of its model, without and with each of
    its adapters. A worker is forgotten after `remember_s`, or as soon as it takes requests again, for any model. The
    oldest are forgotten if all together have more than `max_identities`.
    """

    def __init__(self, remember_s: float, max_identities: int) -> None:
        self._remember_s = remember_s
        self._max_identities = max_identities
        self._num_identities = 0
        self._workers: OrderedDict[str, tuple[Set[str], float]] = OrderedDict()  # in order of departure

    def went(self, worker_id: str, identities: Set[str], now_s: float) -> None:
        """Record that a worker no longer takes requests."""
        self.came(worker_id)
        self._workers[worker_id] = (identities, now_s)
        self._num_identities += len(identities)
        while self._num_identities > self._max_identities and len(self._workers) > 1:
            self.came(next(iter(self._workers)))

    def came(self, worker_id: str) -> None:
        """Record that a worker takes requests again."""
        if worker_id in self._workers:
            self._num_identities -= len(self._workers.pop(worker_id)[0])

    def may_come_back(self, model_identity: str, now_s: float) -> bool:
        """Whether a worker of this model left recently and has not come back with another model."""
        return any(
            model_identity in identities and now_s - went_s < self._remember_s
            for identities, went_s in self._workers.values()
        )
