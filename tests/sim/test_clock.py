"""Properties of virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.sim.clock import VirtualClock

TIMES = st.lists(st.floats(min_value=0, max_value=1e6), max_size=50)


@given(TIMES)
def test_events_happen_once_each_in_order_of_time_and_of_asking(times: list[float]) -> None:
    clock = VirtualClock()
    happened: list[tuple[float, int]] = []
    for number, when_s in enumerate(times):
        clock.at(when_s, lambda number=number: happened.append((clock.now_s, number)))  # type: ignore[misc]
    clock.run()
    assert happened == sorted((when_s, number) for number, when_s in enumerate(times))


@given(TIMES, st.floats(min_value=0, max_value=100))
def test_events_may_ask_for_events_and_time_never_goes_back(times: list[float], later_s: float) -> None:
    clock = VirtualClock()
    seen: list[float] = []

    def first() -> None:
        seen.append(clock.now_s)
        clock.at(clock.now_s + later_s, lambda: seen.append(clock.now_s))

    for when_s in times:
        clock.at(when_s, first)
    clock.run()
    assert seen == sorted(seen)
    assert len(seen) == 2 * len(times)


def test_nothing_can_be_asked_for_in_the_past() -> None:
    clock = VirtualClock()
    clock.at(5.0, lambda: clock.at(4.0, lambda: None))
    with pytest.raises(AssertionError, match=r"at 4\.0 s was added at 5\.0 s"):
        clock.run()
