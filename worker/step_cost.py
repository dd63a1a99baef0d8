"""What a step costs, learned from the steps that were run.

    milliseconds = a + b * tokens + c * context / 1000

`tokens` are the new tokens of the step, `context` all tokens that its sequences attend to. Recursive least squares with
forgetting (Haykin, Adaptive Filter Theory, chapter on RLS): a few dozen floating point operations a step, no history. A
step that took far longer than predicted (a kernel built for a new shape, another process on the core) counts less.
"""

from __future__ import annotations

from collections.abc import Sequence

# Weight of an observation n steps ago is FORGETTING ** n: half after 350 steps.
FORGETTING = 0.998
# Steps before predictions are given.
MIN_STEPS = 8
_INITIAL_VARIANCE = 1e4
_MAX_VARIANCE = 1e6
_OUTLIER = 2.0


class StepCostModel:
    """Learns a, b and c. All costs in milliseconds, none below 0."""

    def __init__(self) -> None:
        self._weights = [5.0, 0.3, 0.1]
        self._covariance = [[_INITIAL_VARIANCE if i == j else 0.0 for j in range(3)] for i in range(3)]
        self._num_steps = 0

    @property
    def is_learned(self) -> bool:
        """Whether enough steps were seen."""
        return self._num_steps >= MIN_STEPS

    def predict_ms(self, num_tokens: int, num_context_tokens: int) -> float:
        """Cost of a step."""
        features = _features(num_tokens, num_context_tokens)
        return max(0.0, sum(weight * feature for weight, feature in zip(self._weights, features, strict=True)))

    def tokens_within(self, limit_ms: float, num_context_tokens: int) -> int:
        """The most tokens of a step that is predicted to take no longer than this; at least 0."""
        fixed_ms = self.predict_ms(0, num_context_tokens)
        per_token_ms = max(self._weights[1], 1e-4)
        return max(0, int((limit_ms - fixed_ms) / per_token_ms))

    def observe(self, num_tokens: int, num_context_tokens: int, milliseconds: float) -> None:
        """Learn from a step."""
        features = _features(num_tokens, num_context_tokens)
        predicted_ms = self.predict_ms(num_tokens, num_context_tokens)
        if self.is_learned and milliseconds > _OUTLIER * predicted_ms:
            milliseconds = _OUTLIER * predicted_ms
        gain_of = [sum(row[j] * features[j] for j in range(3)) for row in self._covariance]
        scale = FORGETTING + sum(feature * value for feature, value in zip(features, gain_of, strict=True))
        gain = [value / scale for value in gain_of]
        error = milliseconds - sum(weight * feature for weight, feature in zip(self._weights, features, strict=True))
        for i in range(3):
            self._weights[i] += gain[i] * error
            for j in range(3):
                # Directions that are not seen for long would grow without bound.
                shrunk = (self._covariance[i][j] - gain[i] * gain_of[j]) / FORGETTING
                self._covariance[i][j] = max(-_MAX_VARIANCE, min(_MAX_VARIANCE, shrunk))
        self._num_steps += 1


def _features(num_tokens: int, num_context_tokens: int) -> Sequence[float]:
    return (1.0, float(num_tokens), num_context_tokens / 1000)
