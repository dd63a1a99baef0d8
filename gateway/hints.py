"""Hints: parts of a request that this server accepts without effect. They are named in a response header, and once in
the log.

A hint is a field, value or tool type that the API's own provider accepts and whose absence the caller cannot notice in
the answer. Whatever would change the answer is applied or refused instead (`fields`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar

HEADER = "x-headrace-ignored"
"""Of a response, and the metadata of a gRPC call: the names, divided by commas."""
MAX_NAMES = 32
MAX_NAME_CHARS = 64
MAX_LOGGED = 1000
"""Callers make up any number of names. Half of these are for names that are known."""
_HIDDEN = re.compile(r"[^\x21-\x2b\x2d-\x7e]")
_LOG = logging.getLogger(__name__)
_logged: set[str] = set()


class Hints:
    """The hints of one request."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self.rename: Callable[[str], str] = str
        """Gives the caller's name of a field; `field_names` sets it while a request is planned as a chat."""

    def add(self, name: str) -> None:
        """Note the name of a field or value, of which some may come from the caller."""
        if len(self._names) < MAX_NAMES:
            self._names[_HIDDEN.sub("?", name[:MAX_NAME_CHARS])] = None

    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """The header that names them; empty if there are none."""
        return [(HEADER.encode(), ", ".join(self._names).encode())] if self._names else []


hints_var: ContextVar[Hints | None] = ContextVar("hints", default=None)
"""Of the current request; None outside of requests."""


def ignored(name: str, why: str, *, value: str = "", is_known: bool = True) -> None:
    """Note that the current request asks for something that has no effect. `why` is a clause for the log. `value` is
    shown after the name, but not in the log, because it may differ in each request. Unknown names come from the caller,
    and only the first few are logged."""
    hints = hints_var.get()
    if hints is not None:
        name = hints.rename(name)
        hints.add(name + value)
    if name not in _logged and len(_logged) < (MAX_LOGGED if is_known else MAX_LOGGED // 2):
        _logged.add(name)
        _LOG.info("a request has %s, without effect: %s", _HIDDEN.sub("?", name[:MAX_NAME_CHARS]), why)
