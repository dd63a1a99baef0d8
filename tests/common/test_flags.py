"""Numbers among the flags of all commands."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest

from headrace.common.flags import FiniteRange, why_not_writable
from tests.cli_reference import commands

NUMBERS = {
    f"{' '.join(words)} {option.opts[0]}": (command, option)
    for words, command in commands()
    for option in command.params
    if isinstance(option.type, (click.FloatRange, type(click.FLOAT)))
}


@pytest.mark.parametrize("flag", NUMBERS)
def test_a_flag_that_is_a_number_is_finite(flag: str) -> None:
    command, option = NUMBERS[flag]
    assert isinstance(option.type, FiniteRange), f"{flag} takes nan"
    for value in ("nan", "inf", "-inf"):
        with pytest.raises(click.BadParameter, match="is not"):
            option.type.convert(value, option, click.Context(command))


def test_there_are_numbers_among_the_flags() -> None:
    assert {"worker --kv-cache-gb", "router --max-ttft", "gateway --request-timeout"} <= NUMBERS.keys()


def test_what_cannot_be_written_is_known_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, tmp_path, tmp_path / "new" / "directories" / "file", Path("file"), Path()):
        assert not why_not_writable(path)
    assert why_not_writable(file / "a" / "b") == f"{file} is not a directory"
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)  # as for others than root
    assert why_not_writable(tmp_path / "new") == f"{tmp_path} is not writable"
    assert not why_not_writable(file)


def test_a_number_is_no_range() -> None:
    assert click.IntRange(1).name == "integer"
    assert FiniteRange(0).name == "float"
