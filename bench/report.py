"""One HTML page on one run or several over each other: no script, no other file, no network. Pure."""

from __future__ import annotations

import html
from collections.abc import Sequence

from headrace.bench.charts import COLOURS, FAILED, Axis, Row, Segment, Series, line_chart, span_chart
from headrace.bench.saved import SavedRun

_MAX_TIMELINES = 8
_MAX_SPANS = 400
# A longer name of a run does not fit above a column of figures.
_LONGEST_HEAD = 20
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; padding: 0 1rem; color: #1c1c1c; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.legend { position: sticky; top: 0; margin: 1.2rem 0 .8rem; padding: .3rem 0; background: #fff; }
.legend span.of { margin-right: 1.2rem; white-space: nowrap; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 1.2rem; }
figure { margin: 0; } figcaption { font-weight: 600; margin-bottom: .2rem; }
svg { width: 100%; height: auto; background: #fff; } svg text { font-size: 11px; fill: #555; }
svg .grid { stroke: #e4e4e4; stroke-width: 1; }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
.wrong { background: #fde8e6; border: 3px solid #c0392b; padding: .6rem 1rem; margin: 1rem 0; }
.wrong strong, .bad { color: #a02216; }
"""
"""Of pages with charts."""
_ROWS = (
    ("request rate, req/s", "request_rate", "{}"),
    ("requests", "completed", "{:,.0f}"),
    ("failed", "failed", "{:,.0f}"),
    ("duration, s", "duration", "{:,.1f}"),
    ("requests per second", "request_throughput", "{:,.2f}"),
    ("good requests per second", "request_goodput", "{:,.2f}"),
    ("output tokens per second", "output_throughput", "{:,.1f}"),
    ("all tokens per second", "total_token_throughput", "{:,.1f}"),
    ("most requests in flight", "max_concurrent_requests", "{:,.0f}"),
    ("prompt tokens from the cache", "cached_share", "{:.0%}"),
)
_BAD_WORDS = ' <span class="bad">wrong answers</span>'
_BAD = f"<br>{_BAD_WORDS.strip()}"
_LATENCIES = (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("end to end", "e2el"))


def page(runs: Sequence[SavedRun], title: str) -> str:
    """The page."""
    coloured = [(run, COLOURS[number % len(COLOURS)]) for number, run in enumerate(runs)]
    parts = [f"<h1>{html.escape(title)}</h1>", *(_wrong(run) for run in runs), _table(coloured)]
    charts = [
        _figure("Throughput against latency", _throughput(coloured)),
        _figure("Pareto: speed of each stream against throughput", _pareto(coloured)),
    ]
    for name, metric in _LATENCIES[:3]:
        charts.append(_figure(f"{name}: share of {_UNIT[metric]} within a time", _distribution(coloured, metric)))
    charts.append(_figure("Requests in flight", _seconds(coloured, "in_flight", "requests")))
    charts.append(_figure("Output tokens in each second", _seconds(coloured, "output_tokens", "tokens/s")))
    lined = [(run, colour) for run, colour in coloured if run.requests]
    for run, colour in lined[:_MAX_TIMELINES]:
        charts.append(_figure(f"Timeline of {run.name}: pale until the first token", _timeline(run, colour)))
    parts.append(_legend(coloured))
    parts.append(f'<div class="charts">{"".join(chart for chart in charts if chart)}</div>')
    if len(lined) > _MAX_TIMELINES:
        parts.append(f"<p>Of {len(lined)} runs, the first {_MAX_TIMELINES} have timelines.</p>")
    parts.append(f"<h2>Settings</h2>{_settings(coloured)}")
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


_UNIT = {"ttft": "requests", "tpot": "requests", "itl": "gaps"}


def _wrong(run: SavedRun) -> str:
    """A warning on wrong answers and failed requests; empty if there are none."""
    lines = [
        f"<strong>Wrong answers:</strong> {each['count']} of {each['of']} {html.escape(str(each['sentence']))}."
        for each in run.findings
    ]
    failed = run.number("failed") or 0
    kinds = ", ".join(f"{count} {kind}" for kind, count in run.errors.items())
    if failed:
        lines.append(f"<strong>{failed:.0f} requests failed</strong>{html.escape(f': {kinds}' if kinds else '')}.")
    if not lines:
        return ""
    return f'<div class="wrong"><b>{html.escape(run.name)}</b><br>{"<br>".join(lines)}</div>'


def _legend(coloured: Sequence[tuple[SavedRun, str]]) -> str:
    """The colours of the runs, which stay in sight beside the charts."""
    keys = "".join(
        f'<span class="of"><span class="key" style="background:{colour}"></span>{html.escape(run.name)}'
        f"{_BAD_WORDS * bool(run.findings)}</span> "
        for run, colour in coloured
    )
    return f'<p class="legend">{keys}</p>'


def _table(coloured: Sequence[tuple[SavedRun, str]]) -> str:
    heads = "".join(
        f'<th><span class="key" style="background:{colour}"></span>{html.escape(run.name)}{_BAD * bool(run.findings)}'
        "</th>"
        for run, colour in coloured
    )
    rows = [_row(title, cells) for title, cells in _figures([run for run, _ in coloured])]
    return f"<table><tr><th></th>{heads}</tr>{''.join(rows)}</table>"


def _figures(runs: Sequence[SavedRun]) -> list[tuple[str, list[str]]]:
    """Figures that some run has: the title and a cell for each run."""
    rows = []
    for title, key, form in _ROWS:
        values = [run.numbers.get(key) for run in runs]
        if any(value is not None for value in values):
            rows.append((title, ["" if value is None else form.format(value) for value in values]))
        if key == "failed" and any(run.is_checked for run in runs):
            rows.append(("wrong answers", [f"{run.num_wrong:,}" if run.is_checked else "" for run in runs]))
    for title, metric in _LATENCIES:
        for percent in (50, 95, 99):
            found = [run.quantile_ms(metric, percent) for run in runs]
            if any(value is not None for value in found):
                rows.append((f"{title} p{percent}, ms", ["" if v is None else f"{v:,.1f}" for v in found]))
    return rows


def text_table(runs: Sequence[SavedRun]) -> str:
    """The figures of runs side by side, as lines. Runs with long names are numbered, so that the
    table fits a terminal."""
    names = [run.name for run in runs]
    above: list[str] = []
    if max(map(len, names)) > _LONGEST_HEAD:
        above = [f"{number}: {name}" for number, name in enumerate(names, 1)]
        names = [str(number) for number in range(1, len(names) + 1)]
    rows = [("", names), *_figures(runs)]
    first = max(len(title) for title, _ in rows)
    widths = [max(len(cells[number]) for _, cells in rows) for number in range(len(runs))]
    lines = [
        " | ".join((title.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))))
        for title, cells in rows
    ]
    return "\n".join([*above, *lines])


def _row(title: str, cells: Sequence[str]) -> str:
    joined = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
    return f"<tr><td>{html.escape(title)}</td>{joined}</tr>"


def _settings(coloured: Sequence[tuple[SavedRun, str]]) -> str:
    keys = ("date", "model_id", "backend", "num_prompts", "request_rate", "burstiness", "max_concurrency")
    rows = [_row(key, [str(run.numbers.get(key, "")) for run, _ in coloured]) for key in keys]
    heads = "".join(f"<th>{html.escape(run.name)}</th>" for run, _ in coloured)
    return f"<table><tr><th></th>{heads}</tr>{''.join(rows)}</table>"


def _figure(title: str, chart: str) -> str:
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{chart}</figure>" if chart else ""


def _points(coloured: Sequence[tuple[SavedRun, str]], x: str, metric: str, invert: bool) -> list[Series]:
    """A point for each run, and a line through those of one label, such as the rates of a sweep."""
    families: dict[str, list[tuple[float, float, str, str]]] = {}
    for run, colour in coloured:
        across, up = run.number(x), run.quantile_ms(metric, 50 if invert else 95)
        if across is None or up is None or (invert and up <= 0):
            continue
        label = f"{run.name}: {across:,.1f} tokens/s, " + (
            f"{1000 / up:,.1f} per stream" if invert else f"{up:,.0f} ms"
        )
        family = str(run.numbers.get("label") or run.numbers.get("backend") or run.name)
        families.setdefault(family, []).append((across, 1000 / up if invert else up, label, colour))
    series = []
    for family, points in families.items():
        points.sort()
        xy = [(px, py) for px, py, _, _ in points]
        series.append(Series(family, points[0][3], xy, has_line=len(points) > 1))
        series += [Series(label, colour, [(px, py)], [label], False, True) for px, py, label, colour in points]
    return series


def _throughput(coloured: Sequence[tuple[SavedRun, str]]) -> str:
    series = _points(coloured, "output_throughput", "ttft", invert=False)
    return line_chart(series, Axis("output tokens per second"), Axis("TTFT p95, ms", is_log=True)) if series else ""


def _pareto(coloured: Sequence[tuple[SavedRun, str]]) -> str:
    series = _points(coloured, "output_throughput", "tpot", invert=True)
    return (
        line_chart(series, Axis("output tokens per second"), Axis("tokens/s of a stream (1 / TPOT)")) if series else ""
    )


def _distribution(coloured: Sequence[tuple[SavedRun, str]], metric: str) -> str:
    series = []
    for run, colour in coloured:
        found = run.quantiles_ms.get(metric)
        if found:
            steps = max(len(found) - 1, 1)
            series.append(Series(run.name, colour, [(max(v, 1e-3), 100 * i / steps) for i, v in enumerate(found)]))
    axis = Axis("percent", least=0, most=100)
    return line_chart(series, Axis("milliseconds", is_log=True), axis) if series else ""


def _seconds(coloured: Sequence[tuple[SavedRun, str]], what: str, unit: str) -> str:
    series = []
    for run, colour in coloured:
        values = getattr(run, what)
        if len(values):
            series.append(Series(run.name, colour, [(second + 0.5, value) for second, value in enumerate(values)]))
    return line_chart(series, Axis("seconds"), Axis(unit)) if series else ""


def _timeline(run: SavedRun, colour: str) -> str:
    requests = sorted(run.requests, key=lambda request: request.sent_s)
    step = max(1, -(-len(requests) // _MAX_SPANS))
    rows = [
        Row([Segment(each.sent_s, max(each.ended_s, each.sent_s), FAILED)])
        if each.failed
        else Row([Segment(each.sent_s, each.first_s, colour, 0.3), Segment(each.first_s, each.ended_s, colour)])
        for each in requests[::step]
    ]
    return span_chart(rows, Axis("seconds"))
