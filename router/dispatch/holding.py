"""Models whose workers are started on demand, and the requests that are held until one is there.

An autoscaler may take the last worker of such a model away. The router still knows the model's name. It holds requests
for it, for at most `cold_start_s`, and says that a worker is wanted. The requests continue when a worker joins.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from headrace.common.observers import Observers
from headrace.protos.status import Reason, StatusError

COLD_START_S = 300.0
# A client that comes back now is held again.
_RETRY_S = 10.0


@dataclass(frozen=True, slots=True)
class OnDemand:
    """The models whose workers are started on demand, and how long requests are held for a worker."""

    models: frozenset[str] = frozenset()
    cold_start_s: float = COLD_START_S

    def __contains__(self, model: str) -> bool:
        """Whether workers of this model are started on demand."""
        return model in self.models

    @property
    def names(self) -> list[str]:
        """The models' names, sorted."""
        return sorted(self.models)

    def resolved(self, model: str, known: Collection[str]) -> str:
        """The model that a request names: for "", the only model, if no other one is `known`."""
        if not model and len(self.models) == 1 and self.models.issuperset(known):
            return next(iter(self.models))
        return model


class Holding:
    """The requests of one router that wait for a worker of a model without any. For one event loop."""

    def __init__(self, on_demand: OnDemand) -> None:
        self.on_demand = on_demand
        self.changes: Observers[str] = Observers()
        """Told of a model's name when its first request is held."""
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> Mapping[str, int]:
        """The number of requests that are held, by model."""
        return self._held

    @property
    def num_held(self) -> int:
        """The number of requests that are held, for all models."""
        return self._held.total()

    @contextlib.contextmanager
    def holding(self, model: str) -> Iterator[None]:
        """Context manager: a request waits for a worker of this model, which is on demand."""
        self._held[model] += 1
        if self._held[model] == 1:
            self.changes.tell(model)
        try:
            yield
        finally:
            self._held[model] -= 1
            if not self._held[model]:
                del self._held[model]

    def not_started(self, model: str) -> StatusError:
        """The error if no worker has joined in time."""
        return StatusError(
            Reason.MODEL_NOT_LOADED,
            f"no worker of model {model!r} was started within {self.on_demand.cold_start_s:g} s (--cold-start of the "
            "router): look at the autoscaler of its workers, and try again later",
            retry_after_s=_RETRY_S,
        )
