"""Pads steps, so that the number of tokens changes less often.

If a step has another number of tokens than the one before, OpenVINO prepares every node of the model again. For a model
of 30 layers that takes about 5 ms, which is half of a small decode step, or as long as twenty more tokens. So a step
with fewer tokens may be padded to the number of the step before. The rule is that of ski rental: pad until the padding
since the last change has cost as much as a change, then change.

`step_cost` knows what a token and a change cost. If a token costs more than a change, as in large models, there is no
padding.

A step with a prompt is always padded to MIN_PROMPT_STEP tokens (docs/decisions/0006).

Pure.
"""

from __future__ import annotations

from headrace.worker.model.step_limits import MIN_PROMPT_STEP


class Padding:
    """Decides the padding of successive steps."""

    __slots__ = ("_num_tokens", "_spent_ms", "changed")

    def __init__(self) -> None:
        self.changed = False
        """Whether the last step had another number of tokens than the one before, padding included."""
        self._num_tokens = 0
        self._spent_ms = 0.0

    def of(self, num_tokens: int, *, is_decode: bool, token_ms: float, change_ms: float) -> int:
        """How many tokens to add to the next step, which has `num_tokens`. `is_decode`: each of its requests computes
        one token. `token_ms` is the cost of one more token, `change_ms` that of another number of tokens."""
        least = num_tokens if is_decode else max(num_tokens, MIN_PROMPT_STEP)
        spare = self._num_tokens - least
        if spare > 0:
            spent_ms = self._spent_ms + spare * token_ms
            if spent_ms < change_ms:
                self._spent_ms = spent_ms
                self.changed = False
                return self._num_tokens - num_tokens
        self.changed = spare != 0
        self._num_tokens, self._spent_ms = least, 0.0
        return least - num_tokens
