"""Loading and unloading adapters and models as a protocol of the gateway."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.gateway.adapters import model_endpoints
from headrace.gateway.adapters.admin_key import AdminKey
from headrace.gateway.adapters.endpoints import endpoints
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


class _Adapters(OpenProtocol):
    def __init__(self, setup: Setup) -> None:
        try:
            admin_key = AdminKey(setup.flags["admin_key_file"])
        except ValueError as error:
            raise CannotServeError(str(error)) from None
        services = setup.services
        self.endpoints = [*endpoints(services, admin_key), *model_endpoints.endpoints(services, admin_key)]


PROTOCOL = Protocol(_Adapters, options=_OPTIONS)
