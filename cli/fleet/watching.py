"""`--watch`: show something again every few seconds, until Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import click

from headrace.common.commands import CommandFailed
from headrace.common.flags import FiniteRange

_SECONDS = 2.0


def watch_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --watch to a command, which gets the seconds as `watch_s`; None without it."""
    return click.option(
        "--watch",
        "watch_s",
        is_flag=False,
        flag_value=_SECONDS,
        type=FiniteRange(min=0.1),
        metavar="[SECONDS]",
        help=f"Show it again every {_SECONDS:g} seconds, or every SECONDS, until Ctrl-C.",
    )(command)


def watched(show: Callable[[], bool], watch_s: float | None) -> bool:
    """Call `show` once, or again and again. Returns what its last call did. On a terminal each picture replaces the one
    before. With `watch_s`, a failure is told, and the next look may succeed."""
    if watch_s is None:
        return show()
    while True:
        if sys.stdout.isatty():
            click.clear()
        try:
            show()
        except CommandFailed as error:
            error.show()
        sys.stdout.flush()
        time.sleep(watch_s)
