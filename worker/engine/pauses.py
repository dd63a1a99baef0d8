"""When running streams pause, so that a step computes prompts only and first tokens come earlier.

A person who reads a stream does not mind a pause of a third of a second now and then. So streams earn pause time while
they run, as much as they run, up to one such pause. Under light load, prompts therefore go first. If prompts never end,
streams still get half of the time.

Pure.
"""

from __future__ import annotations

# Pause time earned per second of running, and the longest pause in seconds.
RATE = 1.0
LONGEST_S = 0.3


class Pauses:
    """Keeps the account of pause time. With `longest_s` 0 there are no pauses."""

    __slots__ = ("_since_s", "is_pause", "longest_s", "saved_s")

    def __init__(self, longest_s: float = LONGEST_S) -> None:
        self.is_pause = False
        """Whether streams pause in the current step."""
        self.saved_s = longest_s
        """Pause time at the last call of `left_s`."""
        self.longest_s = longest_s
        """The longest pause."""
        self._since_s = 0.0

    def left_s(self, now_s: float) -> float:
        """How long streams may still pause. Must be called at the end of a pause, before `begin`; calls at other steps
        are optional."""
        passed_s = now_s - self._since_s
        if self.is_pause:
            self.saved_s -= passed_s
        else:
            self.saved_s = min(self.longest_s, self.saved_s + RATE * passed_s)
        self._since_s = now_s
        return self.saved_s

    def begin(self, *, is_pause: bool) -> None:
        """Say whether streams pause in the next step."""
        self.is_pause = is_pause
