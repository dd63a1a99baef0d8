"""Kinds that callers make up are not taken for known names in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from headrace.gateway import hints
from headrace.gateway.responses.items import input_items
from headrace.gateway.responses.tools import offer_of
from headrace.gateway.responses.types import ResponsesRequest, check_response

FUNCTION = {"type": "function", "name": "f"}
ITEM = {"type": "message", "role": "assistant"}


@pytest.mark.parametrize(
    "asks",
    [
        lambda kind: check_response(ResponsesRequest(input="hi", include=[kind])),
        lambda kind: offer_of([{"type": f"web_search_{kind}"}, FUNCTION], [], None),
        lambda kind: input_items([{**ITEM, "content": [{"type": kind}]}]),
        lambda kind: input_items([{"type": "reasoning", "summary": [], "content": [{"type": kind}]}]),
    ],
    ids=["include", "tool", "part", "thought"],
)
def test_only_the_first_made_up_kinds_are_in_the_log(
    asks: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hints, "_logged", set())
    monkeypatch.setattr(hints, "MAX_LOGGED", 2)
    caplog.set_level(logging.INFO)
    for kind in ("made_up", "another"):
        asks(kind)
    assert len([one for one in caplog.records if "without effect" in one.getMessage()]) == 1
