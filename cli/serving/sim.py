"""`headrace sim`: replaces this process by the simulator, with the same arguments."""

from __future__ import annotations

import os
import sys

import click


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def sim(args: tuple[str, ...]) -> None:
    """Run `python -m headrace.sim` with the same arguments."""
    os.execv(sys.executable, [sys.executable, "-m", "headrace.sim", *args])
