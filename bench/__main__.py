"""`python -m headrace.bench`: measures servers. Each command has a module of its own.

If the flags are wrong, a command prints one sentence on standard error and exits with status 2; if the server cannot be
measured, or answers wrongly, with status 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from headrace.bench import saved
from headrace.bench.calibrate import calibrate
from headrace.bench.options.parsing import Group
from headrace.bench.report import page, text_table
from headrace.bench.serve import serve
from headrace.bench.study.command import study
from headrace.common.commands import CommandError, run
from headrace.common.flags import OutputPath


@click.group(cls=Group, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure a server of language models: `headrace bench URL`.

    `headrace bench URL` is short for `headrace bench serve URL`; `headrace bench serve --help` lists its options.

    \b
    Examples:
      # measure a server
      headrace bench http://127.0.0.1:8000 --num-prompts 50 --request-rate 2 --html report.html
      # compare saved results of two servers
      headrace bench report ours.json theirs.json
      # start and compare servers on this host
      headrace bench study --quick
      # measure this host, and plan a fleet of such hosts
      headrace bench calibrate && headrace plan --users 50 --every 25s
    """


main.add_command(serve)
main.add_command(study)
main.add_command(calibrate)


@main.command(short_help="Compare saved results, and write an HTML report.", context_settings={"show_default": True})
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--output", "-o", type=OutputPath(), default="report.html", help="File to write.")
@click.option("--title", default="Benchmark", help="Title of the report.")
def report(files: tuple[Path, ...], output: Path, title: str) -> None:
    """Print the results in FILES side by side, and write one HTML report with their charts overlaid.

    FILES are results that `headrace bench --save-result` or `vllm bench serve` has saved. Results of --save-detailed
    have more charts. The report needs no other file and no network.

    \b
    For example, to compare two servers:
      headrace bench http://127.0.0.1:8000 --num-prompts 50 --save-detailed --label ours --result-filename ours.json
      headrace bench http://127.0.0.1:8001 --num-prompts 50 --save-detailed --label theirs --result-filename theirs.json
      headrace bench report ours.json theirs.json --output report.html
    """
    try:
        runs = [run for file in files for run in saved.read(file)]
    except ValueError as error:
        raise CommandError(str(error)) from None
    click.echo(text_table(runs))
    for one in runs:
        for each in one.findings:
            wrong = f"!!! {one.name}: WRONG ANSWERS: {each['count']} of {each['of']} {each['sentence']}."
            click.secho(wrong, fg="red", bold=True, err=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page(runs, title), encoding="utf-8")
    click.echo(f"wrote {output}", err=True)


if __name__ == "__main__":
    sys.exit(run(main, "headrace bench"))
