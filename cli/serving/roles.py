"""`headrace worker|router|gateway|sim`: replaces this process by the role's, with the same arguments."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

_PASS_EVERYTHING_ON = {"ignore_unknown_options": True, "help_option_names": []}


def _become(role: str, args: tuple[str, ...]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-m", f"headrace.{role}", *args])


@click.command(context_settings=_PASS_EVERYTHING_ON, add_help_option=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def worker(args: tuple[str, ...]) -> None:
    """Run `python -m headrace.worker` with the same arguments."""
    _become("worker", args)


@click.command(context_settings=_PASS_EVERYTHING_ON, add_help_option=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def router(args: tuple[str, ...]) -> None:
    """Run `python -m headrace.router` with the same arguments."""
    _become("router", args)


@click.command(context_settings=_PASS_EVERYTHING_ON, add_help_option=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def gateway(args: tuple[str, ...]) -> None:
    """Run `python -m headrace.gateway` with the same arguments."""
    _become("gateway", args)


@click.command(context_settings=_PASS_EVERYTHING_ON, add_help_option=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def sim(args: tuple[str, ...]) -> None:
    """Run `python -m headrace.sim` with the same arguments."""
    _become("sim", args)
