"""Reports results: prints them, saves them, and writes the HTML report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from headrace.bench import results as writing
from headrace.bench import saved
from headrace.bench.plots import dataset_page, timeline_page
from headrace.bench.report import page
from headrace.bench.results import Result

_BAR = "!" * 78
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Outputs:
    """What is written in addition to the text. `filename` None: one made of the setup; `page` None: no report."""

    is_saved: bool
    is_detailed: bool
    appends: bool
    directory: Path | None
    filename: str | None
    page: Path | None
    name: str
    """Of the run, in reports."""
    timeline_ms: tuple[float, float] | None
    """Gaps at which the timeline changes its colour; None: no timeline."""
    has_lengths: bool
    """Whether there is a page on the lengths of prompts and answers."""

    def tell(self, results: Sequence[Result], summary: str = "") -> int:
        """Print and save results; the exit status, 130 if the last one is partial. With a summary, it is printed in
        place of each result."""
        status = 0
        for result in results:
            warnings = writing.warnings(result)
            if summary and warnings:
                warnings.insert(0, f"at {result.setup.arrivals.rate:.2f} requests per second:")
            _shout(warnings)
            if not summary:
                click.echo(writing.text_block(result))
                _shout(warnings)
            if result.run.is_partial:
                status = _INTERRUPTED
            elif result.checked.is_wrong or not result.totals.completed:
                status = status or 1
            path = self._path(result)
            if self.is_saved:
                self._save(result, path, is_one=len(results) == 1)
            if self.timeline_ms is not None:
                _write(path.with_suffix(".timeline.html"), timeline_page(result.run.records, self.timeline_ms))
            if self.has_lengths:
                _write(path.with_suffix(".dataset_stats.html"), dataset_page(result.run.records))
        if summary:
            click.echo(summary)
        if self.page is not None:
            self._report(results, self.page)
        return status

    def _path(self, result: Result) -> Path:
        """The file of a result. Plots are beside it."""
        path = Path(self.filename or writing.file_name(result.setup))
        return path if self.directory is None else self.directory / path

    def _save(self, result: Result, path: Path, *, is_one: bool) -> None:
        """Write a result to its file; those of a sweep become lines of one file if the file has a given name."""
        appends = self.appends or (not is_one and self.filename is not None)
        told: Mapping[str, Any] = writing.as_json(result, is_detailed=self.is_detailed)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if appends else "w", encoding="utf-8") as file:
            if appends and file.tell():
                file.write("\n")
            json.dump(told, file)
        click.echo(f"saved {path}", err=True)

    def _report(self, results: Sequence[Result], path: Path) -> None:
        detailed = [writing.as_json(result, is_detailed=True) for result in results]
        names = [f"{self.name} {one['request_rate']:.2f}/s" if len(detailed) > 1 else self.name for one in detailed]
        runs = [saved.of(name, one) for name, one in zip(names, detailed, strict=True)]
        _write(path, page(runs, f"Benchmark of {results[0].setup.model}"))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    click.echo(f"wrote {path}", err=True)


def _shout(warnings: Sequence[str]) -> None:
    """Print warnings in a form that is hard to overlook."""
    if warnings:
        for line in (_BAR, *(f"!!! {warning}" for warning in warnings), _BAR):
            click.secho(line, fg="red", bold=True, err=True)
