"""Reasoning in an opaque form, for callers that hand it back without having been shown it (pure).

It keeps no secret and proves nothing: it is the text in base64, so that a gateway that stores nothing can read it.
"""

from __future__ import annotations

import base64
import binascii

from headrace.gateway.checks import invalid

_PREFIX = "hr1."


def sealed(reasoning: str) -> str:
    """The opaque form of a reasoning."""
    return _PREFIX + base64.urlsafe_b64encode(reasoning.encode()).decode()


def unsealed(field: str, value: object) -> str:
    """The reasoning of an opaque form. Raises `StatusError` (INVALID_FIELD) for one that is not from here."""
    if isinstance(value, str) and value.startswith(_PREFIX):
        try:
            return base64.b64decode(value.removeprefix(_PREFIX), altchars=b"-_", validate=True).decode()
        except (binascii.Error, UnicodeError):
            pass
    raise invalid(field, f"{field} is not from this server; leave the reasoning out")
