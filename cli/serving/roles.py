"""`headrace worker|router|gateway|bench|plan|ray|sim`: replaces this process by the role's, with the same arguments."""

from __future__ import annotations

import os
import sys

import click
from click.shell_completion import CompletionItem

from headrace.cli.completion import VARIABLE


def _command(role: str) -> click.Command:
    """The command of a role, which knows its own flags and help."""
    # Without interspersed arguments, `--` stays where it is.
    settings = {"ignore_unknown_options": True, "help_option_names": [], "allow_interspersed_args": False}

    argv = [sys.executable, "-m", f"headrace.{role}"]

    class Role(click.Command):
        def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
            _complete_its_own(role, argv)
            return super().shell_complete(ctx, incomplete)

    def complete(_context: click.Context, _parameter: click.Parameter, _incomplete: str) -> list[str]:
        _complete_its_own(role, argv)
        return []

    @click.command(role, cls=Role, context_settings=settings, add_help_option=False)
    @click.argument("args", nargs=-1, type=click.UNPROCESSED, shell_complete=complete)
    def become(args: tuple[str, ...]) -> None:
        os.execv(sys.executable, [*argv, *args])

    return become


def _complete_its_own(role: str, command: list[str]) -> None:
    """During shell completion, let the command of a role complete its own words. Returns if this is not a
    completion."""
    asked = os.environ.get(VARIABLE, "")
    if not asked.endswith("_complete"):
        return
    variables = {**os.environ, f"_HEADRACE {role.upper()}_COMPLETE": asked}
    del variables[VARIABLE]
    _, _, rest = variables["COMP_WORDS"].partition(role)
    variables["COMP_WORDS"] = f"headrace{rest}"
    if not asked.startswith("fish"):  # fish gives the word itself
        variables["COMP_CWORD"] = str(int(variables["COMP_CWORD"]) - 1)
    sys.stdout.flush()
    os.execve(command[0], command, variables)


worker, router, gateway, bench, plan, ray, sim = map(
    _command, ("worker", "router", "gateway", "bench", "plan", "ray", "sim")
)
