"""When requests are due: a Poisson process, or one that is more or less even, at a rate that may rise. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RampUp:
    """A rate in requests per second that rises from the first request to the last."""

    strategy: Literal["linear", "exponential"]
    start: float
    end: float

    def rate(self, share: float) -> float:
        """The rate after this share of the requests."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * share
        ratio: float = (self.end / self.start) ** share
        return self.start * ratio

    def whole_rates(self, times: Sequence[float]) -> list[tuple[int, float]]:
        """Each whole rate that the ramp passes, from its start on, with the one of these times of requests at which it
        was reached."""
        found = [(int(self.start), 0.0)]
        for number, at_s in enumerate(times):
            rate = int(self.rate(number / max(len(times) - 1, 1)))
            found += [(whole, at_s) for whole in range(found[-1][0] + 1, rate + 1)]
        return found


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals at `rate` requests per second; infinite: all at once. Gaps are gamma distributed with the shape
    `burstiness`: 1 is a Poisson process, less comes in bursts, infinite is even."""

    rate: float = math.inf
    burstiness: float = 1.0
    ramp_up: RampUp | None = None

    @property
    def are_timed(self) -> bool:
        """Whether requests are due one after the other."""
        return self.ramp_up is not None or math.isfinite(self.rate)

    def times(self, count: int, rng: random.Random) -> list[float]:
        """When each of `count` requests is due, in seconds from the beginning.

        Without a ramp, the gaps are stretched so that they end at `count / rate`: the offered rate is then the one
        asked for whatever the seed.
        """
        if not self.are_timed:
            return [0.0] * count
        now_s = 0.0
        times = []
        for number in range(count):
            rate = self.rate if self.ramp_up is None else self.ramp_up.rate(number / max(count - 1, 1))
            if rate <= 0:  # a ramp from zero
                rate = self.ramp_up.rate(0.5 / max(count - 1, 1)) if self.ramp_up is not None else rate
            now_s += (
                1 / rate
                if math.isinf(self.burstiness)
                else rng.gammavariate(self.burstiness, 1 / self.burstiness) / rate
            )
            times.append(now_s)
        if self.ramp_up is None and now_s > 0:
            stretch = count / self.rate / now_s
            times = [due_s * stretch for due_s in times]
        return times
