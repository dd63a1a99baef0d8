"""Numbers among the flags of all commands."""

from __future__ import annotations

import click
import pytest

from headrace.common.flags import FiniteRange
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
