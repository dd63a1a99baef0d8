"""Flags as `vllm bench serve` takes them: several values after one flag, and underscores in names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click
import msgspec

from headrace.bench.measures import GOODPUT_METRICS, METRICS

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


class Pair(click.ParamType[tuple[str, str]]):
    """NAME=VALUE."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """The name and the value."""
        if isinstance(value, tuple):
            return value
        name, mark, rest = str(value).partition("=")
        if not mark or not name.strip():
            self.fail(f"{value!r} is not NAME=VALUE", param, ctx)
        return name.strip(), rest.strip()


class Objective(click.ParamType[tuple[str, float]]):
    """METRIC:MILLISECONDS."""

    name = "metric:ms"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        """The metric and its limit."""
        if isinstance(value, tuple):
            return value
        name, _, limit = str(value).partition(":")
        try:
            number = float(limit)
        except ValueError:
            number = -1.0
        if name not in GOODPUT_METRICS or not 0 <= number < float("inf"):
            names = ", ".join(GOODPUT_METRICS)
            self.fail(f"{value!r} is not METRIC:MILLISECONDS with one of {names}, such as ttft:500", param, ctx)
        return name, number


class JsonObject(click.ParamType[dict[str, Any]]):
    """An object in JSON."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """The object."""
        if isinstance(value, dict):
            return value
        try:
            found: dict[str, Any] = msgspec.json.decode(str(value), type=dict[str, Any])
        except msgspec.DecodeError as error:
            self.fail(f"it is not an object in JSON: {error}", param, ctx)
        return found


class PositiveOrInf(click.ParamType[float]):
    """A positive number, or inf."""

    name = "float|inf"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not number > 0:
            self.fail(f"{value!r} is neither a positive number nor inf", param, ctx)
        return number


class MetricNames(click.ParamType[tuple[str, ...]]):
    """Names of metrics, with commas."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The names."""
        if isinstance(value, tuple):
            return value
        names = tuple(name.strip() for name in str(value).split(","))
        for name in names:
            if name not in METRICS:
                self.fail(f"{name!r} is none of {', '.join(METRICS)}", param, ctx)
        return names


class Percentiles(click.ParamType[tuple[float, ...]]):
    """Percentiles, with commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        """The numbers."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(float(part) for part in str(value).split(","))
        except ValueError:
            numbers = (-1.0,)
        if not all(0 <= number <= 100 for number in numbers):
            self.fail(f"{value!r} is not a list of numbers from 0 to 100, such as 50,95,99", param, ctx)
        return numbers
