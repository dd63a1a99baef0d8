"""How steps and the encoder of images take turns on the cores of a worker, while requests wait for images.

Side by side they would disturb each other: a step waits for the slowest of its threads many times, so it takes twice as
long if the encoder gets a quarter of each core. Therefore the encoder stops during a step, and has all cores in the
pause after it.

    engine    |- step -|         |- step -|         |- step -|
    encoder   ---------|- runs --|--------|- runs --|--------|- runs --

    pause = step * image_share(waiting images, running requests)

When an image is encoded, its tokens take the time of the pause: the step that computes them is longer by as much, and
no pause follows it (`step_budget`). A decode step and its pause take no longer than a step with other prompts does when
no image waits. Steps with other prompts get shorter by the time of their pauses, but prompts always get half of the
time.

docs/decisions/images.md#turns-of-steps-and-encoder has the measurements.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.worker.engine.scheduler import Scheduler
from headrace.worker.engine.stages import Stages
from headrace.worker.engine.step_budget import image_share, longest_ms

# The longest pause after a step with prompts, as a multiple of the step.
_MOST_BESIDE_PROMPTS = 1.0


class Pacing:
    """The pauses of one scheduler. `begin` and `end` are called before and after each step, in the scheduler's
    thread."""

    def __init__(self, scheduler: Scheduler, stages: Stages, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._stages = stages
        self._clock = clock
        self._begun_s: float | None = None
        self._is_decode = self._computes_images = False
        """Whether the last step had no prompts, and whether it had prompts with images."""
        self._until_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until the next step should begin; 0 if it should begin at once, for example because a prompt has
        arrived or no image waits any more."""
        if not self._until_s or not self._num_waiting or (self._is_decode and not self._scheduler.is_decoding):
            return 0.0
        return max(0.0, self._until_s - self._clock())

    def begin(self) -> None:
        """A step begins: if requests wait for images, the encoder stops."""
        self._until_s = 0.0
        if self._num_waiting:
            self._stages.pause()
            self._begun_s = self._clock()
            self._is_decode = self._scheduler.is_decoding
            self._computes_images = self._scheduler.computes_images
            self._scheduler.step_share = 1.0 / (1.0 + min(self._per_step, _MOST_BESIDE_PROMPTS))

    def end(self) -> None:
        """The step has ended: if the encoder was stopped, it goes on, and a pause begins."""
        begun_s, self._begun_s = self._begun_s, None
        if begun_s is None:
            return
        self._stages.resume()
        self._scheduler.step_share = 1.0
        if not self._num_waiting or self._computes_images:
            return
        now_s = self._clock()
        step_ms = 1000 * (now_s - begun_s)
        if self._is_decode:
            most_ms = longest_ms(self._scheduler.target_step_ms, step_ms) - step_ms
        else:
            most_ms = _MOST_BESIDE_PROMPTS * step_ms
        self._until_s = now_s + min(step_ms * self._per_step, most_ms) / 1000

    @property
    def _per_step(self) -> float:
        """The length of a pause without other bounds, as a multiple of its step."""
        return image_share(self._num_waiting, len(self._scheduler.running))

    @property
    def _num_waiting(self) -> int:
        """The number of requests that wait for images; 0 if nothing runs, or something of higher priority."""
        running = self._scheduler.running
        return self._stages.num_sharing(running[0].priority) if running else 0
