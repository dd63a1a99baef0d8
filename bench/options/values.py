"""Types of the values of flags: pairs, objectives, lists. Each refuses what it cannot read by name."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from headrace.bench.measures import GOODPUT_METRICS, METRICS


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
