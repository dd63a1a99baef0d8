"""Renames the fields in errors to those of the caller's protocol (pure).

Requests of other protocols are planned as chats, so errors name the fields of a chat, which the caller never wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from headrace.gateway.hints import Hints, hints_var
from headrace.protos.status import StatusError

Replacement: TypeAlias = "str | Callable[[re.Match[str]], str]"


def messages_at(places: Sequence[str], behind: str = "") -> tuple[str, Replacement]:
    """The pair for `FieldNames` that renames each message to its place. `behind` is a regular expression for text after
    the message, which is dropped."""

    def place_of(found: re.Match[str]) -> str:
        number = int(found[1])
        return places[number] if number < len(places) else found[0]

    return rf"messages\[(\d{{1,9}})\]{behind}", place_of


class FieldNames:
    """Renames fields."""

    def __init__(self, names: Sequence[tuple[str, Replacement]]) -> None:
        """Pairs for `re.sub`: a regular expression for names of a chat, and its replacement. The first match is used.
        Use only a few, because compiling one takes a tenth of a millisecond."""
        self._names = [(re.compile(rf"(?<![\w.\]]){pattern}(?!\w)"), name) for pattern, name in names]

    @contextmanager
    def in_callers_terms(self) -> Iterator[None]:
        """Renames the fields of a `StatusError` that is raised within, and of hints."""
        hints = hints_var.get() or Hints()
        outer, hints.rename = hints.rename, self._rename
        try:
            yield
        except StatusError as error:
            raise self.renamed(error) from error
        finally:
            hints.rename = outer

    def renamed(self, error: StatusError) -> StatusError:
        """The error with the caller's names, in its field and in its message."""
        if error.field is None:
            return error
        field = self._rename(error.field)
        if field == error.field:
            return error
        return StatusError(error.reason, self._rename(error.message), field=field, retry_after_s=error.retry_after_s)

    def _rename(self, text: str) -> str:
        # A name is replaced once: the new name may be another field of a chat.
        pieces: list[str] = []
        pos = 0
        while pos < len(text):
            found = [(match, name) for pattern, name in self._names if (match := pattern.search(text, pos))]
            if not found:
                break
            match, name = min(found, key=lambda one: one[0].start())
            pieces += [text[pos : match.start()], match.expand(name) if isinstance(name, str) else name(match)]
            pos = match.end()
        return "".join([*pieces, text[pos:]])
