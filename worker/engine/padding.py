"""With how many tokens a step is padded, so that it computes as many as the step before.

OpenVINO prepares every node of the model anew when the number of tokens is not that of the step before: about 5 ms for
a model of 30 layers, half of a small decode step, and what twenty more tokens cost. So a step with fewer tokens than
the one before may be padded up to its count. The rule is that of renting skis: pad until the padding since the last
change has cost as much as a change, then change.

What a token and a change cost is known from `step_cost`. Where a token costs more than a change, as in large models,
nothing is padded.

A step with a prompt has eight tokens at least, and as many rows of logits if any: on some CPUs the products of fewer go
through other kernels, with other bits (docs/decisions/0006).

Pure.
"""

from __future__ import annotations

from headrace.worker.model.step_limits import MIN_PROMPT_STEP


class Padding:
    """Decides the token counts of a run of steps."""

    __slots__ = ("_num_tokens", "_spent_ms", "changed")

    def __init__(self) -> None:
        self.changed = False
        """Whether the last step had another number of tokens, padding included, than the one before."""
        self._num_tokens = 0
        self._spent_ms = 0.0

    def of(self, num_tokens: int, *, is_decode: bool, token_ms: float, change_ms: float) -> int:
        """The padding of the next step, which has `num_tokens` tokens to compute, when a further one costs `token_ms`
        and another number of them `change_ms`. `is_decode`: each of its requests computes one token."""
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
