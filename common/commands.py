"""Behaviour shared by all commands: each failure is one sentence on standard error and an exit status, durations have
one format, and a long help has its options in sections."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import IO, Any

import click

# The bounds of a number stand beside it in the help, and messages name them; a value is one number, not a range.
click.IntRange.name = "integer"
click.FloatRange.name = "float"

_HINT = re.compile(r"\.? \(?Did you mean (?:one of: )?(.*?)\?\)?$")
EXIT_FAILED = 1
EXIT_REFUSED = 2
# The status that shells use for a process that Ctrl-C has ended.
EXIT_INTERRUPTED = 130
_MOST_MEANT = 3
_OTHER_NAMES: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("max-model-len", "ctx-size", "context-length", "num-ctx", "ctx"), ("max-context-tokens",)),
    **dict.fromkeys(("tensor-parallel-size", "tp", "tp-size"), ("tensor-parallel",)),
    **dict.fromkeys(("pipeline-parallel-size", "pp"), ("pipeline",)),
    **dict.fromkeys(("gpu-memory-utilization", "kv-cache-size", "cache-size"), ("kv-cache-gb",)),
    **dict.fromkeys(("speculative-model", "draft"), ("draft-model",)),
    **dict.fromkeys(("kv-cache-dtype", "cache-type-k"), ("kv-precision",)),
    **dict.fromkeys(("quantization", "quantize", "dtype", "weight-format"), ("weights",)),
    **dict.fromkeys(("api-key", "key"), ("api-keys", "header")),
    **dict.fromkeys(("enable-lora", "lora", "lora-modules"), ("adapter",)),
    **dict.fromkeys(("ssl-certfile", "cert"), ("tls-cert",)),
    **dict.fromkeys(("ssl-keyfile",), ("tls-key",)),
    **dict.fromkeys(("served-model-name",), ("name",)),
    **dict.fromkeys(("num-threads", "cpu-threads"), ("threads",)),
    **dict.fromkeys(("batch-size", "max-batch-size", "parallel"), ("max-num-seqs",)),
    **dict.fromkeys(("concurrency", "parallelism"), ("max-concurrency",)),
    **dict.fromkeys(("rate", "qps", "rps", "request-rate"), ("request-rate", "rate")),
    **dict.fromkeys(("requests", "num-requests", "n"), ("num-prompts", "requests")),
    **dict.fromkeys(("prompt-len", "input-len", "input-tokens", "isl"), ("input-len", "prompt")),
    **dict.fromkeys(("output-tokens", "output-len", "osl"), ("output-len", "answer")),
    **dict.fromkeys(("dataset", "trace", "trace-file"), ("dataset-name", "dataset-path", "trace")),
    **dict.fromkeys(("duration", "time", "max-seconds"), ("seconds", "num-prompts", "requests")),
    **dict.fromkeys(("slo", "latency", "objective", "objectives"), ("goodput", "ttft", "tpot")),
    **dict.fromkeys(("conversations", "num-conversations"), ("turns", "multi-turn-turns")),
    **dict.fromkeys(("documents", "num-prefixes"), ("prefixes",)),
    **dict.fromkeys(("interval", "period"), ("every",)),
    **dict.fromkeys(("availability", "redundancy", "failures", "spares"), ("spare-hosts",)),
    **dict.fromkeys(("price", "cost"), ("cost-per-host",)),
    **dict.fromkeys(("experiments", "experiment"), ("only",)),
    **dict.fromkeys(("list", "preview"), ("dry-run",)),
    **dict.fromkeys(("results", "resume", "output-dir", "out-dir"), ("directory", "result-dir")),
    **dict.fromkeys(("replicas", "num-workers"), ("workers", "hosts")),
    **dict.fromkeys(("nodes", "servers", "machines", "instances"), ("hosts", "peers")),
    **dict.fromkeys(("output", "out", "output-file"), ("result-filename", "output", "html", "directory")),
    **dict.fromkeys(("report",), ("html",)),
}
"""Options by the names that they have in other servers and clients: the names here, of which a command has some."""


class SectionedCommand(click.Command):
    """A command whose help has its options in sections. `sections` has the flags of each section by its title. Options
    that are in none of them follow, under "Options"."""

    def __init__(self, *args: Any, sections: Mapping[str, Collection[str]], **more: Any) -> None:
        super().__init__(*args, **more)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections, and then what is in none."""
        by_title: dict[str, list[tuple[str, str]]] = {title: [] for title in (*self.sections, "Options")}
        titles = {flag: title for title, flags in self.sections.items() for flag in flags}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                by_title[titles.get(param.opts[0], "Options")].append(record)
        for title, records in by_title.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class CommandError(click.ClickException):
    """The command cannot be run as given. The user sees `error: SENTENCE` and has to change something."""

    exit_code = EXIT_REFUSED

    def show(self, file: IO[Any] | None = None) -> None:
        """Write the sentence to standard error (or to `file`)."""
        click.echo(f"error: {self.format_message()}", file=file, err=file is None)


class CommandFailed(CommandError):
    """The command is valid, but something else (a network, another program) failed."""

    exit_code = EXIT_FAILED


def told(error: Exception) -> int:
    """Report a failure on standard error. Returns the exit status."""
    match error:
        case click.Abort():
            return EXIT_INTERRUPTED
        case click.exceptions.NoArgsIsHelpError():
            click.echo(error.format_message(), err=True)
            return EXIT_REFUSED
        case click.UsageError():
            command = error.ctx.command_path if error.ctx is not None else "headrace"
            # click has several forms of this hint.
            said = _HINT.sub(r"; did you mean \1?", error.format_message()).rstrip(".")
            if isinstance(error, click.NoSuchOption) and (meant := _meant(error)):
                said = f"{error.message.rstrip('.')}; {meant}"
            mark = "" if said.endswith("?") else ";"
            click.echo(f"error: {said[:1].lower()}{said[1:]}{mark} see {command} --help", err=True)
            return EXIT_REFUSED
        case click.ClickException():
            error.show()
            return error.exit_code
        case OSError():  # a full disk, or a file that may not be read or written
            about = f"{error.filename}: " if error.filename else ""
            click.echo(f"error: {about}{error.strerror or error}", err=True)
            return EXIT_FAILED
        case _:  # UnicodeError: a line of the input, an argument or a variable; rarely, an answer
            click.echo(f"error: a text that was given or would be shown does not fit its encoding: {error}", err=True)
            return EXIT_REFUSED


def _meant(error: click.NoSuchOption) -> str:
    """A hint at what a wrong option may mean: an argument, the name of the option here, or options that contain its
    words. Empty if none is known; click then suggests options with a similar spelling."""
    if error.ctx is None or not error.option_name.startswith("--"):
        return ""
    wrong = error.option_name.removeprefix("--").replace("_", "-")
    params = error.ctx.command.params
    for argument in params:
        if isinstance(argument, click.Argument) and argument.name in (wrong, f"{wrong}s"):
            return f"give {wrong.upper()} without a flag"
    flags = [flag for param in params if isinstance(param, click.Option) and not param.hidden for flag in param.opts]
    named = [flag for name in _OTHER_NAMES.get(wrong, ()) if (flag := f"--{name}") in flags]
    words = set(wrong.split("-"))
    found = named or [flag for flag in flags if words <= set(flag.removeprefix("--").split("-"))]
    return f"did you mean {', '.join(map(repr, found[:_MOST_MEANT]))}?" if found else ""


def run(command: click.Command, name: str, args: Sequence[str] | None = None) -> int:
    """Run a command called `name`, with these arguments or those of the process. Each failure is reported in one line.
    Returns the exit status."""
    try:
        prefix = name.upper().replace(" ", "_")
        status = command.main(args, name, standalone_mode=False, auto_envvar_prefix=prefix)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except (click.ClickException, click.Abort, OSError, UnicodeError) as error:
        return told(error)
    return status if isinstance(status, int) else 0


def duration(seconds: float) -> str:
    """`42 s`, `3 min 5 s` or `2 h 3 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
