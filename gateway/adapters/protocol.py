"""The operators' API as a protocol of the gateway: load and unload adapters and models, show and drain workers."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.gateway.adapters import endpoints, fleet
from headrace.gateway.adapters.admin_key import AdminKey
from headrace.gateway.protocol import CannotServeError, OpenProtocol, Protocol, Setup

_OPTIONS = (
    click.Option(
        ["--admin-key-file"],
        type=click.Path(path_type=Path),
        envvar="HEADRACE_ADMIN_KEY_FILE",
        help="File with the key for loading and unloading models and LoRA adapters, and for draining workers, over "
        "HTTP. Default: none, so that nobody may.",
    ),
)


def _opened(setup: Setup) -> OpenProtocol:
    try:
        admin_key = AdminKey(setup.flags["admin_key_file"])
    except ValueError as error:
        raise CannotServeError(str(error)) from None
    of_fleet = fleet.endpoints(setup.services, admin_key)
    return OpenProtocol([*endpoints.endpoints(setup.services, admin_key), *of_fleet])


PROTOCOL = Protocol(_opened, options=_OPTIONS)
