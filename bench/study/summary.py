"""Summarises the runs of a study: a table for each experiment, with the mean and the spread of its repetitions.
Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.bench.study import recipes
from headrace.bench.study.directory import Finished
from headrace.bench.study.recipes import EXPERIMENTS, OURS, Experiment, Run

FIGURES: Mapping[str, tuple[str, str]] = {
    recipes.THROUGHPUT: ("output tokens/s", "{:,.1f}"),
    recipes.TTFT: ("median TTFT, ms", "{:,.0f}"),
    recipes.TTFT_P99: ("p99 TTFT, ms", "{:,.0f}"),
    recipes.TPOT: ("median TPOT, ms", "{:,.1f}"),
    recipes.PREEMPTIONS: ("preemptions", "{:,.0f}"),
}
"""Title and format of each figure."""
AXES: Mapping[str, str] = {
    "rate_name": "requests/s",
    "batch": "batch",
    "kv_tokens": "tokens of KV cache",
    "server": "server",
    "model": "model",
}
_MUCH_OTHER_WORK = 0.1
"""Cores that other programs took, from which on a run is marked."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure at a point: its values in the order of the repetitions."""

    values: Sequence[float]

    @property
    def mean(self) -> float:
        """The mean of the repetitions."""
        return statistics.fmean(self.values)

    def told(self, form: str) -> str:
        """The mean, and the least and the most if there are several values."""
        mean = form.format(self.mean)
        if len(self.values) == 1:
            return mean
        return f"{mean} ({form.format(min(self.values))} to {form.format(max(self.values))})"


@dataclass(frozen=True, slots=True)
class Row:
    """A point of a line: `place` is its value on the horizontal axis, as a number if it is one."""

    across: str
    series: str
    place: float | None
    cells: Mapping[str, Cell]
    marks: str
    """`!` if answers were wrong or requests failed, `*` if other programs took CPU time."""


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of an experiment, and `verdicts` on headrace beside the best peer."""

    experiment: Experiment
    rows: Sequence[Row]
    figures: Sequence[str]
    verdicts: Sequence[str]


def tables(finished: Sequence[Finished]) -> list[Table]:
    """The tables of the experiments that have runs."""
    found = []
    for experiment in EXPERIMENTS:
        own = [each for each in finished if each.run.experiment == experiment.name]
        if own:
            rows = _rows(experiment, own)
            figures = [name for name in experiment.figures if any(name in row.cells for row in rows)]
            found.append(Table(experiment, rows, figures, _verdicts(experiment, own)))
    return found


def _rows(experiment: Experiment, finished: Sequence[Finished]) -> list[Row]:
    points: dict[tuple[str, str], list[Finished]] = {}
    for each in sorted(finished, key=lambda each: _order(experiment, each)):
        points.setdefault((_field(each.run, experiment.across), _field(each.run, experiment.series)), []).append(each)
    rows = []
    for (across, series), group in points.items():
        cells = {}
        for name in experiment.figures:
            values = [value for value in (each.figure(name) for each in group) if value is not None]
            if values:
                cells[name] = Cell(values)
        marks = "!" if any(each.is_wrong for each in group) else ""
        if any(each.machine.get("cores_of_others", 0) > _MUCH_OTHER_WORK for each in group):
            marks += "*"
        rows.append(Row(across, series, _place(group[0], experiment.across), cells, marks))
    return rows


def _field(run: Run, name: str) -> str:
    value = getattr(run, name)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _place(finished: Finished, across: str) -> float | None:
    """The position of a run on the horizontal axis. A run with all requests at once is at the rate that was served."""
    run = finished.run
    if across == "rate_name":
        return run.rate if run.rate_name != "inf" else None
    value = getattr(run, across)
    return float(value) if isinstance(value, int) else None


def _order(experiment: Experiment, finished: Finished) -> tuple[object, ...]:
    """Sort key: the horizontal axis, then the line, then the repetition. headrace comes before its peers."""
    run = finished.run

    def rank(name: str) -> tuple[float, str]:
        if name == "server":
            order = (OURS, *recipes.PEERS)
            return (float(order.index(run.server)) if run.server in order else float(len(order)), run.server)
        if name == "rate_name":
            return (run.rate, "")
        value = getattr(run, name)
        return (float(value), "") if isinstance(value, int) else (0.0, str(value))

    return (*rank(experiment.across), *rank(experiment.series), run.repetition)


def _verdicts(experiment: Experiment, finished: Sequence[Finished]) -> list[str]:
    """At each point, headrace beside the peer with most tokens per second and the one with the least p99 TTFT. Ratios
    are of the runs of one repetition, which stood next to each other."""
    if experiment.series != "server":
        return []
    found = []
    points: dict[str, dict[str, dict[int, Finished]]] = {}
    for each in sorted(finished, key=lambda each: _order(experiment, each)):
        at = points.setdefault(_field(each.run, experiment.across), {})
        at.setdefault(each.run.server, {})[each.run.repetition] = each
    for across, servers in points.items():
        peers = [name for name in servers if name != OURS]
        if OURS not in servers or not peers:
            continue
        words = []
        for figure, best_of, what in (
            (recipes.THROUGHPUT, max, "the throughput"),
            (recipes.TTFT_P99, min, "the p99 TTFT"),
        ):
            best = best_of(peers, key=lambda name: _mean(servers[name].values(), figure))
            ratios = [
                ours / theirs
                for number, each in servers[OURS].items()
                if number in servers[best]
                and (ours := each.figure(figure)) is not None
                and (theirs := servers[best][number].figure(figure))
            ]
            if ratios:
                words.append(f"{Cell(ratios).told('{:.2f}')} times {what} of {best}")
        if words:
            found.append(f"{AXES[experiment.across]} {across}: headrace has {' and '.join(words)}")
    return found


def _mean(finished: Iterable[Finished], figure: str) -> float:
    values = [value for value in (each.figure(figure) for each in finished) if value is not None]
    return statistics.fmean(values) if values else 0.0


def heads(table: Table) -> list[str]:
    """Titles of the columns."""
    return [AXES[table.experiment.across], AXES[table.experiment.series], *(FIGURES[name][0] for name in table.figures)]


def lines_of(table: Table) -> list[list[str]]:
    """The cells of each row as text."""
    return [
        [row.across, row.series + row.marks]
        + [row.cells[name].told(FIGURES[name][1]) if name in row.cells else "" for name in table.figures]
        for row in table.rows
    ]


def head_of(found: Sequence[Table], finished: Sequence[Finished]) -> list[str]:
    """The introduction for a reader: the servers with their flags, and the meaning of brackets and marks."""
    marks = "".join(row.marks for table in found for row in table.rows)
    words = []
    most = max((each.run.repetition for each in finished), default=1)
    if most > 1:
        words.append(f"Figures are means of up to {most} repetitions, with the least and the most.")
    if "!" in marks:
        words.append("!: some answers were wrong, or requests failed; see the run's JSON.")
    if "*" in marks:
        words.append("*: other programs took more than a tenth of a core during a run.")
    last = {each.run.server: each.server for each in finished}
    return words + [
        f"{server} {last[server]['version']}: {last[server]['command']}"
        for server in (OURS, *recipes.PEERS)
        if server in last
    ]


def as_text(found: Sequence[Table], head: Sequence[str], left_out: Sequence[str]) -> str:
    """The tables for a terminal."""
    lines = list(head)
    for table in found:
        title = f"{table.experiment.name}. {table.experiment.title}"
        lines += ["", title, "=" * len(title)]
        rows = [heads(table), *lines_of(table)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for number, row in enumerate(rows):
            lines.append("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
            if not number:
                lines.append("  ".join("-" * width for width in widths))
        lines += table.verdicts
    lines += ["", *(f"Left out: {words}" for words in left_out)] if left_out else []
    return "\n".join(lines) + "\n"


def as_markdown(found: Sequence[Table], title: str, head: Sequence[str], left_out: Sequence[str]) -> str:
    """The tables for a document."""
    lines = [f"# {title}", "", *(f"- {words}" for words in head)]
    for table in found:
        lines += ["", f"## {table.experiment.name}. {table.experiment.title}", "", table.experiment.explanation, ""]
        titles = heads(table)
        lines += [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
        lines += [f"| {' | '.join(row)} |" for row in lines_of(table)]
        lines += ["", *(f"- {words}" for words in table.verdicts)] if table.verdicts else []
    lines += ["", *(f"Left out: {words}" for words in left_out)] if left_out else []
    return "\n".join(lines) + "\n"
