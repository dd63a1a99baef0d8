"""Progress in lines and as a bar."""

from __future__ import annotations

import pytest

from headrace.cli.models.progress import BarProgress, PlainProgress


def test_a_line_comes_every_three_seconds_with_share_and_rate() -> None:
    moments = [(1.0, 0), (2.0, 1_000_000), (4.0, 8_000_000), (5.0, 9_000_000), (8.0, 20_000_000)]
    clock = iter([0.0, *(now_s for now_s, _ in moments)])
    lines: list[str] = []
    progress = PlainProgress("m", lines.append, lambda: next(clock))
    for _, done in moments:
        progress.at(done, 40_000_000)
    assert lines == ["m: 8 of 40 MB (20 %), 2.0 MB/s", "m: 20 of 40 MB (50 %), 3.0 MB/s"]


def test_without_a_total_there_is_no_share() -> None:
    now_s = 0.0
    lines: list[str] = []
    progress = PlainProgress("m", lines.append, lambda: now_s)
    progress.at(0, None)
    now_s = 4.0
    progress.at(8_000_000, None)
    assert lines == ["m: 8 MB, 2.0 MB/s"]


def test_brackets_in_the_name_of_a_file_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with BarProgress("owner/name model[/q4].gguf") as progress:
        progress.at(1, 2)
    assert "model[/q4].gguf" in capsys.readouterr().err
