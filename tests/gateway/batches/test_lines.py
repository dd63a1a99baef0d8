"""The lines of input files: places, errors and order."""

from __future__ import annotations

import json
import random

import pytest

from headrace.gateway.batches.lines import check_lines, parse_line

URL = "/v1/completions"


def row(custom_id: str, prompt: str = "x", **more: object) -> bytes:
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"prompt": prompt, **more}}
    ).encode()


def numbers(content: bytes, **bounds: int) -> list[int]:
    found = check_lines([content], URL, bounds.get("max_lines", 1000), bounds.get("max_line_bytes", 100_000))
    assert not found.errors
    return [line.number for line in found.planned]


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
def test_each_line_is_found_at_its_place_however_the_file_is_cut(size: int) -> None:
    content = b"\n".join([row("a"), b"", row("ö€"), b"  ", row("c"), row("d")])
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    found = check_lines(pieces, URL, 1000, 1000)
    assert [line.number for line in found.planned] == [1, 3, 5, 6]
    names = [parse_line(content[line.start : line.start + line.length]).custom_id for line in found.planned]
    assert names == ["a", "ö€", "c", "d"]


@pytest.mark.parametrize("size", [1, 50, 10_000])
def test_a_line_that_is_too_long_is_named_and_not_kept(size: int) -> None:
    content = b"\n".join([row("a"), row("b", "y" * 500), row("c")])
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    found = check_lines(pieces, URL, 1000, 200)
    assert [(error.code, error.line) for error in found.errors] == [("line_too_long", 2)]
    last = check_lines([row("a") + b"\n" + row("b", "y" * 500)], URL, 1000, 200)
    assert [(error.code, error.line) for error in last.errors] == [("line_too_long", 2)]


def test_files_of_windows() -> None:
    """Line ends of two characters are white space. A byte order mark is named as the cause."""
    content = b"\r\n".join([row("a"), b"", row("b"), b""])
    assert numbers(content) == [1, 3]
    (error,) = check_lines([b"\xef\xbb\xbf" + content], URL, 1000, 1000).errors
    assert (error.code, error.line) == ("invalid_json_line", 1)
    assert error.message.endswith("it begins with a byte order mark")


def test_lines_are_grouped_by_ever_longer_beginnings_and_else_stay_in_order() -> None:
    rng = random.Random(1)
    # Two tables of 3,000 characters, under each of them two questions of 600, and lines of their own.
    prompts = [
        f"{table * 3000}{question * 6000}{number}"
        for number, (table, question) in enumerate(rng.choices([(t, q) for t in "ab" for q in "xy"], k=40))
    ]
    order = [number - 1 for number in numbers(b"\n".join(row(str(n), prompt) for n, prompt in enumerate(prompts)))]
    groups = [(prompts[number][0], prompts[number][4000]) for number in order]
    assert len([1 for one, before in zip(groups, [None, *groups], strict=False) if one != before]) == 4
    for group in set(groups):
        own = [number for number, its in zip(order, groups, strict=True) if its == group]
        assert own == sorted(own)
    assert order[0] == 0
    short = b"\n".join(row(str(n), str(n % 3)) for n in range(9))
    assert numbers(short) == list(range(1, 10))


def test_models_are_not_mixed() -> None:
    prompt = "z" * 200
    content = b"\n".join(row(str(n), prompt, model="ab"[n % 2]) for n in range(6))
    assert numbers(content) == [1, 3, 5, 2, 4, 6]
