"""How many workers a model should have. Pure; Ray copies this module by value, so it imports nothing of headrace."""

from __future__ import annotations

import math
from typing import Any

# Ratios this near to 1 change nothing, so that noise does not.
_TOLERANCE = 0.1


class SignalPolicy:
    """Ray Serve's policy for a deployment of workers: as many as routers want, and more while queue wait or KV pressure
    are above their targets.

    Every replica reports the fleet's values for its model (`Worker.record_autoscaling_stats`); the largest count.
    """

    def __init__(self, least: int = 1, **targets: float) -> None:
        """`targets`: the target of each value, by its name. With `least` 0, no worker may be enough: Serve starts the
        first one itself, as soon as a gateway calls for it (`Worker.awaken`)."""
        self.least = least
        self.targets = targets

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The desired number of replicas, before Serve applies bounds and delays, and the policy's state (none)."""
        found = context.aggregated_metrics or {}
        values = {name: max(by_replica.values()) for name, by_replica in found.items() if by_replica}
        now = int(context.target_num_replicas)
        return desired(values, self.targets, now, self.least), {}


def desired(values: dict[str, float], targets: dict[str, float], now: int, least: int = 1) -> int:
    """The number of workers for these values, at least `least`. `now` is how many there should be at the moment; it
    stays while no router has seen a worker."""
    ready = values.get("workers", 0.0)
    if ready < 1 or "workers_wanted" not in values:
        return now
    wanted = math.ceil(values["workers_wanted"] - 1e-6)
    ratio = max((values.get(name, 0.0) / target for name, target in targets.items()), default=0.0)
    # Near its target, a value needs the workers that there are.
    needed = math.ceil(ready if abs(ratio - 1.0) <= _TOLERANCE else ready * ratio - 1e-6)
    # Above it, those that load are needed too, though they do not relieve the others yet.
    return max(least, wanted, needed, now if ratio > 1.0 + _TOLERANCE else 0)
