"""The text that is being parsed, and the parsing steps that all families share."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

_T = TypeVar("_T")

Steps = Generator[None, None, _T]
"""Parsing that yields when it needs more text, and returns what it read."""

SPACE = " \t\r\n"


class MismatchError(Exception):
    """The text is not what the steps expected, or it ended. The source is at the position of the mismatch."""


class Source:
    """The text that no step has taken. Taken text is dropped at the next push, unless there is a mark."""

    __slots__ = ("_dropped", "_mark", "closed", "pos", "text")

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        """Where the next step begins in `text`."""
        self.closed = False
        """Whether the text is complete."""
        self._mark: int | None = None
        self._dropped = 0

    def push(self, text: str) -> None:
        """Append the next piece."""
        keep = self.pos if self._mark is None else self._mark
        self.text = self.text[keep:] + text
        self._dropped += keep
        self.pos -= keep
        if self._mark is not None:
            self._mark = 0

    @property
    def position(self) -> int:
        """Number of characters taken since the beginning."""
        return self._dropped + self.pos

    def mark(self) -> None:
        """Start to record the text that is taken."""
        self._mark = self.pos

    def unmark(self) -> str:
        """The text taken since the mark. Removes the mark."""
        assert self._mark is not None
        taken, self._mark = self.text[self._mark : self.pos], None
        return taken


def has(source: Source, num_chars: int) -> Steps[bool]:
    """Wait until this many characters are available. Returns False if the text ends before."""
    while len(source.text) - source.pos < num_chars:
        if source.closed:
            return False
        yield
    return True


def peek(source: Source) -> Steps[str]:
    """The next character; empty at the end."""
    return source.text[source.pos] if (yield from has(source, 1)) else ""


def skip(source: Source, chars: str = SPACE) -> Steps[None]:
    """Take all of these characters that come next."""
    while (yield from has(source, 1)) and source.text[source.pos] in chars:
        source.pos += 1


def literal(source: Source, text: str) -> Steps[bool]:
    """Take this text if it comes next."""
    while True:
        if source.text.startswith(text, source.pos):
            source.pos += len(text)
            return True
        if source.closed or not text.startswith(source.text[source.pos :]):
            return False
        yield


def next_of(source: Source, *texts: str) -> Steps[str]:
    """Which of these texts comes next, without taking it; empty if none does."""
    while True:
        for text in texts:
            if source.text.startswith(text, source.pos):
                return text
        if source.closed or not any(text.startswith(source.text[source.pos :]) for text in texts):
            return ""
        yield


def closed_by(source: Source, text: str) -> Steps[None]:
    """Take this text if it comes next, or its beginning if the source ends there."""
    if not (yield from literal(source, text)) and source.closed and text.startswith(source.text[source.pos :]):
        source.pos = len(source.text)


def expect(source: Source, text: str) -> Steps[None]:
    """Take this text. Raises `MismatchError` if something else comes next."""
    if not (yield from literal(source, text)):
        raise MismatchError


def matching(source: Source, pattern: re.Pattern[str], max_chars: int) -> Steps[str]:
    """Take the longest run that matches, which must end before the text does: `pattern` is one class, repeated.

    Raises `MismatchError` if nothing matches or more than `max_chars` do.
    """
    while True:
        found = pattern.match(source.text, source.pos)
        end = found.end() if found is not None else source.pos
        if end < len(source.text) or source.closed:
            break
        if end - source.pos > max_chars:
            break
        yield
    taken = source.text[source.pos : end]
    if not 0 < len(taken) <= max_chars:
        raise MismatchError
    source.pos = end
    return taken


def text_until(source: Source, take: Callable[[str], None], *ends: str, whole: bool = False) -> Steps[str]:
    """Give `take` the text before the first of `ends`, and return that end without taking it; empty at the end.

    A possible beginning of an end is held back until that is decided. If the text ends there, it was only text; with
    `whole` it was an end that was cut off, and is not taken.
    """
    pattern = _any_of(ends)
    while True:
        found = pattern.search(source.text, source.pos)
        end = len(source.text) - (0 if source.closed and not whole else num_held(source.text, source.pos, ends))
        if found is not None:
            end = found.start()
        if end > source.pos:
            text = source.text[source.pos : end]
            source.pos = end
            take(text)
        if found is not None:
            return found[0]
        if source.closed:
            return ""
        yield


def rest(source: Source, take: Callable[[str], None]) -> Steps[None]:
    """Give `take` everything that follows."""
    while (yield from has(source, 1)):
        text = source.text[source.pos :]
        source.pos = len(source.text)
        take(text)


def num_held(text: str, start: int, ends: tuple[str, ...]) -> int:
    """Length of the longest suffix of `text[start:]` that is a proper prefix of one of `ends`."""
    longest = 0
    for end in ends:
        at = text.find(end[0], max(start, len(text) - len(end) + 1))
        while at >= 0 and len(text) - at > longest:
            if end.startswith(text[at:]):
                longest = len(text) - at
                break
            at = text.find(end[0], at + 1)
    return longest


@lru_cache(maxsize=64)
def _any_of(ends: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(end) for end in ends))
