"""Loading and unloading adapters and models as a protocol of the gateway."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.gateway.adapters.endpoints import AdminKey, endpoints
from headrace.gateway.protocol import CannotServeError, OpenProtocol, Protocol, Setup

_OPTIONS = (
    click.Option(
        ["--admin-key-file"],
        type=click.Path(path_type=Path),
        envvar="HEADRACE_ADMIN_KEY_FILE",
        help="File with the key for loading and unloading models and LoRA adapters over HTTP. Default: none, so that "
        "they cannot be.",
    ),
)


def _opened(setup: Setup) -> OpenProtocol:
    try:
        admin_key = AdminKey(setup.flags["admin_key_file"])
    except ValueError as error:
        raise CannotServeError(str(error)) from None
    return OpenProtocol(endpoints(setup.services, admin_key))


PROTOCOL = Protocol(_opened, options=_OPTIONS)
