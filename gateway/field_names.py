"""Failures in the caller's terms: the names of its protocol's fields for those of the chat that its request is (pure).

Responses and messages of other protocols are planned as chats. What is wrong with a chat is then said of fields that
the caller never wrote; here they get the names that it did write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headrace.protos.status import StatusError


class FieldNames:
    """Renames fields."""

    def __init__(self, names: Sequence[tuple[str, str]]) -> None:
        """Regular expressions for the chat's names and what stands for them, as `re.sub` takes them; the first
        that fits holds."""
        self._names = [(re.compile(rf"(?<![\w.\]]){pattern}(?!\w)"), name) for pattern, name in names]

    @contextmanager
    def in_callers_terms(self) -> Iterator[None]:
        """Renames the fields of a `StatusError` that is raised within."""
        try:
            yield
        except StatusError as error:
            raise self.renamed(error) from error

    def renamed(self, error: StatusError) -> StatusError:
        """The error with the caller's names, in its field and in its message."""
        if error.field is None:
            return error
        field = self._rename(error.field)
        if field == error.field:
            return error
        return StatusError(error.reason, self._rename(error.message), field=field, retry_after_s=error.retry_after_s)

    def _rename(self, text: str) -> str:
        # Names that were written are not looked at again: one protocol's name may be another's for something else.
        pieces: list[str] = []
        pos = 0
        while pos < len(text):
            found = [(match, name) for pattern, name in self._names if (match := pattern.search(text, pos))]
            if not found:
                break
            match, name = min(found, key=lambda one: one[0].start())
            pieces += [text[pos : match.start()], match.expand(name)]
            pos = match.end()
        return "".join([*pieces, text[pos:]])
