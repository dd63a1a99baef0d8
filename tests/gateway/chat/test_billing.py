"""What agents write for their provider's billing does not reach the model, and nothing else is left out."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.gateway.chat.billing import is_billing, without_billing
from headrace.gateway.hints import Hints, hints_var

HEADER = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;"


def read(content: Any, role: str = "system") -> list[tuple[str, Any]]:
    messages = [{"role": role, "content": content}, {"role": "user", "content": "hi"}]
    return [(message["role"], message["content"]) for message in without_billing(messages)]


@pytest.mark.parametrize("between", ["", "\n", "\n\n", " ", "\r\n"])
def test_the_header_goes_and_the_prompt_stays(between: str) -> None:
    """Some versions write the prompt on the same line."""
    assert read(f"{HEADER}{between}You are an agent; be x=1; kind.") == [
        ("system", "You are an agent; be x=1; kind."),
        ("user", "hi"),
    ]


def test_two_requests_share_their_prompt() -> None:
    one, other = (read(f"{HEADER.replace('eb6c6', checksum)}\nYou are an agent.") for checksum in ("eb6c6", "12345"))
    assert one == other


def test_a_turn_of_nothing_else_is_left_out_unless_it_is_alone() -> None:
    assert read(HEADER) == [("user", "hi")]
    assert without_billing([{"role": "system", "content": HEADER}]) == [{"role": "system", "content": ""}]


@pytest.mark.parametrize(
    ("content", "role"),
    [
        (f"Explain: {HEADER}", "system"),
        (f"You are an agent.\n{HEADER}", "system"),
        (HEADER, "user"),
        ("x-anthropic-billing-header: what is this?", "system"),
        ("Today is 2026-11-26.\nSession 6f1c", "system"),
        (None, "system"),
    ],
)
def test_everything_else_has_a_meaning_and_stays(content: str, role: str) -> None:
    assert read(content, role) == [(role, content), ("user", "hi")]


def test_it_is_named_as_a_hint() -> None:
    hints = Hints()
    token = hints_var.set(hints)
    try:
        assert is_billing(HEADER)
        assert not is_billing(f"{HEADER} You are an agent.")
    finally:
        hints_var.reset(token)
    assert hints.headers() == [(b"x-headrace-ignored", b"x-anthropic-billing-header")]
