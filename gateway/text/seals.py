"""Texts in an opaque form, for callers that send them back without reading them (pure).

It is the text in base64, so that a gateway that stores nothing can read it. It is neither secret nor signed.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

from headrace.gateway.checks import invalid


@dataclass(frozen=True, slots=True)
class Seal:
    """The form of one kind of text."""

    prefix: str
    remedy: str
    """What to do with a text that has another form."""

    def sealed(self, text: str) -> str:
        """The opaque form of a text."""
        return self.prefix + base64.urlsafe_b64encode(text.encode()).decode()

    def unsealed(self, field: str, value: object) -> str:
        """The text of an opaque form. Raises `StatusError` (INVALID_FIELD) if this server did not make it."""
        if isinstance(value, str) and value.startswith(self.prefix):
            try:
                return base64.b64decode(value.removeprefix(self.prefix), altchars=b"-_", validate=True).decode()
            except (binascii.Error, UnicodeError):
                pass
        raise invalid(field, f"{field} is not from this server; {self.remedy}")


REASONING = Seal("hr1.", "leave the reasoning out")
COMPACTION = Seal("hc1.", "leave the item out, and send the items that it stands for")
