"""Memory that a test leaves in a circle of references is given back before the next test, and the search is short."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest

from tests import memory


class Circle:
    """Refers to itself, and holds memory."""

    def __init__(self, num_bytes: int) -> None:
        self.own = self
        self.data = np.ones(num_bytes, np.uint8)


def test_what_is_much_is_freed_and_little_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_GROWTH_BYTES", 64 << 20)
    monkeypatch.setattr(memory, "_kept_bytes", memory.resident_bytes())
    gc.disable()
    try:
        Circle(128 << 20)
        before = memory.resident_bytes()
        memory.pytest_runtest_logfinish()
        assert memory.resident_bytes() < before - (100 << 20)
        monkeypatch.setattr(memory.gc, "collect", lambda: pytest.fail("nothing has grown"))
        memory.pytest_runtest_logfinish()
    finally:
        gc.enable()


def test_what_was_there_before_the_first_test_is_not_searched() -> None:
    """Modules and collected tests are most of all objects."""
    assert gc.get_freeze_count() > 10 * len(sys.modules)


def test_nothing_is_searched_while_tests_are_collected() -> None:
    collecting = memory.pytest_collection()
    next(collecting)
    try:
        assert not gc.isenabled()
    finally:
        with pytest.raises(StopIteration):
            collecting.send(None)
    assert gc.isenabled()
