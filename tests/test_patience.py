"""Bounds of waits follow the machine."""

from __future__ import annotations

import pytest

from tests import patience as subject
from tests.patience import crowding, patience, session_slowness, until


def test_a_bound_grows_with_what_runs_and_with_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "session_slowness", lambda: 1.0)
    monkeypatch.setattr(subject, "crowding", lambda: 0.0)
    assert patience(20) == 20
    monkeypatch.setattr(subject, "crowding", lambda: 4.0)
    assert patience(20) == 100
    monkeypatch.setattr(subject, "session_slowness", lambda: 2.0)
    assert patience(20) == 200
    monkeypatch.setattr(subject, "crowding", lambda: 1000.0)
    assert patience(20) == 300


def test_what_runs_now_counts_before_the_average_has_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(subject, "_load", lambda: "0.50 0.40 0.30 9/321 4711\n")
    assert crowding() == 4.0
    monkeypatch.setattr(subject, "_load", lambda: "6.00 0.40 0.30 1/321 4711\n")
    assert crowding() == 3.0


def test_a_system_that_does_not_say_is_not_crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(subject, "_load", fails)
    assert crowding() == 0.0


def test_other_processes_of_a_session_take_what_the_first_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    session_slowness.cache_clear()
    monkeypatch.setenv("HEADRACE_TEST_SLOWNESS", "3.5")
    assert session_slowness() == 3.5
    session_slowness.cache_clear()


def test_a_wait_that_is_over_names_what_did_not_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = iter([0.05, *[0.0] * 1000])
    asked: list[float] = []
    monkeypatch.setattr(subject, "patience", lambda _: next(bounds))

    def never() -> bool:
        asked.append(0)
        return False

    with pytest.raises(AssertionError, match="the mill turns"):
        until(never, "the mill turns", 1)
    assert len(asked) > 1, "the longest bound counts, not the last"
