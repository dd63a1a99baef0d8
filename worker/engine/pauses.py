"""When a step computes prompts only, so that first tokens come earlier, and running streams wait.

A stream that a person reads can wait for a third of a second once in a while, but not all the time. So streams give
prompts as much time as they get themselves, which is saved up to one such wait. Under a light load that is as if
prompts went first; where prompts never end, streams have half of the time.

Pure.
"""

from __future__ import annotations

# What is saved while streams go on, as a part of that time, and the most that is saved, in seconds.
RATE = 1.0
LONGEST_S = 0.3


class Pauses:
    """Accounts for it from step to step. `longest_s` 0: there are none."""

    __slots__ = ("_since_s", "is_pause", "longest_s", "saved_s")

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self.is_pause = False
        """Whether the step that was decided last is one."""
        self.saved_s = longest_s
        """How long streams may still wait, as of the last time it was asked."""
        self.longest_s = longest_s
        """The most that is saved."""
        self._since_s = 0.0

    def left_s(self, now_s: float) -> float:
        """How long streams may still wait. It has to be asked at the end of a pause, before `begin`, and need not be
        for other steps."""
        passed_s = now_s - self._since_s
        if self.is_pause:
            self.saved_s -= passed_s
        else:
            self.saved_s = min(self.longest_s, self.saved_s + RATE * passed_s)
        self._since_s = now_s
        return self.saved_s

    def begin(self, *, is_pause: bool) -> None:
        """The next step is a pause or is none, as was decided by what is left."""
        self.is_pause = is_pause
