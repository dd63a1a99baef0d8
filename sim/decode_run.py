"""Decode steps in a row that change nothing but the length of answers. Most steps of a simulation are like that.

    worker   |--- prompt ---|- d -|- d -|- d -|- d -|- d -|- e -|        d in the run, e ends an answer or fills a block
    reports                 ^     ^     ^     ^     ^     ^     ^        as far as they are due

Such steps need no scheduler: their times follow from the cost model, and reports differ only in the time of a decode
step. A run is computed when it begins. A request that arrives cuts it: the step that is being computed then becomes a
step like all others, and the rest of the run is forgotten. Times, costs and what is learned are those of the same steps
one by one, to the last bit, because they are added in the same order.

Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from headrace.protos.load_report import LoadReport
from headrace.sim.step_cost import StepCost, StepCostPair
from headrace.worker.engine.step_cost import DECODE_WEIGHT, StepCostModel, StepShape

# Once the cost of decode steps is known, a simulated worker learns from one in so many, and from those with another
# number of tokens than the step before. Simulated steps have no noise, and a fit takes longer than all else in a step.
LEARN_EVERY = 16


class Learning:
    """Which decode steps a worker learns from."""

    __slots__ = ("_model", "_num_passed")

    def __init__(self, model: StepCostModel) -> None:
        self._model = model
        self._num_passed = 0

    @property
    def is_steady(self) -> bool:
        """Whether it learns from one in `LEARN_EVERY` steps."""
        return self._model.is_learned

    def step(self, shape: StepShape, milliseconds: float) -> None:
        """Learn from a decode step."""
        if shape.changed or not self.is_steady or self._num_passed >= LEARN_EVERY - 1:
            self._model.observe(shape, milliseconds)
            self._num_passed = 0
        else:
            self._num_passed += 1

    def steps(self, first: StepShape, milliseconds: Sequence[float]) -> None:
        """Learn from consecutive decode steps, each with one more position for each sequence. `first` is the shape of
        the first."""
        number = 0 if first.changed else LEARN_EVERY - 1 - self._num_passed
        count = len(milliseconds)
        if number >= count:
            self._num_passed += count
            return
        while number < count:
            context = first.context + number * first.sequences
            shape = first._replace(context=context, changed=first.changed and number == 0)
            self._model.observe(shape, milliseconds[number])
            last, number = number, number + LEARN_EVERY
        self._num_passed = count - 1 - last


class DecodeRun:
    """A run of `num_steps` steps, beginning at `start_s` with one of the shape `first`. `decode_step_ms` and `busy_s`
    are those of the worker before.

    Steps take `step_factor` times as long as their cost. Reports are due at the ends of the steps in `reported`, not
    before `next_report_s`, and `report_interval_s` apart. `load` is the worker's load during the run, except
    `decode_step_ms` and `as_of_s`. `version` is that of the report before the run. `delivered_s`, which the owner sets,
    is when each report reaches the routers.
    """

    def __init__(
        self,
        cost: StepCost | StepCostPair,
        first: StepShape,
        num_steps: int,
        start_s: float,
        busy_s: float,
        decode_step_ms: float,
        load: LoadReport,
        version: int,
        next_report_s: float,
        report_interval_s: float,
        step_factor: float = 1.0,
    ) -> None:
        contexts = first.context + first.sequences * np.arange(num_steps, dtype=np.float64)
        milliseconds = cost.decode_ms(contexts, first.sequences, first.shared)
        if first.changed:
            milliseconds[0] += cost.change
        milliseconds *= step_factor
        seconds = milliseconds / 1000
        self.first = first
        self.load = load
        self.version = version
        self.start_s = start_s
        self.is_cut = False
        self.step_ms: list[float] = milliseconds.tolist()
        self.ends_s: list[float] = np.add.accumulate(np.concatenate(((start_s,), seconds)))[1:].tolist()
        self._busy_s: list[float] = np.add.accumulate(np.concatenate(((busy_s,), seconds))).tolist()
        self._decode_step_ms = [decode_step_ms]
        self.reported: list[int] = []
        self.delivered_s: list[float] = []
        mean_ms = decode_step_ms
        for number, (step_ms, end_s) in enumerate(zip(self.step_ms, self.ends_s, strict=True)):
            mean_ms = mean_ms or step_ms
            mean_ms += DECODE_WEIGHT * (step_ms - mean_ms)
            self._decode_step_ms.append(mean_ms)
            if end_s >= next_report_s:
                self.reported.append(number)
                next_report_s = end_s + report_interval_s

    @property
    def end_s(self) -> float:
        """The time at which its last step ends."""
        return self.ends_s[-1]

    def num_ended(self, now_s: float) -> int:
        """How many of its steps have ended before this time. A step that ends exactly then does not count."""
        return bisect_left(self.ends_s, now_s)

    def busy_s(self, num_steps: int) -> float:
        """How long the worker has computed after this many steps, since it began."""
        return self._busy_s[num_steps]

    def decode_step_ms(self, num_steps: int) -> float:
        """The learned time of a decode step after this many steps."""
        return self._decode_step_ms[num_steps]

    def reported_ms(self, report: int) -> float:
        """The time of a decode step in a report; 0 in the first report."""
        return self._decode_step_ms[self.reported[report] + 1]

    def reported_s(self, report: int) -> float:
        """When the numbers of a report were current."""
        return self.ends_s[self.reported[report]]

    def cut(self, num_steps: int) -> None:
        """Forget the steps after the first `num_steps`, with their reports."""
        self.is_cut = True
        num_reports = bisect_right(self.reported, num_steps - 1)
        del self.reported[num_reports:]
        del self.delivered_s[num_reports:]
