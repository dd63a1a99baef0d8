"""What a step of a worker takes, in milliseconds, from its shape alone: the stand-in for OpenVINO.

    ms = fixed + per_token * tokens + per_attended * attended + per_context * context + per_sequence * sequences

    tokens     new tokens of the step                                  products with the weights
    attended   positions that the new tokens look at, summed           attention's arithmetic: a chunk of n behind p
               over the tokens                                         costs n * p + n * (n + 1) / 2
    context    positions that the sequences have, summed over them     attention's reading of the cache
    sequences  sequences in the step                                   sampling, projection onto the vocabulary

Fitted by benchmarks/step_cost.py on a worker's own model runner; `default()` is the committed fit. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

DEFAULT_FILE = Path(__file__).with_name("step_cost.json")


class StepShape(NamedTuple):
    """The shape of a step; see the module."""

    tokens: int
    attended: int
    context: int
    sequences: int

    @classmethod
    def of(cls, step: Iterable[tuple[int, int]]) -> StepShape:
        """The shape of a step that gives for each sequence its computed tokens and those that the step computes."""
        tokens = attended = context = sequences = 0
        for past, new in step:
            tokens += new
            attended += new * past + new * (new + 1) // 2
            context += past + new
            sequences += 1
        return cls(tokens, attended, context, sequences)

    @property
    def features(self) -> tuple[float, ...]:
        """What the coefficients multiply, in their order."""
        return (1.0, *map(float, self))


class StepCost(msgspec.Struct, frozen=True):
    """Coefficients in milliseconds, and where they come from. The errors are relative, over shapes that the fit has not
    seen."""

    fixed: float
    per_token: float
    per_attended: float
    per_context: float
    per_sequence: float
    model: str = ""
    machine: str = ""
    median_error: float = 0.0
    p90_error: float = 0.0

    def milliseconds(self, shape: StepShape) -> float:
        """Time of a step of this shape."""
        return (
            self.fixed
            + self.per_token * shape.tokens
            + self.per_attended * shape.attended
            + self.per_context * shape.context
            + self.per_sequence * shape.sequences
        )


def read(path: Path) -> StepCost:
    """A fit from a file. Raises OSError or ValueError."""
    return msgspec.json.decode(path.read_bytes(), type=StepCost)


def default() -> StepCost:
    """The committed fit."""
    return read(DEFAULT_FILE)
