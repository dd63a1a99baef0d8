"""The address of the system for clients, from the environment, and the refusals that they expect."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

BASE_URL = os.environ["HEADRACE_TEST_BASE_URL"]
"""With /v1."""
MODEL = os.environ["HEADRACE_TEST_MODEL"]

_E = TypeVar("_E", bound=Exception)


def refusal(kind: type[_E], call: Callable[[], Any]) -> _E:
    """The error of this kind that a call ends with."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")
