"""Errors of commands: each failure is one sentence on standard error and an exit status."""

from __future__ import annotations

from typing import IO, Any

import click

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
