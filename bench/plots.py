"""Pages on one run: when each request waited and streamed, and how long prompts and answers were. Pure."""

from __future__ import annotations

import html
from collections.abc import Sequence

from headrace.bench.charts import COLOURS, FAILED, Axis, Row, Segment, histogram, span_chart
from headrace.bench.record import Record
from headrace.bench.report import STYLE

_WAITING = COLOURS[0]
_QUICK, _SLOW, _SLOWEST = "#109618", "#ff7f0e", "#d62728"
_ROW_HEIGHT = 9
_LEAST_HEIGHT = 320


def timeline_page(records: Sequence[Record], thresholds_ms: tuple[float, float]) -> str:
    """Each request as a bar: the wait for its first token, and gaps between pieces in three colours, by whether they
    are below the first threshold, between both, or above."""
    first_s = min((record.sent_s for record in records), default=0.0)
    rows = [
        _row(record, first_s, thresholds_ms)
        for record in sorted(records, key=lambda record: record.sent_s, reverse=True)
    ]
    low, high = thresholds_ms
    keys = (
        *((_WAITING, "until the first token"), (_QUICK, f"gaps below {low:g} ms"), (_SLOW, f"{low:g} to {high:g} ms")),
        *((_SLOWEST, f"from {high:g} ms on"), (FAILED, "failed")),
    )
    legend = " ".join(f'<span class="key" style="background:{colour}"></span>{words}' for colour, words in keys)
    chart = span_chart(rows, Axis("seconds"), max(_LEAST_HEIGHT, _ROW_HEIGHT * len(rows)))
    return _page("Timeline of requests", f"<p>{legend}</p>{chart}")


def _row(record: Record, first_s: float, thresholds_ms: tuple[float, float]) -> Row:
    began_s = record.sent_s - first_s
    lengths = f"request {record.number}: {record.input_tokens} tokens in, {record.output_tokens} out"
    if not record.succeeded or not record.times:
        return Row(
            [Segment(began_s, max(record.ended_s - first_s, began_s), FAILED)], f"{lengths}, {record.error_kind}"
        )
    segments = [Segment(began_s, record.times[0] - first_s, _WAITING)]
    at_s = record.times[0] - first_s
    for gap_s in record.gaps_s:
        colour = _colour(gap_s * 1000, thresholds_ms)
        last = segments[-1]
        if last.colour == colour:
            segments[-1] = last._replace(end=at_s + gap_s)
        else:
            segments.append(Segment(at_s, at_s + gap_s, colour))
        at_s += gap_s
    return Row(segments, f"{lengths}, TTFT {1000 * record.ttft_s:.0f} ms, {record.latency_s:.2f} s in all")


def _colour(gap_ms: float, thresholds_ms: tuple[float, float]) -> str:
    low, high = thresholds_ms
    return _QUICK if gap_ms < low else _SLOW if gap_ms < high else _SLOWEST


def dataset_page(records: Sequence[Record]) -> str:
    """The lengths of prompts, of answers, and of both together, of successful requests."""
    good = [record for record in records if record.succeeded]
    figures = []
    for number, (title, lengths) in enumerate(
        (
            ("Tokens of prompts", [record.input_tokens for record in good]),
            ("Tokens of answers", [record.output_tokens for record in good]),
            ("Tokens of both", [record.input_tokens + record.output_tokens for record in good]),
        )
    ):
        if lengths:
            mean = sum(lengths) / len(lengths)
            words = f"{title}: mean {mean:,.1f}, {min(lengths):,} to {max(lengths):,}"
            chart = histogram(lengths, COLOURS[number], Axis("tokens"), Axis("requests"))
            figures.append(f"<figure><figcaption>{words}</figcaption>{chart}</figure>")
    return _page("Lengths of prompts and answers", f'<div class="charts">{"".join(figures)}</div>')


def _page(title: str, body: str) -> str:
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body><h1>{html.escape(title)}</h1>{body}</body></html>\n'
    )
