"""The text of a call of a custom tool is read from its arguments in any pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.chat.custom_input import CustomInput


def read(arguments: str, cuts: list[int]) -> str:
    """The text of a call whose arguments come in pieces."""
    custom = CustomInput()
    ends = [*sorted(cut % (len(arguments) + 1) for cut in cuts), len(arguments)]
    parts = [custom.push(arguments[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return "".join([*parts, custom.finish()])


@given(text=st.text(), is_ascii=st.booleans(), cuts=st.lists(st.integers(0, 1000), max_size=8))
def test_the_text_is_read_in_any_pieces(text: str, is_ascii: bool, cuts: list[int]) -> None:
    expected = text.encode("utf-8", "replace").decode()
    arguments = json.dumps({"input": expected}, ensure_ascii=is_ascii)
    assert read(arguments, cuts) == expected
    assert read(' { "input" :' + arguments.partition(":")[2], cuts) == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "ab', "ab"),
        ('{"input": "ab\\', "ab"),
        ('{"input": "ab\\u00', "ab"),
        ('{"input": "\\ud83d\\ude00"}', "😀"),
        ('{"input": "\\ud83d"}', "�"),
        ('{"input": "\\ud83d\\n"}', "�\n"),
        ('{"input": "\\ud83d\\u0041"}', "�A"),
        ('{"input": "a", "b": "c"}', "a"),
        ('{"b": 1, "input": "a"}', "a"),
        ('{"patch": "a"}', "a"),
        ('{"a": 1, "b": "c"}', '{"a": 1, "b": "c"}'),
        ('{"input": ["a"]}', '{"input": ["a"]}'),
        ("{}", ""),
        ("", ""),
        ('{"inp', '{"inp'),
    ],
)
def test_other_arguments_are_given_as_far_as_they_are_a_text(arguments: str, text: str) -> None:
    for cuts in ([], [*range(len(arguments))]):
        assert read(arguments, cuts) == text
