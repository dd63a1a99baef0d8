"""Pauses between the decode steps of running streams, while images wait to be encoded beside the engine.

Without pauses the streams take most of the cores, until they have ended: each then decodes nearly alone, although a
step of many streams takes little longer than a step of one, and the images are encoded late.

    engine    |- step -|            |- step -|            |- step -|
    encoder    - slow -|-- fast ----| - slow -|-- fast ----|

A waiting image counts as `STREAMS_PER_IMAGE` streams. So an image beside many streams hardly delays them, and a stream
beside many images leaves the cores to these. A step and its pause take no longer than steps with prompts do.

    pause = step * STREAMS_PER_IMAGE * waiting images / running streams

docs/decisions/images.md#pauses-for-the-encoder has the measurements.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.worker.engine.scheduler import Scheduler
from headrace.worker.engine.stages import Stages
from headrace.worker.engine.step_budget import longest_ms

STREAMS_PER_IMAGE = 4


class Pacing:
    """The pauses of one scheduler. `begin` and `end` are called before and after each step, in the scheduler's
    thread."""

    def __init__(self, scheduler: Scheduler, stages: Stages, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._stages = stages
        self._clock = clock
        self._begun_s: float | None = None
        self._until_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until the next step should begin; 0 if it should begin at once, for example because a prompt has
        arrived or no image waits any more."""
        if not self._until_s or not self._num_waiting or not self._scheduler.is_decoding:
            return 0.0
        return max(0.0, self._until_s - self._clock())

    def begin(self) -> None:
        """Record that a step begins."""
        self._until_s = 0.0
        is_paced = self._num_waiting and self._scheduler.is_decoding
        self._begun_s = self._clock() if is_paced else None

    def end(self) -> None:
        """Record that the step has ended. If it was a decode step and images wait, a pause begins."""
        if self._begun_s is None or not self._scheduler.is_decoding:
            return
        now_s = self._clock()
        step_ms = 1000 * (now_s - self._begun_s)
        num_streams = len(self._scheduler.running)
        most_ms = longest_ms(self._scheduler.target_step_ms, step_ms) - step_ms
        pause_ms = min(step_ms * STREAMS_PER_IMAGE * self._num_waiting / num_streams, most_ms)
        self._until_s = now_s + pause_ms / 1000

    @property
    def _num_waiting(self) -> int:
        """The number of requests that wait for images; 0 if streams of higher priority run."""
        running = self._scheduler.running
        return self._stages.num_sharing(running[0].priority) if running else 0
