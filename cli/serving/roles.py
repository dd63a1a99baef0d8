"""`headrace worker|router|gateway|bench|plan|ray|sim`: replaces this process by the role's, with the same arguments."""

from __future__ import annotations

import os
import sys

import click


def _command(role: str) -> click.Command:
    """The command of a role, which knows its own flags and help."""
    # Without interspersed arguments, `--` stays where it is.
    settings = {"ignore_unknown_options": True, "help_option_names": [], "allow_interspersed_args": False}

    @click.command(role, context_settings=settings, add_help_option=False)
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    def become(args: tuple[str, ...]) -> None:
        os.execv(sys.executable, [sys.executable, "-m", f"headrace.{role}", *args])

    return become


worker, router, gateway, bench, plan, ray, sim = map(
    _command, ("worker", "router", "gateway", "bench", "plan", "ray", "sim")
)
