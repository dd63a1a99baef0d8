"""With how many tokens a step is padded, so that it computes as many as the step before.

OpenVINO prepares every node of the model anew when the number of tokens is not that of the step before: about 5 ms for
a model of 30 layers, half of a small decode step, and what twenty more tokens cost. So a step with fewer tokens than
the one before may be padded up to its count. The rule is that of renting skis: pad until the padding since the last
change has cost as much as a change, then change.

What a change costs is learned where two decode steps of one count follow each other, the first after a change: it is
the difference, or rather the median of such differences, for the first of all builds kernels too. For a token the
least is taken that one of a step has cost of late, all that the step costs included: that is too much for small steps
and nearly right for those with prompts, and so padding can never cost more than it is thought to. Where a token costs
more than a change, as in large models, nothing is padded.

A step with a prompt has eight tokens at least, and as many rows of logits if any: on some CPUs the products of fewer go
through other kernels, with other bits (docs/decisions/0006).

Pure.
"""

from __future__ import annotations

import math

# Four and fewer differ on CPUs with AMX.
MIN_PROMPT_STEP = 8

# Milliseconds by which one observation moves what is believed of the cost of a change, whatever it says.
_PACE_MS = 0.25
# By this a token is believed to cost more with each step: the least of about the last thousand steps counts.
_FORGETTING = 1.0005


class Padding:
    """Decides the token counts of a run of steps. `of` before each step; `observe` after it, unless it failed."""

    __slots__ = ("_changed_step_ms", "_num_tokens", "_spent_ms", "change_ms", "changed", "token_ms")

    def __init__(self) -> None:
        self.change_ms = 0.0
        """What another number of tokens than in the step before is believed to cost."""
        self.token_ms = math.inf
        """What a token of padding is believed to cost at most."""
        self.changed = False
        """Whether the last step had another number of tokens, padding included, than the one before."""
        self._num_tokens = 0
        self._spent_ms = 0.0
        self._changed_step_ms: float | None = None

    @property
    def changed_ms(self) -> float:
        """What the last step is believed to have cost for having another number of tokens than the one before."""
        return self.change_ms if self.changed else 0.0

    def of(self, num_tokens: int, *, is_decode: bool) -> int:
        """The padding of the next step, which has `num_tokens` tokens to compute. `is_decode` as in `observe`."""
        least = num_tokens if is_decode else max(num_tokens, MIN_PROMPT_STEP)
        spare = self._num_tokens - least
        if spare > 0:
            spent_ms = self._spent_ms + spare * self.token_ms
            if spent_ms < self.change_ms:
                self._spent_ms = spent_ms
                self.changed = False
                return self._num_tokens - num_tokens
        self.changed = spare != 0
        self._num_tokens, self._spent_ms = least, 0.0
        return least - num_tokens

    def observe(self, step_ms: float, *, is_decode: bool) -> None:
        """Learn from the step that was decided last. `is_decode`: each of its requests computed one token."""
        self.token_ms = min(self.token_ms * _FORGETTING, step_ms / self._num_tokens)
        before_ms, self._changed_step_ms = self._changed_step_ms, None
        if not is_decode:
            return
        if self.changed:
            self._changed_step_ms = step_ms
        elif before_ms is not None:
            is_more = before_ms - step_ms > self.change_ms
            self.change_ms = max(0.0, self.change_ms + (_PACE_MS if is_more else -_PACE_MS))
