"""`headrace bench calibrate`: measures what steps of a model cost, for `headrace plan`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from headrace.bench import calibration
from headrace.bench.process_tree import busy_host
from headrace.bench.target import key_header
from headrace.common.commands import CommandError, CommandFailed
from headrace.common.flags import FiniteRange, OutputPath, why_not_writable
from headrace.common.worker_flags import WORKER_FLAGS

_LARGE_ERROR = 0.12
_SERVE_FLAGS = frozenset(flag.serve_flag or flag.flag for flag in WORKER_FLAGS)


class _Command(click.Command):
    """A command that says where flags of `headrace serve` belong."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises UsageError, as click does."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in _SERVE_FLAGS:
                raise
            raise click.UsageError(
                f"{error.option_name} is a flag of headrace serve; write it after --, as in `headrace bench calibrate "
                f"MODEL -- {error.option_name} ...`",
                ctx,
            ) from None


@click.command(
    cls=_Command,
    short_help="Measure this host and a model, for `headrace plan`.",
    context_settings={"show_default": True},
)
@click.argument("model", required=False)
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
@click.option("--url", help="URL of a running fleet's gateway: take the step costs that its workers have learned.")
@click.option(
    "--workers", type=click.IntRange(1, 256), help="Number of workers of this host.  [default: one for each NUMA node]"
)
@click.option("--threads", type=click.IntRange(1), help="Threads of each worker.  [default: its physical cores]")
@click.option(
    "--seconds",
    type=FiniteRange(5),
    default=270.0,
    help="Seconds to measure, once the server is ready. A slow host takes longer.",
)
@click.option(
    "--output",
    "-o",
    type=OutputPath(),
    help="File to write.  [default: a file in the cache, where `headrace plan MODEL` finds it]",
)
@click.option(
    "--ca-file", type=click.Path(path_type=Path), help="With --url: file with the certificate authority of the server."
)
@click.option("--schema", is_flag=True, help="Print the JSON Schema of the file, and exit.")
def calibrate(
    model: str | None,
    serve_flags: tuple[str, ...],
    url: str | None,
    workers: int | None,
    threads: int | None,
    seconds: float,
    output: Path | None,
    ca_file: Path | None,
    schema: bool,
) -> None:
    """Measure what the steps of MODEL cost on this host, for `headrace plan`.

    MODEL is as for `headrace serve`; without it, the demo model is measured. The command starts a server, puts many
    kinds of load on it for five minutes, and stops it, so nothing else should run on the host. Put the flags of
    `headrace serve` with which you will serve after `--`. With --url, it asks a running fleet instead; if
    OPENAI_API_KEY is set, it is sent as a bearer token.

    The result is a JSON file. You can keep and share files of several hosts: `headrace plan` compares them.

    \b
    Examples:
      headrace bench calibrate
      headrace bench calibrate MODEL --workers 2 --output large.json -- --kv-cache-gb 8
    """
    if schema:
        click.echo(calibration.schema().decode(), nl=False)
        return
    import uvloop

    from headrace.bench.calibrating import CalibrateError, learned, measured

    words = serve_flags if model is None else (model, *serve_flags)
    if words and words[0].startswith("-"):  # flags without a model
        model, serve_flags = None, words
    if url is not None and (workers or threads or serve_flags):
        raise CommandError("--url measures nothing here: leave out --workers, --threads and flags of `headrace serve`")
    kept = calibration.usual_path("").parent
    if output is None and (problem := why_not_writable(kept)):
        raise CommandError(f"cannot write to {kept}: {problem}; name a file with --output")
    given = {"--workers": workers, "--threads": threads}
    flags = [part for flag, value in given.items() if value is not None for part in (flag, str(value))]
    began_s = time.monotonic()

    def tell(line: str) -> None:
        click.echo(f"{time.monotonic() - began_s:4.0f} s  {line}", err=True)

    try:
        if url is not None:
            found = uvloop.run(learned(url, key_header(), ca_file, model))
        else:
            if busy := busy_host():
                tell(f"{busy}: stop other programs, or steps will seem to cost more than they do")
            found = uvloop.run(measured(model, [*flags, *serve_flags], seconds, tell))
    except KeyboardInterrupt:
        tell("stopped; no file was written")
        raise
    except CalibrateError as error:
        raise CommandFailed(str(error)) from None
    except ValueError as error:
        raise CommandError(str(error)) from None
    path = output or calibration.usual_path(found.model.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(calibration.encoded(found))
    click.echo(calibration.described(found))
    steps = found.steps
    if found.source == "measured" and max(steps.decode.median_error, steps.prompts.median_error) > _LARGE_ERROR:
        click.echo("the error is large: was something else running? Stop it, and calibrate again", err=True)
    click.echo(f"wrote {path}")
