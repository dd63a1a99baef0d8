"""When a step computes prompts only, so that first tokens come earlier, and running streams wait.

A stream that a person reads can wait for a fifth of a second once in a while, but not all the time. So streams give
prompts a share of their time, which is saved up to one such wait. Under a light load that is as if prompts went first;
where prompts never end, streams give that share and no more.

Pure.
"""

from __future__ import annotations

# The part of their time that streams give to prompts, and the most that is saved of it, in seconds.
SHARE = 0.25
LONGEST_S = 0.2


class Pauses:
    """Decides it for one step after the other. `longest_s` 0: there are none."""

    __slots__ = ("_longest_s", "_saved_s", "_since_s", "is_pause")

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self.is_pause = False
        """Whether the step that was decided last is one."""
        self._longest_s = longest_s
        self._saved_s = longest_s
        self._since_s = 0.0

    def decide(self, now_s: float, *, is_wanted: bool) -> bool:
        """Whether the step that begins now is a pause; `is_wanted` if there are prompts, and streams that could wait.
        It has to be asked for the step behind a pause, whose end that is, and need not be for others."""
        passed_s = now_s - self._since_s
        if self.is_pause:
            self._saved_s -= passed_s
        self._saved_s = min(self._longest_s, self._saved_s + SHARE * passed_s)
        self._since_s = now_s
        self.is_pause = is_wanted and self._saved_s > 0
        return self.is_pause
