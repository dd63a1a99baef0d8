"""Flags as `vllm bench serve` takes them: several values after one flag, and underscores in names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import IO, Any, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])

# What may follow a flag as a further value. A URL is none: it names the server.
_FURTHER = {
    "--goodput": re.compile(r"[a-z0-9_]+:[0-9.]+"),
    "--metadata": re.compile(r"[^-=/:\s][^=/:\s]*=.*", re.DOTALL),
    "--lora-modules": re.compile(r"[^-:][^:]*"),
    "--header": re.compile(r"[^-=/:\s][^=/:\s]*=.*", re.DOTALL),
}


def spelled_out(args: Sequence[str]) -> list[str]:
    """The arguments with each value behind a flag of its own, and hyphens for underscores in names of flags."""
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


class Command(click.Command):
    """A command that reads its arguments so."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Spell the arguments out first."""
        return super().parse_args(ctx, spelled_out(args))


class Group(click.Group):
    """A group whose command `serve` need not be named: `headrace bench URL` is `headrace bench serve URL`."""

    default = "serve"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Name the command if the arguments begin with none."""
        if args and args[0] not in (*self.commands, "--help", "-h"):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


class UsageError(click.ClickException):
    """The flags cannot be used. The message says what to change."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """Write the message to `file`, or to standard error."""
        click.echo(f"error: {self.format_message()}", file=file, err=file is None)


class Failed(UsageError):
    """The server cannot be measured."""

    exit_code = 1


def options(*given: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Several options as one decorator, in their order."""

    def decorate(function: _F) -> _F:
        for option in reversed(given):
            function = option(function)
        return function

    return decorate
