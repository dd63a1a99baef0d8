"""Types of the values of flags: pairs, objectives, lists. Each refuses what it cannot read by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
    """METRIC:TIME, a time being milliseconds unless it has a unit."""

    name = "metric:time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        """The metric and its limit in milliseconds. Raises BadParameter."""
        if isinstance(value, tuple):
            return value
        name, _, limit = str(value).partition(":")
        try:
            if limit.endswith("s") and not limit.endswith("ms"):
                number = 1000 * float(limit.removesuffix("s"))
            else:
                number = float(limit.removesuffix("ms"))
        except ValueError:
            number = -1.0
        if name not in GOODPUT_METRICS or not 0 <= number < float("inf"):
            names = ", ".join(GOODPUT_METRICS)
            self.fail(f"{value!r} is not METRIC:TIME with one of {names}, such as ttft:2s or tpot:100ms", param, ctx)
        return name, number


class JsonObject(click.ParamType[dict[str, Any]]):
    """An object in JSON."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """The object. Raises BadParameter if it is not JSON, or not an object."""
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
        """The number. Raises BadParameter if it is neither positive nor inf."""
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
        """The names. Raises BadParameter if one is no metric."""
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
        """The percentiles. Raises BadParameter if one is not from 0 to 100."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(float(part) for part in str(value).split(","))
        except ValueError:
            numbers = (-1.0,)
        if not all(0 <= number <= 100 for number in numbers):
            self.fail(f"{value!r} is not a list of numbers from 0 to 100, such as 50,95,99", param, ctx)
        return numbers


class Thresholds(click.ParamType[tuple[float, float]]):
    """Two rising numbers, with a comma."""

    name = "low,high"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        """Both, in milliseconds. Raises BadParameter unless they are positive and rise."""
        if isinstance(value, tuple):
            return value
        try:
            low, high = (float(part) for part in str(value).split(","))
        except ValueError:
            low = high = -1.0
        if not 0 < low < high < float("inf"):
            self.fail(f"{value!r} is not two rising numbers of milliseconds, such as 25,50", param, ctx)
        return low, high


class RangeRatio(click.ParamType[tuple[float, float]]):
    """Shares from 0 to below 1, of prompts and of answers: one number, or an object in JSON."""

    name = "ratio"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        """The share of prompts and the share of answers."""
        if isinstance(value, tuple):
            return value
        try:
            found = msgspec.json.decode(str(value), type=float | dict[str, float])
        except msgspec.DecodeError:
            found = -1.0
        if isinstance(found, dict):
            pair = (
                (found.get("input", 0.0), found.get("output", 0.0)) if found.keys() <= {"input", "output"} else (-1, -1)
            )
        else:
            pair = (found, found)
        if not all(0 <= share < 1 for share in pair):
            self.fail(
                f'{value!r} is neither a number from 0 to below 1 nor such as {{"input": 0.3, "output": 0.5}}',
                param,
                ctx,
            )
        return pair


class OneOf(click.Choice[str]):
    """One of some names. `others` are names that `vllm bench serve` has: each with the name that it is here, or with
    the reason and the remedy for its refusal."""

    def __init__(self, names: Sequence[str], others: Mapping[str, Alias | str]) -> None:
        super().__init__(names)
        self.others = others

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name as it is here."""
        other = self.others.get(str(value))
        if isinstance(other, Alias):
            return other.name
        if other is not None:
            self.fail(f"{value} is not measured here: {other}", param, ctx)
        found: str = super().convert(value, param, ctx)
        return found


class Alias(NamedTuple):
    """The name that a value of `vllm bench serve` has here."""

    name: str
