"""The web console as a protocol of the gateway."""

from __future__ import annotations

import click

from headrace.gateway.console.endpoints import endpoints
from headrace.gateway.protocol import OpenProtocol, Protocol

PROTOCOL = Protocol(
    lambda setup: OpenProtocol(endpoints(setup.services) if setup.flags["console"] else ()),
    options=(click.Option(["--console/--no-console"], default=True, help="Serve the web console at /."),),
)
