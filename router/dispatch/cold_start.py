"""Waits for the first worker of a model whose workers are started on demand."""

from __future__ import annotations

import time

from headrace.protos import worker_pb2
from headrace.protos.status import Reason, StatusError
from headrace.router.dispatch.admission import Admission
from headrace.router.dispatch.holding import Holding, OnDemand
from headrace.router.fleet.fleet import Fleet


class ColdStarts:
    """Holds callers until a model has a worker. For one event loop."""

    def __init__(self, fleet: Fleet, admission: Admission, holding: Holding) -> None:
        self._fleet = fleet
        self._admission = admission
        self._holding = holding

    @property
    def on_demand(self) -> OnDemand:
        """The models whose workers are started on demand."""
        return self._holding.on_demand

    def resolve(self, model: str) -> worker_pb2.ModelCard | None:
        """As `Fleet.resolve`, but a model that is started on demand is known: None if it has no card yet."""
        on_demand = self._holding.on_demand
        name = on_demand.resolved(model, self._fleet.models())
        try:
            return self._fleet.resolve(name)
        except StatusError as error:
            if error.reason is Reason.MODEL_NOT_FOUND and name in on_demand:
                return None
            raise

    def is_awaited(self, model: str) -> bool:
        """Whether requests for this name are held while it has no worker."""
        on_demand = self._holding.on_demand
        return on_demand.resolved(model, self._fleet.models()) in on_demand

    async def card_of(self, model: str) -> worker_pb2.ModelCard:
        """The card of a model that `is_awaited`, as soon as a worker takes requests for it.

        Raises StatusError: QUEUE_FULL if too many requests wait already, MODEL_NOT_LOADED if no worker joins in time,
        and what `Fleet.resolve` raises.
        """
        name = self._holding.on_demand.resolved(model, self._fleet.models())
        card = self._served(name)
        if card is not None:
            return card
        self._admission.check_room(self._holding.num_held)
        until_s = time.monotonic() + self._holding.on_demand.cold_start_s
        with self._holding.holding(name):
            while (card := self._served(name)) is None:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise self._holding.not_started(name)
                await self._fleet.changed(left_s)
        return card

    def _served(self, model: str) -> worker_pb2.ModelCard | None:
        card = self.resolve(model)
        return card if card is not None and self._fleet.is_served(card) else None
