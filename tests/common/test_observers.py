"""Observers are told of changes, all of them and in order."""

from __future__ import annotations

from headrace.common.observers import Observers


def test_all_who_want_to_know_are_told_in_order() -> None:
    told: list[tuple[str, int]] = []
    observers: Observers[int] = Observers()
    observers.tell(0)  # nobody wants to know
    observers.add(lambda value: told.append(("first", value)))
    observers.tell(1)
    observers.add(lambda value: told.append(("second", value)))
    observers.tell(2)
    assert told == [("first", 1), ("first", 2), ("second", 2)]
