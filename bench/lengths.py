"""Lengths of prompts and answers, in tokens, drawn from a distribution. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

Shape = Literal["fixed", "uniform", "lognormal", "exponential"]
SHAPES: tuple[Shape, ...] = ("fixed", "uniform", "lognormal", "exponential")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths.

    `middle` is the value of `fixed`, the middle of `uniform`, the median of `lognormal` and the mean of `exponential`.
    `spread` is the share of the middle on either side of it for `uniform`, and the sigma of the logarithm for
    `lognormal`. Lengths are at least 1 and at most `most`.
    """

    shape: Shape
    middle: float
    spread: float = 0.0
    most: int = 1 << 20

    def draw(self, rng: random.Random) -> int:
        """A length."""
        match self.shape:
            case "fixed":
                length = round(self.middle)
            case "uniform":
                low = math.floor(self.middle * (1 - self.spread))
                length = rng.randint(low, math.ceil(self.middle * (1 + self.spread)))
            case "lognormal":
                length = round(self.middle * rng.lognormvariate(0.0, self.spread))
            case "exponential":
                length = round(rng.expovariate(1 / self.middle))
        return min(max(length, 1), self.most)
