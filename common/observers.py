"""Functions that an object calls after it has changed. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

_Value = TypeVar("_Value")


class Observers(Generic[_Value]):
    """The observers of one kind of change. Whoever wants to know adds a function in its constructor, so the object that
    changes need not know them."""

    def __init__(self) -> None:
        self._functions: list[Callable[[_Value], None]] = []

    def add(self, function: Callable[[_Value], None]) -> None:
        """Call `function` after each change from now on."""
        self._functions.append(function)

    def tell(self, value: _Value) -> None:
        """Call all observers, in the order in which they were added."""
        for function in self._functions:
            function(value)
