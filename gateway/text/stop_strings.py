"""Finds stop strings in a text that arrives in pieces (pure).

    text so far   The answer is 42.\\n\\nUser
    stop          "\\n\\nUser:"
    released      The answer is 42.
    held back                      \\n\\nUser      could become the stop string

The result does not depend on how the text was cut into pieces. The first stop string that is completed ends the text;
among several completed by the same character, the longest counts.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches one text for any of some non-empty stop strings."""

    __slots__ = ("_held", "_include", "_stops", "match")

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """`include_stop` leaves the stop string in the text; what follows it is never released."""
        assert all(stops), "an empty stop string matches everything"
        self._stops = tuple(stops)
        self._include = include_stop
        self._held = ""
        self.match: str | None = None
        """The stop string that was found, if one was."""

    def push(self, text: str) -> str:
        """Add a piece, and return the text that it releases. Must not be called after a match."""
        if not self._stops:
            return text
        assert self.match is None, "the text has ended"
        text = self._held + text
        found = self._first_match(text)
        if found is not None:
            end, stop = found
            self.match = stop
            self._held = ""
            return text[: end if self._include else end - len(stop)]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text that was held back, if the text ends without a match."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """End and stop string of the match that is completed first; the longest of those that end together."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or end < best[0] or (end == best[0] and len(stop) > len(best[1])):
                best = end, stop
        return best

    def _num_held(self, text: str) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while start >= 0 and len(text) - start > longest:
                if stop.startswith(text[start:]):
                    longest = len(text) - start
                    break
                start = text.find(stop[0], start + 1)
        return longest
