"""Charts as SVG, made for pages that load nothing. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

COLOURS = ("#2a78d6", "#e07b00", "#1a9850", "#8e44ad", "#7f6a00", "#d6418f", "#00868b", "#5b6770")
FAILED = "#c0392b"
"""No run has this colour."""
_WIDTH, _HEIGHT = 560, 320
_BINS = 40
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 44


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one run. `labels` are shown when the pointer is over a point."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()
    has_line: bool = True
    has_marks: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: its title, and whether it is logarithmic. With `names`, it has ticks only at their values."""

    title: str
    is_log: bool = False
    least: float | None = None
    most: float | None = None
    names: Mapping[float, str] | None = None


class Segment(NamedTuple):
    """A part of a bar, in the units of its axis."""

    begin: float
    end: float
    colour: str
    opacity: float = 1.0


class Row(NamedTuple):
    """A bar. `label` is shown when the pointer is over it."""

    segments: Sequence[Segment]
    label: str = ""


class _Scale:
    """Places values on a line from `low` to `high`, in pixels."""

    def __init__(self, axis: Axis, values: Sequence[float], low: float, high: float) -> None:
        self._low, self._high = low, high
        self._is_log = axis.is_log
        self._names = axis.names
        good = [v for v in values if v > 0] if axis.is_log else list(values)
        least = axis.least if axis.least is not None else min(good, default=1.0)
        most = axis.most if axis.most is not None else max(good, default=1.0)
        if axis.is_log:
            self._from, self._to = math.log10(max(least, 1e-6)), math.log10(max(most, 1e-6))
            if self._to - self._from < 0.1:
                self._from, self._to = self._from - 0.1, self._to + 0.1
        else:
            self._from = min(0.0, least) if axis.least is None else least
            self._to = most * 1.05 if axis.most is None else most
            if self._to <= self._from:
                self._to = self._from + 1.0

    def at(self, value: float) -> float:
        """The pixel of a value."""
        place = math.log10(max(value, 1e-6)) if self._is_log else value
        share = (place - self._from) / (self._to - self._from)
        return self._low + min(max(share, 0.0), 1.0) * (self._high - self._low)

    def name(self, value: float) -> str:
        """The label of a tick."""
        return f"{value:g}" if self._names is None else html.escape(self._names[value])

    def ticks(self) -> list[float]:
        """Round values within the scale, or those that have names."""
        if self._names is not None:
            return list(self._names)
        if self._is_log:
            width = self._to - self._from
            steps = tuple(range(1, 10)) if width < 0.8 else ((1, 2, 5) if width < 3 else (1,))
            decades = range(math.floor(self._from), math.ceil(self._to) + 1)
            found = [step * 10.0**decade for decade in decades for step in steps]
            return [value for value in found if self._from - 1e-9 <= math.log10(value) <= self._to + 1e-9]
        rough = (self._to - self._from) / 5
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * many for many in (1, 2, 5, 10) if unit * many >= rough)
        first = math.ceil(self._from / step)
        return [number * step for number in range(first, math.floor(self._to / step + 1e-9) + 1)]


def line_chart(series: Sequence[Series], x_axis: Axis, y_axis: Axis) -> str:
    """Lines or points of several runs over each other."""
    xs = [x for each in series for x, _ in each.points]
    ys = [y for each in series for _, y in each.points]
    x_scale = _Scale(x_axis, xs, _LEFT, _WIDTH - _RIGHT)
    y_scale = _Scale(y_axis, ys, _HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(x_scale, y_scale, x_axis, y_axis)]
    for each in series:
        places = [(x_scale.at(x), y_scale.at(y)) for x, y in each.points]
        if each.has_line and len(places) > 1:
            joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline points="{joined}" fill="none" stroke="{each.colour}" stroke-width="1.8"/>')
        if each.has_marks:
            labels = each.labels or [each.name] * len(places)
            for (x, y), label in zip(places, labels, strict=True):
                mark = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{each.colour}">'
                parts.append(f"{mark}<title>{html.escape(label)}</title></circle>")
    return _svg(parts, _HEIGHT)


def span_chart(rows: Sequence[Row], x_axis: Axis, height: int = _HEIGHT) -> str:
    """Requests as bars, one above the other."""
    ends = [segment.end for row in rows for segment in row.segments]
    x_scale = _Scale(x_axis, ends, _LEFT, _WIDTH - _RIGHT)
    y_axis = Axis("request", least=0, most=max(len(rows), 1))
    y_scale = _Scale(y_axis, [], height - _BOTTOM, _TOP)
    parts = [_frame(x_scale, y_scale, x_axis, y_axis, height)]
    thick = max(0.6, (height - _BOTTOM - _TOP) / max(len(rows), 1) * 0.8)
    for number, row in enumerate(rows):
        y = y_scale.at(number + 0.5)
        bars = [
            _bar(x_scale.at(segment.begin), x_scale.at(segment.end), y, thick, segment.colour, segment.opacity)
            for segment in row.segments
        ]
        title = f"<title>{html.escape(row.label)}</title>" if row.label else ""
        parts.append(f"<g>{title}{''.join(bars)}</g>" if title else "".join(bars))
    return _svg(parts, height)


def histogram(values: Sequence[float], colour: str, x_axis: Axis, y_axis: Axis) -> str:
    """How many values are in each of equal intervals."""
    x_scale = _Scale(x_axis, values, _LEFT, _WIDTH - _RIGHT)
    counts = [0] * _BINS
    least, most = min(0.0, *values), max(values) or 1.0
    width = (most - least) / _BINS
    for value in values:
        counts[min(int((value - least) / width), _BINS - 1)] += 1
    y_scale = _Scale(y_axis, counts, _HEIGHT - _BOTTOM, _TOP)
    parts = [_frame(x_scale, y_scale, x_axis, y_axis)]
    for number, count in enumerate(counts):
        if count:
            left, right = x_scale.at(least + number * width), x_scale.at(least + (number + 1) * width)
            top, bottom = y_scale.at(count), y_scale.at(0)
            parts.append(_bar(left, right - 0.5, (top + bottom) / 2, bottom - top, colour, 1.0))
    return _svg(parts, _HEIGHT)


def _bar(left: float, right: float, y: float, thick: float, colour: str, opacity: float) -> str:
    width = max(right - left, 0.3)
    place = f'x="{left:.1f}" y="{y - thick / 2:.1f}" width="{width:.1f}" height="{thick:.2f}"'
    return f'<rect {place} fill="{colour}" fill-opacity="{opacity}"/>'


def _frame(x_scale: _Scale, y_scale: _Scale, x_axis: Axis, y_axis: Axis, height: int = _HEIGHT) -> str:
    bottom = height - _BOTTOM
    parts = []
    for value in x_scale.ticks():
        x = x_scale.at(value)
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" class="grid"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{x_scale.name(value)}</text>')
    for value in y_scale.ticks():
        y = y_scale.at(value)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{y_scale.name(value)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{height - 8}" text-anchor="middle">{html.escape(x_axis.title)}</text>')
    turn = f"rotate(-90 14 {(_TOP + bottom) / 2})"
    y_title = html.escape(y_axis.title)
    parts.append(f'<text x="14" y="{(_TOP + bottom) / 2}" text-anchor="middle" transform="{turn}">{y_title}</text>')
    return "".join(parts)


def _svg(parts: Sequence[str], height: int) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(parts)}</svg>'
