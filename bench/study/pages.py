"""The page of a study: tables and charts in one HTML file, and each chart as a picture of its own. Pure."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from headrace.bench.charts import COLOURS, Axis, Series, line_chart
from headrace.bench.report import STYLE
from headrace.bench.study.recipes import TTFT, TTFT_P99
from headrace.bench.study.summary import AXES, FIGURES, Table, heads, lines_of

_LOG = frozenset({TTFT, TTFT_P99})
_KEY_LEFT, _KEY_TOP = 72, 28
_PICTURE_STYLE = "text { font: 11px sans-serif; fill: #555; } .grid { stroke: #e4e4e4; stroke-width: 1; }"


def page(tables: Sequence[Table], title: str, head: Sequence[str], left_out: Sequence[str]) -> str:
    """The page."""
    parts = [f"<h1>{html.escape(title)}</h1>", *(f"<p>{html.escape(words)}</p>" for words in head)]
    if left_out:
        parts.append(f"<p>Left out: {html.escape('; '.join(left_out))}</p>")
    for table in tables:
        experiment = table.experiment
        parts.append(f"<h2>{html.escape(f'{experiment.name}. {experiment.title}')}</h2>")
        parts.append(f"<p>{html.escape(experiment.explanation)}</p>{_key(table)}")
        charts = (
            f"<figure><figcaption>{html.escape(name)}</figcaption>{chart}</figure>" for name, chart in _charts(table)
        )
        parts.append(f'<div class="charts">{"".join(charts)}</div>{_table(table)}')
        if table.verdicts:
            parts.append(f"<ul>{''.join(f'<li>{html.escape(words)}</li>' for words in table.verdicts)}</ul>")
    meta = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{meta}</head><body>{"".join(parts)}</body></html>\n'


def pictures(tables: Sequence[Table]) -> Iterator[tuple[str, str]]:
    """Name and SVG of each chart, for documents."""
    for table in tables:
        keys = "".join(
            f'<text x="{_KEY_LEFT}" y="{_KEY_TOP + 15 * number}" style="fill:{colour}">{html.escape(line)}</text>'
            for number, (line, colour) in enumerate(_colours(table).items())
        )
        for (_, chart), figure in zip(_charts(table), table.figures, strict=True):
            begin, mark, rest = chart.partition(">")
            opened = begin.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
            ground = '<rect width="100%" height="100%" fill="#fff"/>'
            inner = f"<style>{_PICTURE_STYLE}</style>{ground}{rest.removesuffix('</svg>')}{keys}</svg>\n"
            yield f"{table.experiment.name}-{figure}", f"{opened}{mark}{inner}"


def _colours(table: Table) -> dict[str, str]:
    names = list(dict.fromkeys(row.series for row in table.rows))
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}


def _key(table: Table) -> str:
    title = AXES[table.experiment.series]
    keys = (
        f'<span class="key" style="background:{colour}"></span>{html.escape(f"{title} {name}")}'
        for name, colour in _colours(table).items()
    )
    return f"<p>{' &nbsp; '.join(keys)}</p>"


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    return f"<table>{row(heads(table), 'th')}{''.join(row(cells, 'td') for cells in lines_of(table))}</table>"


def _charts(table: Table) -> Iterator[tuple[str, str]]:
    """Title and picture of each figure. Points without a place on the axis, such as all at once, stand in its order."""
    places = _places(table)
    for name in table.figures:
        series = []
        for line, colour in _colours(table).items():
            rows = [row for row in table.rows if row.series == line and name in row.cells]
            points = [(places[row.across], row.cells[name].mean) for row in rows]
            labels = [f"{line}, {row.across}: {row.cells[name].told(FIGURES[name][1])}" for row in rows]
            series.append(Series(line, colour, points, labels, has_line=len(points) > 1, has_marks=True))
            spread = [(places[row.across], value) for row in rows for value in row.cells[name].values]
            if len(spread) > len(points):
                for across in dict.fromkeys(place for place, _ in spread):
                    values = [value for place, value in spread if place == across]
                    series.append(Series(line, colour, [(across, min(values)), (across, max(values))]))
        names = {place: across for across, place in places.items()}
        x_axis = Axis(AXES[table.experiment.across], least=0.5, most=len(places) + 0.5, names=names)
        yield FIGURES[name][0], line_chart(series, x_axis, Axis(FIGURES[name][0], is_log=name in _LOG))


def _places(table: Table) -> dict[str, float]:
    """Each value of the horizontal axis in its order, evenly spaced."""
    return {across: float(number) for number, across in enumerate(dict.fromkeys(row.across for row in table.rows), 1)}
