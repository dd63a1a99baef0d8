"""Prompts of texts with a gap."""

from __future__ import annotations

import pytest

from headrace.gateway.text.fill import FillTokens, cut_to, fill_tokens

QWEN = [
    b"a",
    b"<|fim_prefix|>",
    b"<|fim_middle|>",
    b"<|fim_suffix|>",
    b"<|fim_pad|>",
    b"<|repo_name|>",
    b"<|file_sep|>",
]


def encode(text: str) -> list[int]:
    return [100 + byte for byte in text.encode()]


@pytest.mark.parametrize(
    ("vocabulary", "wanted"),
    [
        (QWEN, FillTokens(1, 3, 2, 5, 6, (4, 5, 6))),
        ([b"<fim_prefix>", b"<fim_suffix>", b"<fim_middle>"], FillTokens(0, 1, 2)),
        (
            [b"<fim_prefix>", b"<fim_suffix>", b"<fim_middle>", b"<reponame>", b"<filename>"],
            FillTokens(0, 1, 2, 3, 4, (3, 4)),
        ),
        (["<｜fim▁begin｜>".encode(), "<｜fim▁hole｜>".encode(), "<｜fim▁end｜>".encode()], FillTokens(0, 1, 2)),
        ([b" <PRE>", "▁<SUF>".encode(), b"<MID>", b"<EOT>"], FillTokens(0, 1, 2, ends=(3,))),
        ([b"[PREFIX]", b"x", b"[SUFFIX]"], FillTokens(0, 2, None)),
        ([b"<fim_prefix>", b"<fim_suffix>"], None),
        ([b"a", b"b"], None),
    ],
)
def test_the_tokens_of_each_family_are_found(vocabulary: list[bytes], wanted: FillTokens | None) -> None:
    assert fill_tokens(vocabulary) == wanted


def test_the_text_before_comes_first_and_the_answer_last() -> None:
    tokens = fill_tokens(QWEN)
    assert tokens is not None
    assert tokens.prompt([7, 8], [9], encode=encode, begin=[0]) == [0, 1, 7, 8, 3, 9, 2]
    assert FillTokens(0, 2, None).prompt([7, 8], [9], encode=encode) == [2, 9, 0, 7, 8]


def test_files_come_before_it_each_with_its_name() -> None:
    tokens = fill_tokens(QWEN)
    assert tokens is not None
    files = [("x.py", "1"), ("y.py", "2")]
    found = tokens.prompt([7], [9], files, encode=encode, begin=[0])
    assert found == [
        0,
        *(5, *encode("project\n")),
        *(6, *encode("x.py\n1")),
        *(6, *encode("y.py\n2")),
        *(6, *encode("filename\n")),
        *(1, 7, 3, 9, 2),
    ]
    assert FillTokens(1, 2, 3).prompt([7], [9], files, encode=encode) == [*encode("12"), 1, 7, 2, 9, 3]


@pytest.mark.parametrize(
    ("room", "before", "after"),
    [(10, 6, 4), (8, 6, 2), (4, 3, 1), (1, 1, 0), (9, 6, 3)],
)
def test_what_is_farthest_from_the_gap_is_left_out(room: int, before: int, after: int) -> None:
    first, second = cut_to(room, [*range(6)], [*range(20, 24)])
    assert (list(first), list(second)) == ([*range(6)][6 - before :], [*range(20, 20 + after)])
