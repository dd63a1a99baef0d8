"""The flags that say how weights are exported."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from headrace.cli.export.weights import DEFAULT_GROUP_SIZE, EXPORTED, GROUP_SIZES, INT4, ExportedWeights
from headrace.common.commands import CommandError
from headrace.common.flags import FiniteRange

Command = TypeVar("Command", bound=Callable[..., object])

_OPTIONS = (
    click.option(
        "--weights",
        type=click.Choice(EXPORTED),
        help="Export OWNER/NAME from safetensors with such weights; the same as OWNER/NAME:int4 and the like.",
    ),
    click.option(
        "--group-size",
        type=click.Choice([str(size) for size in GROUP_SIZES]),
        help=f"With --weights int4: how many weights share a scale. Default: {DEFAULT_GROUP_SIZE}.",
    ),
    click.option(
        "--ratio",
        type=FiniteRange(0, 1),
        help="With --weights int4: the part of the layers' weights that gets 4 bits; the rest gets 8. Default: 1.",
    ),
)


def export_options(command: Command) -> Command:
    """Add the flags to a command, as `weights`, `group_size` and `ratio`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def exported_weights(weights: str | None, group_size: str | None, ratio: float | None) -> ExportedWeights | None:
    """What the flags ask for; None without any. Raises CommandError if they contradict each other."""
    extra = [flag for flag, value in (("--group-size", group_size), ("--ratio", ratio)) if value is not None]
    if extra and weights != INT4:
        raise CommandError(f"{extra[0]} is for --weights int4; add that, or leave {extra[0]} out")
    if weights is None:
        return None
    return ExportedWeights(weights, int(group_size or DEFAULT_GROUP_SIZE), 1.0 if ratio is None else ratio)
