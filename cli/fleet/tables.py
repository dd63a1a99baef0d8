"""Tables on standard output that lose nothing in a narrow terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH_OF_A_PIPE = 200
_LONGEST_LINE = 1000


def width_of(table: Table) -> int:
    """The width of a table in characters if nothing in it is cut or wrapped."""
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(width=_LONGEST_LINE)
    return Measurement.get(console, console.options, table).maximum


def console_for(table: Table) -> Console:
    """A console in which every column of the table is whole. In a narrower terminal, long lines continue in the next
    line."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_PIPE, highlight=False, markup=False)
    console.width = max(console.width, width_of(table))
    return console


def print_columns(rows: Sequence[Sequence[str]], *, err: bool = False) -> None:
    """Print texts in columns, the first row as titles; on standard error if `err`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip(), err=err)
