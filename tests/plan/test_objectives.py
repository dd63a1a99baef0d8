"""Limits as they are written, and percentiles."""

from __future__ import annotations

import pytest

from headrace.plan.objectives import Limit, Objectives, percentile, time_text


@pytest.mark.parametrize(
    ("text", "limit"),
    [("p95:2s", Limit(95, 2)), ("p99.9:150ms", Limit(99.9, 0.15)), ("2s", Limit(95, 2)), ("P50:0.5 S", Limit(50, 0.5))],
)
def test_a_limit_is_a_percentile_and_a_time(text: str, limit: Limit) -> None:
    assert Limit.of(text) == limit


@pytest.mark.parametrize("text", ["2", "p95", "p95:2", "fast", "-1s", "p0:1s", "p101:1s", "0ms", "nan s"])
def test_what_is_no_limit_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as p95|must be above 0|write 2ms or 2s|write p95:2ms or p95:2s"):
        Limit.of(text)


def test_objectives_say_what_they_are() -> None:
    assert str(Objectives(Limit(95, 2), None)) == "time to the first token: p95 within 2.0 s"
    assert str(Objectives(None, Limit(99, 0.1))) == "time a token: p99 within 100 ms"


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([], 95) == 0
    assert percentile([3.0, 1.0, 2.0], 50) == 2
    assert percentile([float(value) for value in range(1, 101)], 95) == 95
    assert percentile([1.0], 99) == 1


def test_times_are_in_milliseconds_until_two_seconds() -> None:
    assert (time_text(0.0125), time_text(1.9994), time_text(2)) == ("12 ms", "1,999 ms", "2.0 s")
