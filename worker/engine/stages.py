"""A chain of stages in which a request may wait before it is scheduled, besides waiting for its place.

    arrival --> stage 0 --> stage 1 --> ... --> the scheduler
                   ^ begin_late, for a request that is about to be computed: back to a stage

A stage holds requests that would lose time, or could not be computed, if they were scheduled at once. A held request is
in no list of the scheduler, and holds no blocks except those that its stage has taken for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.worker.engine.mailbox import EngineReport
from headrace.worker.request.request import Request
from headrace.worker.request.step import RequestOutput


class Stage(Protocol):
    """Holds requests of one scheduler. Used by the engine thread."""

    @property
    def num_held(self) -> int:
        """Requests that wait here."""
        ...

    def num_sharing(self, priority: int) -> int:
        """Requests of at least this priority whose work here needs the cores that steps are computed on."""
        ...

    def pause(self) -> None:
        """Leave the cores to a step: stop the work that `num_sharing` counts, until `resume`."""
        ...

    def resume(self) -> None:
        """The step has ended: go on with that work."""
        ...

    def begin(self, request: Request) -> bool:
        """Hold a request that is not scheduled if it should wait. Returns whether it is held."""
        ...

    def begin_late(self, request: Request, num_free: int) -> bool:
        """Hold a waiting request of the scheduler that is about to be computed, with up to `num_free` free blocks, if
        it should wait. It then leaves the scheduler's list, and gives up its blocks. Returns whether it is held."""
        ...

    def cancel(self, request: Request) -> bool:
        """Drop a request. Returns whether it was held here."""
        ...

    def take_ready(self) -> list[Request]:
        """The requests that no longer have to wait here. Called before each step, and a few times a second while
        nothing is computed."""
        ...

    def take_outputs(self) -> list[RequestOutput]:
        """The last outputs of requests that ended here."""
        ...

    def wait_s(self, request: Request) -> tuple[float, float]:
        """The expected waiting times of a new request here, in seconds: for other requests, and for its own work."""
        ...

    def take_news(self) -> bool:
        """Whether to send a load report now, although no request makes one necessary."""
        ...

    def report(self, report: EngineReport) -> EngineReport:
        """The report of the engine, with the requests that wait here and what the stage has counted."""
        ...


class Stages:
    """The stages of one scheduler, in the order in which requests pass them."""

    def __init__(self, stages: Sequence[Stage] = ()) -> None:
        self._stages = stages

    @property
    def num_held(self) -> int:
        """Requests that wait in any stage."""
        return sum(stage.num_held for stage in self._stages)

    def num_sharing(self, priority: int) -> int:
        """See `Stage`."""
        return sum(stage.num_sharing(priority) for stage in self._stages)

    def pause(self) -> None:
        """See `Stage`."""
        for stage in self._stages:
            stage.pause()

    def resume(self) -> None:
        """See `Stage`."""
        for stage in self._stages:
            stage.resume()

    def begin(self, request: Request) -> bool:
        """See `Stage`: hold a request that has arrived in the first stage in which it should wait."""
        return self._begin(request, 0)

    def begin_late(self, request: Request, num_free: int) -> bool:
        """See `Stage`."""
        return any(stage.begin_late(request, num_free) for stage in self._stages)

    def cancel(self, request: Request) -> bool:
        """See `Stage`."""
        return any(stage.cancel(request) for stage in self._stages)

    def take_ready(self) -> list[Request]:
        """The requests that have passed all stages."""
        ready = []
        for number, stage in enumerate(self._stages):
            ready += [request for request in stage.take_ready() if not self._begin(request, number + 1)]
        return ready

    def take_outputs(self) -> list[RequestOutput]:
        """See `Stage`."""
        return [output for stage in self._stages for output in stage.take_outputs()]

    def wait_s(self, request: Request) -> tuple[float, float]:
        """See `Stage`."""
        waits = [stage.wait_s(request) for stage in self._stages]
        return sum(wait[0] for wait in waits), sum(wait[1] for wait in waits)

    def take_news(self) -> bool:
        """See `Stage`. Asks every stage."""
        has_news = False
        for stage in self._stages:
            has_news |= stage.take_news()
        return has_news

    def report(self, report: EngineReport) -> EngineReport:
        """See `Stage`."""
        for stage in self._stages:
            report = stage.report(report)
        return report

    def _begin(self, request: Request, first: int) -> bool:
        return any(stage.begin(request) for stage in self._stages[first:])
