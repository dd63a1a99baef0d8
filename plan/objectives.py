"""Objectives of latency, and whether a simulated fleet meets them. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

_LIMIT = re.compile(r"(?:p(?P<percentile>\d+(?:\.\d+)?):)?(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|s)?")
_USUAL_PERCENTILE = 95.0


@dataclass(frozen=True, slots=True)
class Limit:
    """The maximum of a percentile of a time, in seconds."""

    percentile: float
    seconds: float

    def __str__(self) -> str:
        return f"p{self.percentile:g} within {time_text(self.seconds)}"

    @classmethod
    def of(cls, text: str) -> Limit:
        """The limit in a text such as p95:2s, p99:150ms or 2s. Raises ValueError with the remedy."""
        match = _LIMIT.fullmatch(text.strip().lower())
        if match is None:
            raise ValueError(f"{text[:40]!r} is not a limit of a time; write one such as p95:2s, p99:150ms or 2s")
        if match["unit"] is None:
            raise ValueError(f"{text[:40]!r} has no unit; write {text[:40]}ms or {text[:40]}s")
        percentile = float(match["percentile"] or _USUAL_PERCENTILE)
        seconds = float(match["number"]) / (1000 if match["unit"] == "ms" else 1)
        if not 0 < percentile <= 100:
            raise ValueError(f"{text[:40]!r}: a percentile is above 0 and at most 100, such as p95")
        if not 0 < seconds < math.inf:
            raise ValueError(f"{text[:40]!r}: the limit must be above 0")
        return cls(percentile, seconds)


@dataclass(frozen=True, slots=True)
class Objectives:
    """The limits of the time to the first token and of the time of each later token; None for none."""

    ttft: Limit | None
    tpot: Limit | None

    def __str__(self) -> str:
        told = [
            f"{name}: {limit}"
            for name, limit in (("time to the first token", self.ttft), ("time a token", self.tpot))
            if limit is not None
        ]
        return "; ".join(told)


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of some values by the nearest-rank method; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def time_text(seconds: float) -> str:
    """A time for people: milliseconds below two seconds."""
    return f"{1000 * seconds:,.0f} ms" if seconds < 2 else f"{seconds:,.1f} s"
