"""The flags of figures, files and reports: what is printed and saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from headrace.bench.options.parsing import Section
from headrace.bench.options.values import MetricNames, Objective, Pair, Percentiles, Thresholds
from headrace.bench.telling import Outputs
from headrace.common.commands import CommandError
from headrace.common.flags import OutputPath, why_not_writable

FLAGS = Section(
    "What is told and kept",
    click.option(
        "--percentile-metrics",
        type=MetricNames(),
        default="ttft,tpot,itl",
        help="Metrics to report, separated by commas: ttft (time to the first token), tpot (mean time of each later "
        "token), itl (gaps between the pieces of an answer), e2el (time to the end of the answer), client_queue_time "
        "(wait for --max-concurrency), e2el_including_client_queue.",
    ),
    click.option(
        "--metric-percentiles", type=Percentiles(), default="99", help="Percentiles to report, separated by commas."
    ),
    click.option(
        "--goodput",
        type=Objective(),
        multiple=True,
        help="Objective of each request for ttft, tpot or e2el, such as ttft:2s or tpot:100ms; without a unit, in "
        "milliseconds. May be repeated. Goodput counts the requests that meet all.",
    ),
    click.option("--save-result", is_flag=True, help="Save the result as JSON, in --result-dir."),
    click.option(
        "--save-detailed",
        is_flag=True,
        help="As --save-result, with the figures and texts of each request: reports then have all charts.",
    ),
    click.option(
        "--append-result",
        is_flag=True,
        help="As --save-result, but append a line to the file instead of replacing it.",
    ),
    click.option(
        "--result-dir", type=OutputPath(is_directory=True), help="Directory for results. Default: the current one."
    ),
    click.option(
        "--result-filename",
        help="Save the result under this name. Default: a name made of label, rate, model and date.",
    ),
    click.option("--label", help="Name of the run in reports, and prefix of file names. Default: the backend."),
    click.option("--metadata", type=Pair(), multiple=True, help="NAME=VALUE to save with the result; may be repeated."),
    click.option("--html", type=OutputPath(), help="Write an HTML report with charts to this file."),
    click.option(
        "--plot-timeline", is_flag=True, help="Write a page with a bar for each request beside the result's file."
    ),
    click.option(
        "--timeline-itl-thresholds",
        type=Thresholds(),
        default="25,50",
        help="Two gaps between tokens in ms, separated by a comma, above which bars of --plot-timeline change colour.",
    ),
    click.option(
        "--plot-dataset-stats",
        is_flag=True,
        help="Write a page with the lengths of prompts and answers beside the result's file.",
    ),
    click.option("--disable-tqdm", is_flag=True, help="Show no progress."),
)


def outputs(flags: Mapping[str, Any]) -> Outputs:
    """The outputs of a run: the files to write, and their paths. Raises CommandError if they cannot be written."""
    is_saved = any(flags[name] for name in ("save_result", "save_detailed", "append_result", "result_filename"))
    if is_saved or flags["plot_timeline"] or flags["plot_dataset_stats"]:
        path = (flags["result_dir"] or Path()) / (flags["result_filename"] or "")
        problem = why_not_writable(path)
        if flags["result_filename"] and path.is_dir():
            problem = "it is a directory; give its name to --result-dir"
        if problem:
            raise CommandError(f"cannot write results to {path}: {problem}")
    return Outputs(
        is_saved=is_saved,
        is_detailed=flags["save_detailed"],
        appends=flags["append_result"],
        directory=flags["result_dir"],
        filename=flags["result_filename"],
        page=flags["html"],
        name=flags["label"] or flags["backend"],
        timeline_ms=flags["timeline_itl_thresholds"] if flags["plot_timeline"] else None,
        has_lengths=flags["plot_dataset_stats"],
    )
