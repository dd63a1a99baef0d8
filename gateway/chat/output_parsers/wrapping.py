"""The tags that some models write around their answer, such as <response>...</response> after the reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.chat.output_parsers.source import SPACE, num_held


class Wrapping:
    """Takes the tags off: the first one only where the answer begins, and the other one only where it ends."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._pairs = pairs
        self._closing = ""
        self._held = ""
        self._is_decided = not pairs

    @property
    def is_found(self) -> bool:
        """Whether the answer began with a tag."""
        return bool(self._closing)

    def push(self, text: str) -> str:
        """The text of the answer that is certain now."""
        if self._is_decided and not self._closing:
            return text
        self._held += text
        if not self._is_decided and not self._decide():
            return ""
        held = 0
        if self._closing:
            words = self._held.rstrip(SPACE)
            held = num_held(self._held, 0, (self._closing,))
            if words.endswith(self._closing):
                held = len(self._held) - len(words) + len(self._closing)
        certain, self._held = self._held[: len(self._held) - held], self._held[len(self._held) - held :]
        return certain

    def finish(self) -> str:
        """The rest of the text, as the answer ends here."""
        rest, self._held = self._held, ""
        if self._closing and rest.rstrip(SPACE) == self._closing:
            rest = ""
        self._closing, self._is_decided = "", True
        return rest

    def _decide(self) -> bool:
        """Whether it is known how the answer begins."""
        begin = self._held.lstrip(SPACE)
        for opening, closing in self._pairs:
            if begin.startswith(opening):
                self._closing, self._held = closing, begin[len(opening) :]
                self._is_decided = True
                return True
        self._is_decided = not any(opening.startswith(begin) for opening, _ in self._pairs)
        return self._is_decided
