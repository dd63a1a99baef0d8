"""How commands reach routers and workers of a fleet with mutual TLS: two options that those who ask have in common."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.errors import CommandError

if TYPE_CHECKING:
    from headrace.protos.transport import Transport

_FILE = click.Path(path_type=Path)


def access_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --tls-dir and --join-token-file, and the variables that all processes of a fleet read."""
    directory = click.option(
        "--tls-dir",
        envvar="HEADRACE_TLS_DIR",
        type=_FILE,
        help="Directory with ca.pem, cert.pem and key.pem, if the fleet speaks mutual TLS.",
    )
    token = click.option(
        "--join-token-file", envvar="HEADRACE_JOIN_TOKEN_FILE", type=_FILE, help="Secret that the fleet wants to see."
    )
    return directory(token(command))


def transport_of(tls_dir: Path | str | None, join_token_file: Path | str | None) -> Transport:
    """The way to the fleet. Raises CommandError if the files cannot be used."""
    # Imported here: it brings gRPC, for which not every command has a use.
    from headrace.protos.transport import Transport, TransportError

    try:
        return Transport(
            None if tls_dir is None else Path(tls_dir), None if join_token_file is None else Path(join_token_file)
        )
    except TransportError as error:
        raise CommandError(str(error)) from None
