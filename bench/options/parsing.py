"""Flags as `vllm bench serve` takes them: several values after one flag, and underscores in names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from headrace.common.commands import SectionedCommand

_F = TypeVar("_F", bound=Callable[..., Any])
# A word without any of these is no URL, and no address that lacks only its scheme.
_MARKS_OF_ADDRESSES = frozenset(".:/")

# What may follow a flag as a further value. A URL is none: it names the server.
_FURTHER = {
    "--goodput": re.compile(r"[a-z0-9_]+:[0-9.]+(ms|s)?"),
    "--metadata": re.compile(r"[^-=/:\s][^=/:\s]*=.*", re.DOTALL),
    "--lora-modules": re.compile(r"[^-:][^:]*"),
    "--header": re.compile(r"[^-=/:\s][^=/:\s]*=.*", re.DOTALL),
}


def spelled_out(args: Sequence[str]) -> list[str]:
    """The arguments with a flag before each value, and with hyphens instead of underscores in the names of flags."""
    found: list[str] = []
    flag = ""
    is_value = False
    for arg in args:
        if arg.startswith("--"):
            name, mark, value = arg.partition("=")
            name = name.replace("_", "-")
            arg = name + mark + value
            flag, is_value = name if name in _FURTHER else "", not mark
        elif flag and not is_value and _FURTHER[flag].fullmatch(arg):
            found.append(flag)
        elif not is_value:
            flag = ""
        if not arg.startswith("--"):
            is_value = False
        found.append(arg)
    return found


class Command(SectionedCommand):
    """A command that reads its arguments so, and whose help has its options in sections."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spell the arguments out first."""
        return super().parse_args(ctx, spelled_out(args))


class Group(click.Group):
    """A group whose command `serve` need not be named: `headrace bench URL` is `headrace bench serve URL`."""

    default = "serve"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Name the command if the arguments begin with none. Raises UsageError for a word that is neither a command nor
        an address."""
        if args and args[0] not in (*self.commands, "--help", "-h"):
            if not args[0].startswith("-") and not _MARKS_OF_ADDRESSES & set(args[0]) and args[0] != "localhost":
                raise click.UsageError(
                    f"{args[0][:40]!r} is neither a command ({', '.join(sorted(self.commands))}) nor the URL of a "
                    "server, such as http://127.0.0.1:8000",
                    ctx,
                )
            args = [self.default, *args]
        return super().parse_args(ctx, args)


class Section:
    """Options of one subject as one decorator, in their order, with the title that they have in the help."""

    def __init__(self, title: str, *given: Callable[[Any], Any]) -> None:
        self.title = title
        self._given = given
        self.flags = frozenset(flag for param in click.command()(self(lambda: None)).params for flag in param.opts)

    def __call__(self, function: _F) -> _F:
        """Give a function the options."""
        for option in reversed(self._given):
            function = option(function)
        return function
