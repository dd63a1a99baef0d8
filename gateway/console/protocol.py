"""The web console as a protocol of the gateway."""

from __future__ import annotations

import click

from headrace.gateway.console import endpoints
from headrace.gateway.protocol import OpenProtocol, Protocol, Setup


class _Console(OpenProtocol):
    def __init__(self, setup: Setup) -> None:
        if setup.flags["console"]:
            self.endpoints = endpoints.endpoints(setup.services)


PROTOCOL = Protocol(
    _Console,
    options=(click.Option(["--console/--no-console"], default=True, help="Serve the web console at /."),),
)
