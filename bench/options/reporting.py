"""The flags of figures, files and reports: what is printed and saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from headrace.bench.options.parsing import Section
from headrace.bench.options.values import MetricNames, Objective, Pair, Percentiles, Thresholds
from headrace.bench.telling import Outputs

FLAGS = Section(
    "What is told and kept",
    click.option(
        "--percentile-metrics",
        type=MetricNames(),
        default="ttft,tpot,itl",
        help="Metrics to report, separated by commas: ttft, tpot, itl, e2el, client_queue_time, "
        "e2el_including_client_queue.",
    ),
    click.option(
        "--metric-percentiles", type=Percentiles(), default="99", help="Percentiles to report, separated by commas."
    ),
    click.option(
        "--goodput",
        type=Objective(),
        multiple=True,
        help="Objective for ttft, tpot or e2el in ms, such as ttft:500; may be repeated. Goodput counts the requests "
        "that meet all.",
    ),
    click.option("--save-result", is_flag=True, help="Save the result as JSON."),
    click.option("--save-detailed", is_flag=True, help="Save the figures and texts of each request too."),
    click.option(
        "--append-result", is_flag=True, help="Append the result as a line to the file, instead of replacing it."
    ),
    click.option(
        "--result-dir", type=click.Path(path_type=Path), help="Directory for results. Default: the current one."
    ),
    click.option("--result-filename", help="Name of the result's file. Default: made of label, rate, model and date."),
    click.option("--label", help="Name of the run in reports, and prefix of file names. Default: the backend."),
    click.option("--metadata", type=Pair(), multiple=True, help="NAME=VALUE to save with the result; may be repeated."),
    click.option("--html", type=click.Path(path_type=Path), help="Write an HTML report with charts to this file."),
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
    """The outputs of a run: the files to write, and their paths."""
    asks = ("save_result", "save_detailed", "append_result", "result_filename")
    return Outputs(
        is_saved=any(flags[name] for name in asks),
        is_detailed=flags["save_detailed"],
        appends=flags["append_result"],
        directory=flags["result_dir"],
        filename=flags["result_filename"],
        page=flags["html"],
        name=flags["label"] or flags["backend"],
        timeline_ms=flags["timeline_itl_thresholds"] if flags["plot_timeline"] else None,
        has_lengths=flags["plot_dataset_stats"],
    )
