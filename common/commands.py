"""What commands have in common: each failure is one sentence on standard error and an exit status, and times are told
alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import IO, Any

import click

_HINT = re.compile(r"\.? \(?Did you mean (?:one of: )?(.*?)\?\)?$")
EXIT_FAILED = 1
EXIT_REFUSED = 2
# The status that shells use for a process that Ctrl-C has ended.
EXIT_INTERRUPTED = 130


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


def run(command: click.Command, name: str, args: Sequence[str] | None = None) -> int:
    """Run a command whose words are `name`, with these arguments or those of the process. Failures are told in one
    line. Returns the exit status."""
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
