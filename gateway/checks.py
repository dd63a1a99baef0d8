"""Refusals that name the field at fault."""

from __future__ import annotations

import math

from headrace.protos.status import Reason, StatusError


def invalid(field_name: str, message: str) -> StatusError:
    """The error for a bad value of a field."""
    return StatusError(Reason.INVALID_FIELD, message, field=field_name)


def unsupported(name: str, message: str) -> StatusError:
    """The error for a known field that is not supported."""
    return StatusError(Reason.UNSUPPORTED, message, field=name)


def check_range(name: str, value: float, least: float, greatest: float, open_below: bool = False) -> None:
    """Raise `StatusError` unless the value is finite and from `least` (excluded if `open_below`) to `greatest`."""
    # An integer may be too large to be a float.
    is_finite = isinstance(value, int) or math.isfinite(value)
    if not is_finite or value < least or value > greatest or (open_below and value == least):
        bound = f"over {least:g}" if open_below else f"at least {least:g}"
        raise invalid(name, f"{name} must be {bound} and at most {greatest:g}")
