"""Reasoning in an opaque form, for callers that send it back without reading it (pure).

It is the text in base64, so that a gateway that stores nothing can read it. It is neither secret nor signed.
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
    """The reasoning of an opaque form. Raises `StatusError` (INVALID_FIELD) if this server did not make it."""
    if isinstance(value, str) and value.startswith(_PREFIX):
        try:
            return base64.b64decode(value.removeprefix(_PREFIX), altchars=b"-_", validate=True).decode()
        except (binascii.Error, UnicodeError):
            pass
    raise invalid(field, f"{field} is not from this server; leave the reasoning out")
