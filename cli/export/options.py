"""The flags that say how weights are exported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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
        help=f"With --weights int4: how many weights share a scale; -1: a whole row. Default: {DEFAULT_GROUP_SIZE}.",
    ),
    click.option(
        "--ratio",
        type=FiniteRange(0, 1),
        help="With --weights int4: the part of the layers' weights that gets 4 bits; the rest gets 8. Default: 1.",
    ),
    click.option(
        "--awq", is_flag=True, help="With --weights int4: scale columns by their importance first (AWQ). Takes longer."
    ),
    click.option(
        "--scale-estimation",
        is_flag=True,
        help="With --weights int4 and --dataset: choose scales by the error of the products. Takes much longer.",
    ),
    click.option(
        "--dataset",
        metavar="FILE",
        help="For --awq, --scale-estimation and a --ratio below 1: a file with a text in each line, such as the model "
        "will see. The first 128 are used.",
    ),
)


def export_options(command: Command) -> Command:
    """Add the flags to a command, as the arguments of `exported_weights`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def exported_weights(
    weights: str | None,
    group_size: str | None,
    ratio: float | None,
    *,
    awq: bool = False,
    scale_estimation: bool = False,
    dataset: str | None = None,
) -> ExportedWeights | None:
    """The weights that the flags ask for; None without flags. Raises CommandError if they contradict each other, or if
    there is no data set."""
    given = {
        "--group-size": group_size is not None,
        "--ratio": ratio is not None,
        "--awq": awq,
        "--scale-estimation": scale_estimation,
        "--dataset": dataset is not None,
    }
    extra = [flag for flag, is_given in given.items() if is_given]
    if extra and weights != INT4:
        raise CommandError(f"{extra[0]} is for --weights int4; add that, or leave {extra[0]} out")
    if weights is None:
        return None
    if scale_estimation and dataset is None:
        raise CommandError("--scale-estimation needs texts; name a file with one in each line: --dataset FILE")
    part = 1.0 if ratio is None else ratio
    if dataset is not None and not (awq or scale_estimation or part < 1):
        raise CommandError("--dataset is for --awq, --scale-estimation and a --ratio below 1; add one, or leave it out")
    texts = None if dataset is None else _texts_in(dataset)
    return ExportedWeights(weights, int(group_size or DEFAULT_GROUP_SIZE), part, awq, scale_estimation, texts)


def _texts_in(dataset: str) -> Path:
    """The file of a data set. Raises CommandError if it has no texts."""
    path = Path(dataset).expanduser()
    try:
        has_texts = bool(path.read_text(encoding="utf-8").strip())
    except OSError:
        raise CommandError(
            f"--dataset {dataset}: there is no such file; name a file with a text in each line (data sets of a hub are "
            "not fetched)"
        ) from None
    except UnicodeDecodeError:
        raise CommandError(
            f"--dataset {dataset}: it is not text in UTF-8; name a file with a text in each line"
        ) from None
    if not has_texts:
        raise CommandError(f"--dataset {dataset}: it has no text; name a file with a text in each line")
    return path.absolute()
