"""What a step with prompts costs, learned from those that were run.

    milliseconds = a + b * tokens + c * attended / 1000 + d * context / 1000

`tokens` are the new tokens of the step. `attended` are the positions that the tokens of prompts look at, summed over
them: attention's arithmetic, n * p + n * n / 2 for n tokens behind p. `context` are the positions of sequences that
compute one token: attention's reading of the cache. Steps without prompts are not learned from: they may go through
another graph, whose tokens cost something else.

Recursive least squares with forgetting (Haykin, Adaptive Filter Theory, chapter on RLS): some dozens of floating point
operations a step, no history. A step that took far longer than predicted (a kernel built for a new shape, another
process on the core) counts less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

# Weight of an observation n steps ago is FORGETTING ** n: half after 350 steps.
FORGETTING = 0.998
# Steps before predictions are used.
MIN_STEPS = 8
_INITIAL_VARIANCE = 1e4
_MAX_VARIANCE = 1e6
_OUTLIER = 2.0
_SIZE = 4


class StepShape(NamedTuple):
    """What the cost of a step depends on; see the module."""

    tokens: int
    attended: int
    context: int

    @classmethod
    def of(cls, step: Iterable[tuple[int, int]], *, padding: int = 0) -> StepShape:
        """The shape of a step that gives, for each sequence, its computed tokens and those that the step computes."""
        tokens, attended, context = padding, 0, 0
        for past, new in step:
            tokens += new
            if new == 1:
                context += past
            else:
                attended += new * past + new * new // 2
        return cls(tokens, attended, context)

    @property
    def features(self) -> tuple[float, ...]:
        """What the coefficients multiply, in their order."""
        return (1.0, float(self.tokens), self.attended / 1000, self.context / 1000)


class StepCostModel:
    """Learns a, b, c and d. All costs in milliseconds, none below 0."""

    def __init__(self) -> None:
        self._weights = [5.0, 0.3, 0.05, 0.1]
        self._covariance = [[_INITIAL_VARIANCE if i == j else 0.0 for j in range(_SIZE)] for i in range(_SIZE)]
        self._num_steps = 0

    @property
    def is_learned(self) -> bool:
        """Whether enough steps were seen."""
        return self._num_steps >= MIN_STEPS

    def predict_ms(self, shape: StepShape) -> float:
        """Cost of a step."""
        return max(0.0, _dot(self._weights, shape.features))

    def tokens_within(self, limit_ms: float, decoding: StepShape, past: int) -> int:
        """The most tokens of a prompt, `past` of which are computed, that fit into a step beside `decoding`."""
        left_ms = max(0.0, limit_ms - self.predict_ms(decoding))
        _, per_token, per_attended, _ = self._weights
        # The root of per_token * n + per_attended * (n * past + n * n / 2) / 1000 = left_ms.
        linear, square = per_token + per_attended * past / 1000, per_attended / 2000
        if square < 1e-9:
            return int(left_ms / max(linear, 1e-4))
        return int((math.sqrt(linear * linear + 4 * square * left_ms) - linear) / (2 * square))

    def tokens_for_share(self, share: float) -> int:
        """Tokens of a step, without attention, of whose cost `share` is what any step costs."""
        per_step, per_token = self._weights[:2]
        return int(max(0.0, per_step) * (1 - share) / share / max(per_token, 1e-4))

    def observe(self, shape: StepShape, milliseconds: float) -> None:
        """Learn from a step."""
        features = shape.features
        predicted_ms = self.predict_ms(shape)
        if self.is_learned and milliseconds > _OUTLIER * predicted_ms:
            milliseconds = _OUTLIER * predicted_ms
        gain_of = [_dot(row, features) for row in self._covariance]
        scale = FORGETTING + _dot(features, gain_of)
        gain = [value / scale for value in gain_of]
        error = milliseconds - _dot(self._weights, features)
        for i in range(_SIZE):
            self._weights[i] += gain[i] * error
            for j in range(_SIZE):
                # Directions that are not seen for long would grow without bound.
                shrunk = (self._covariance[i][j] - gain[i] * gain_of[j]) / FORGETTING
                self._covariance[i][j] = max(-_MAX_VARIANCE, min(_MAX_VARIANCE, shrunk))
        self._num_steps += 1


def _dot(left: Iterable[float], right: Iterable[float]) -> float:
    return sum(one * other for one, other in zip(left, right, strict=True))
