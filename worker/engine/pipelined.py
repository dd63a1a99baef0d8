"""An engine for a pipeline: while one step is on its way through the later stages, the next one begins, with other
requests.

    this stage    A's layers | B's layers | A's logits, sample, A's layers | B's logits, sample, B's layers | ..
    the others               | A          | B                              | A                              | ..

A request is in one step at a time, because its next token depends on the last. So each step has a part of the running
requests, and all stages have work.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from headrace.worker.engine.engine import Engine, Step, StepFailedError
from headrace.worker.engine.overlap import Deliver
from headrace.worker.engine.scheduler import FetchFirst
from headrace.worker.request.request import RequestState
from headrace.worker.request.step import Sampled


class _Begun(NamedTuple):
    """A step that has begun and not ended, and the time at which it began."""

    step: Step
    start_s: float
    is_traced: bool


@dataclass(slots=True)
class PipelinedEngine(Engine):
    """`Engine` for a runner whose `bind` begins a step and whose `run` ends the oldest step that has begun. It keeps as
    many steps under way as the scheduler allows at once."""

    _begun: deque[_Begun] = field(default_factory=deque)
    _ended_s: float = 0.0

    def advance(self, deliver: Deliver, fetch_first: FetchFirst | None = None) -> bool:
        """Begin as many steps as allowed, end the oldest of them, and deliver the outputs of the step that ended before
        it. See `Engine.advance`."""
        self._begin(deliver, fetch_first)
        if not self._begun:
            self.settle(deliver)
            return False
        step, start_s, is_traced = self._begun.popleft()
        try:
            logits = self._forward(step, deliver)
        except StepFailedError as error:
            self._overlap.deliver(deliver)
            outputs = self._fail(step.output, error)
        else:
            sampled, errors = self._sample(step.batch, logits)
            searched = self._search(step.batch, logits)
            step, sampled = _without_ended(step, sampled)
            outputs = self._account(step, sampled, searched, errors)
            # The time since the step before it ended is what this one has cost.
            self._observe(step, sampled, max(start_s, self._ended_s), is_traced=is_traced)
        self._ended_s = time.perf_counter()
        self._overlap.hold(self._end_failed(outputs))
        return True

    def _begin(self, deliver: Deliver, fetch_first: FetchFirst | None) -> None:
        while len(self._begun) < self.scheduler.steps_at_once:
            start_s = time.perf_counter()
            is_traced = self.scheduler.num_traced > 0
            output = self.scheduler.schedule(fetch_first)
            if not output.scheduled:
                return
            try:
                self._begun.append(_Begun(self._build(output), start_s, is_traced))
            except StepFailedError as error:
                self._overlap.deliver(deliver)
                self._overlap.hold(self._end_failed(self._fail(output, error)))


def _without_ended(step: Step, sampled: Sequence[Sampled]) -> tuple[Step, Sequence[Sampled]]:
    """The step and its sampled tokens, without the requests that were cancelled while it was under way."""
    ended = {request for request, _ in step.output.scheduled if request.state is RequestState.FINISHED}
    if not ended:
        return step, sampled
    kept = [entry for request, entry in zip(step.batch.sampled, sampled, strict=True) if request not in ended]
    scheduled = [entry for entry in step.output.scheduled if entry.request not in ended]
    return step._replace(output=replace(step.output, scheduled=scheduled)), kept
