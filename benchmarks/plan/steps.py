"""The steps of a measured run beside what the calibration says of each, and who had the cores. They show where an error
of a plan comes from. If steps are longer than predicted, the plan is too good at every load. If they are not, the error
is in what the simulator lets happen between them. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headrace.bench.calibration import Calibration
from headrace.sim.fitting import OUTLIER
from headrace.sim.step_logs import LoggedStep, Timed, timed

# The first sizes of batches of each kind of decode steps.
_BATCHES = (1, 4, 8, 16)


class StepKind(msgspec.Struct):
    """Steps of one kind, with their mean times in milliseconds, each with the time until the next could begin."""

    title: str
    count: int
    predicted_ms: float
    measured_ms: float
    long_share: float
    """Share of them that took more than `OUTLIER` times what was predicted."""


class Cores(msgspec.Struct):
    """How many cores were busy on average. `predicted_front` is what the calibration says of gateway and router, and
    `in_steps` the threads of workers while they computed steps, whether they had a core or waited for one."""

    front: float
    predicted_front: float
    client: float
    workers: float
    in_steps: float


class Ran(NamedTuple):
    """What a server and its client did in a measured run: when it began and ended, by the clock of the step log, CPU
    seconds of each, and what was asked and answered. `log` has all steps since the server's start."""

    begun_s: float
    ended_s: float
    log: Sequence[LoggedStep]
    front_s: float
    client_s: float
    workers_s: float
    num_requests: int
    num_tokens: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_s - self.begun_s

    @property
    def timed(self) -> list[Timed]:
        """Its steps, without those of a size that its worker had never computed."""
        return timed([step for step in self.log if step.start_s <= self.ended_s], self.begun_s)

    @property
    def in_steps_s(self) -> float:
        """Seconds of all its steps."""
        return sum(step.ms for step in self.log if self.begun_s <= step.start_s <= self.ended_s) / 1000


def kinds(runs: Sequence[Ran], calibration: Calibration) -> list[StepKind]:
    """The steps of several runs, by kind."""
    by_title: dict[str, list[Timed]] = {"with prompts": [], **{_streams(number): [] for number in range(len(_BATCHES))}}
    for run in runs:
        for step in run.timed:
            by_title[_title(step)].append(step)
    return [_kind(title, own, calibration) for title, own in by_title.items() if own]


def _kind(title: str, steps: Sequence[Timed], calibration: Calibration) -> StepKind:
    predicted_ms = [
        calibration.steps.milliseconds(step.shape) * (1.0 + calibration.slowdown * step.others) for step in steps
    ]
    num_long = sum(step.ms > OUTLIER * ms for step, ms in zip(steps, predicted_ms, strict=True))
    measured_ms = statistics.fmean(step.ms for step in steps)
    return StepKind(title, len(steps), statistics.fmean(predicted_ms), measured_ms, num_long / len(steps))


def _title(step: Timed) -> str:
    if step.shape.prompt_tokens:
        return "with prompts"
    return _streams(sum(step.shape.sequences >= first for first in _BATCHES[1:]))


def _streams(number: int) -> str:
    """The title of decode steps with batches of one range."""
    last = _BATCHES[number + 1] - 1 if number + 1 < len(_BATCHES) else math.inf
    return f"{_BATCHES[number]} to {last} streams" if math.isfinite(last) else f"{_BATCHES[number]} streams or more"


def cores(runs: Sequence[Ran], calibration: Calibration) -> Cores:
    """The cores of several runs together."""
    seconds = sum(run.seconds for run in runs)
    front, threads = calibration.front, calibration.layout.threads
    predicted_s = sum(
        run.num_requests * front.cpu_s_per_request + run.num_tokens * front.cpu_s_per_token for run in runs
    )
    return Cores(
        front=sum(run.front_s for run in runs) / seconds,
        predicted_front=predicted_s / seconds,
        client=sum(run.client_s for run in runs) / seconds,
        workers=sum(run.workers_s for run in runs) / seconds,
        in_steps=threads * sum(run.in_steps_s for run in runs) / seconds,
    )
