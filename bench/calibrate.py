"""`headrace bench calibrate`: measures what steps of a model cost, for `headrace plan`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from headrace.bench import calibration
from headrace.bench.target import key_header
from headrace.common.commands import CommandError, CommandFailed
from headrace.common.flags import FiniteRange

_LARGE_ERROR = 0.12


@click.command(context_settings={"show_default": True})
@click.argument("model", required=False)
@click.argument("serve_flags", nargs=-1, type=click.UNPROCESSED)
@click.option("--url", help="Take the costs that the workers of a running fleet have learned; the URL of its gateway.")
@click.option("--workers", type=click.IntRange(1, 256), help="Workers of this host.  [default: one for each NUMA node]")
@click.option("--threads", type=click.IntRange(1), help="Threads of each worker.  [default: its physical cores]")
@click.option("--seconds", type=FiniteRange(5), default=270.0, help="How long to measure, once the server is ready.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write.  [default: the model's in the cache, which `headrace plan MODEL` reads]",
)
@click.option("--ca-file", type=click.Path(path_type=Path), help="With --url: certificates of the server's authority.")
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
    """Measure what steps of MODEL cost on this host, for `headrace plan`.

    MODEL is as for `headrace serve`; without it, the demo model is measured. A server is started, put under load of
    many shapes for five minutes, and stopped, so nothing else should run meanwhile. Flags of `headrace serve` follow
    behind `--`, such as `-- --kv-cache-gb 8`: give those with which you will serve.

    The file is JSON. Files of several hosts can be kept and shared: `headrace plan` compares them.
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
    given = {"--workers": workers, "--threads": threads}
    flags = [part for flag, value in given.items() if value is not None for part in (flag, str(value))]
    began_s = time.monotonic()

    def tell(line: str) -> None:
        click.echo(f"{time.monotonic() - began_s:4.0f} s  {line}", err=True)

    try:
        if url is not None:
            found = uvloop.run(learned(url, key_header(), ca_file, model))
        else:
            found = uvloop.run(measured(model, [*flags, *serve_flags], seconds, tell))
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
