"""The plan as one HTML page: no script, no other file, no network. Pure."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

from headrace.bench.charts import COLOURS, Axis, Series, line_chart
from headrace.bench.report import STYLE
from headrace.plan.answer import Answer, comparison, text
from headrace.plan.objectives import Limit
from headrace.plan.search import Figures, Trial


def page(answers: Sequence[Answer], title: str) -> str:
    """The page: each answer as text, and charts of all."""
    coloured = [(answer, COLOURS[number % len(COLOURS)]) for number, answer in enumerate(answers) if answer.curve]
    parts = [f"<h1>{html.escape(title)}</h1>"]
    if len(answers) > 1:
        parts.append(f"<pre>{html.escape(comparison(answers))}</pre>")
    objectives = answers[0].objectives
    charts = [
        _chart(coloured, "Time to the first token", "ms", lambda trial: _ms(trial.ttft), objectives.ttft),
        _chart(coloured, "Time a token", "ms", lambda trial: _ms(trial.tpot), objectives.tpot),
        _chart(coloured, "Workers compute", "% of the time", lambda trial: 100 * trial.busy, None),
        _chart(coloured, "KV cache that requests hold", "% at most", lambda trial: 100 * trial.kv_used, None),
    ]
    parts.append(f'<div class="charts">{"".join(charts)}</div>')
    parts += [
        f"<h2>{html.escape(answer.fleet.kind.name)}</h2><pre>{html.escape(text(answer))}</pre>" for answer in answers
    ]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _ms(figures: Figures) -> float:
    return 1000 * (figures.of_limit or figures.p95)


def _chart(
    coloured: Sequence[tuple[Answer, str]], title: str, unit: str, value: Callable[[Trial], float], limit: Limit | None
) -> str:
    """A line for each answer over the load, and one for the limit."""
    series = []
    for answer, colour in coloured:
        name = answer.fleet.kind.name
        points = [(trial.factor, value(trial)) for trial in answer.curve]
        labels = [f"{name}, {load:.2f} times the load: {height:,.0f} {unit}" for load, height in points]
        series.append(Series(name, colour, points, labels, has_line=True, has_marks=True))
    if not series:
        return ""
    if limit is not None:
        most = max(load for each in series for load, _ in each.points)
        series.append(Series("limit", "#c0392b", [(0.0, 1000 * limit.seconds), (most, 1000 * limit.seconds)]))
        title = f"{title}, p{limit.percentile:g}; the limit is the line without marks"
    chart = line_chart(series, Axis("times the planned load"), Axis(unit))
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{chart}</figure>"
