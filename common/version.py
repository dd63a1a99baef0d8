"""The version of headrace."""

from __future__ import annotations

import functools
from importlib import metadata


@functools.cache
def headrace_version() -> str:
    """The version of the installed distribution."""
    return metadata.version("headrace")
