"""What is named in a response, and how often in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from headrace.gateway import hints
from headrace.gateway.chat.conversation import note_of
from headrace.gateway.hints import HEADER, MAX_LOGGED, Hints, hints_var, ignored


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Hints]:
    """The hints of a request, and nothing in the log so far."""
    monkeypatch.setattr(hints, "_logged", set())
    caplog.set_level(logging.INFO)
    found = Hints()
    token = hints_var.set(found)
    yield found
    hints_var.reset(token)


def test_a_value_is_named_and_not_in_the_log(noted: Hints, caplog: pytest.LogCaptureFixture) -> None:
    for room in (7, 8):
        ignored("max_tokens", "it is too much", value=f">{room}")
    assert noted.headers() == [(HEADER.encode(), b"max_tokens>7, max_tokens>8")]
    assert [record.getMessage() for record in caplog.records] == [
        "a request has max_tokens, without effect: it is too much"
    ]


def test_names_of_callers_leave_room_in_the_log_for_known_ones(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2 * MAX_LOGGED):
        ignored(f"made_up_{number}", "nobody knows it", is_known=False)
    assert len(caplog.records) == MAX_LOGGED // 2
    for number in range(2 * MAX_LOGGED):
        ignored(f"input.{number}", "it is of no use")
    assert len(caplog.records) == MAX_LOGGED


def test_kinds_of_parts_are_names_of_callers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(hints, "MAX_LOGGED", 2)
    for kind in ("made_up", "another"):
        note_of(kind)
    assert len(caplog.records) == 1
