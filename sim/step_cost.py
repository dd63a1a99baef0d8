"""The cost model that replaces OpenVINO: the time of a worker's step in milliseconds, from the step's shape.

    ms = base(tokens) + per_attended * attended + per_reread * reread + per_context * context - saving * shared
         + per_sequence * sequences + change * changed

    base       multiplication with the weights: piecewise linear between certain numbers of tokens, the knots, because
               the first tokens of a step cost more than later ones
    changed    1 if the previous step had another number of tokens, so that OpenVINO prepares the model again
               (docs/decisions/scheduling.md#token-counts)

The other quantities are fields of `headrace.worker.engine.step_cost.StepShape`. The model that a worker fits at run
time is simpler: its `base` is linear, and `reread` and `context` share a coefficient.

`headrace bench calibrate` fits the coefficients to steps of a running worker, and benchmarks/engine/step_cost.py to
those of its model runner alone; `default()` is the committed fit of the latter. Pure.
"""

from __future__ import annotations

import bisect
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.worker.engine.step_cost import StepShape

Values: TypeAlias = npt.NDArray[np.float64]

shape_of = StepShape.of
"""The shape of a step, for packages that know no worker."""
DEFAULT_FILE = Path(__file__).with_name("step_cost.json")


class StepCost(msgspec.Struct, frozen=True):
    """Coefficients in milliseconds, and their origin. `base[i]` is the cost of `knots[i]` tokens. There are at least
    two knots, in ascending order. The errors are relative, and measured on shapes that were not used for the fit."""

    knots: tuple[int, ...]
    base: tuple[float, ...]
    per_attended: float
    per_reread: float
    per_context: float
    per_sequence: float
    change: float
    model: str = ""
    machine: str = ""
    median_error: float = 0.0
    p90_error: float = 0.0
    saving: float = 0.0

    def __post_init__(self) -> None:
        if len(self.knots) < 2 or len(self.knots) != len(self.base) or list(self.knots) != sorted(set(self.knots)):
            raise ValueError(
                f"knots {self.knots} must be at least two ascending numbers, with a base for each (got {self.base})"
            )

    def milliseconds(self, shape: StepShape) -> float:
        """How long a step of this shape takes, in milliseconds."""
        left, share = place_among(self.knots, shape.tokens)
        return (
            self.base[left] * (1.0 - share)
            + self.base[left + 1] * share
            + self.per_attended * shape.attended
            + self.per_reread * shape.reread
            + (self.per_context * shape.context - self.saving * shape.shared)
            + self.per_sequence * shape.sequences
            + (self.change if shape.changed else 0.0)
        )

    def decode_ms(self, contexts: Values, sequences: int, shared: int = 0) -> Values:
        """How long decode steps of `sequences` sequences take, each in milliseconds, with these `contexts`, of which so
        many positions are `shared`: exactly as `milliseconds`, with the same number of tokens as the step before."""
        left, share = place_among(self.knots, sequences)
        base = self.base[left] * (1.0 - share) + self.base[left + 1] * share
        found: Values = base + (self.per_context * contexts - self.saving * shared) + self.per_sequence * sequences
        return found


class StepCostPair(msgspec.Struct, frozen=True):
    """The costs of steps with prompts and of decode steps, each with its own coefficients: a worker may compute them
    with different graphs, and only decode steps often have the same number of tokens as the step before."""

    prompts: StepCost
    decode: StepCost

    @property
    def change(self) -> float:
        """The cost of a change of size; see StepCost. It is that of decode steps."""
        return self.decode.change

    def milliseconds(self, shape: StepShape) -> float:
        """How long a step of this shape takes, in milliseconds."""
        cost = self.prompts if shape.prompt_tokens else self.decode
        return cost.milliseconds(shape)

    def decode_ms(self, contexts: Values, sequences: int, shared: int = 0) -> Values:
        """See StepCost."""
        return self.decode.decode_ms(contexts, sequences, shared)


def place_among(knots: tuple[int, ...], tokens: int) -> tuple[int, float]:
    """The index of the knot below `tokens`, and the fraction of the distance to the next knot. Beyond the last knot,
    the last segment is extrapolated."""
    left = min(max(bisect.bisect_right(knots, tokens) - 1, 0), len(knots) - 2)
    return left, (tokens - knots[left]) / (knots[left + 1] - knots[left])


def read(path: Path) -> StepCost:
    """Read a fit from a file. Raises OSError or ValueError."""
    return msgspec.json.decode(path.read_bytes(), type=StepCost)


def default() -> StepCost:
    """The fit in `step_cost.json`, whose field `machine` says where it was measured."""
    return read(DEFAULT_FILE)
