"""The endpoints of a gateway that is not running, for tests that are made from the OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import click

from headrace.gateway.edge.endpoint import Endpoint
from headrace.gateway.operations.openapi import document
from headrace.gateway.protocol import Protocol, Setup
from headrace.gateway.protocols import PROTOCOLS, endpoints
from headrace.gateway.server import Threads, services_behind


def default_flags(protocol: Protocol) -> dict[str, Any]:
    """The values of a protocol's options when the command line does not have them."""
    return click.Command("gateway", params=[*protocol.options]).make_context("gateway", []).params


def served() -> Sequence[Endpoint]:
    """All endpoints. Whatever they call is closed."""

    async def opened() -> Sequence[Endpoint]:
        threads = Threads()
        services = services_behind(("127.0.0.1:1",), threads)
        protocols = [one.open(Setup(services, default_flags(one))) for one in PROTOCOLS.values()]
        found = endpoints(services, protocols)
        await services.upstream.close()
        await services.host.close()
        for one in protocols:
            await one.close()
        services.models.close()
        threads.close()
        return found

    return asyncio.run(opened())


def described() -> dict[str, Any]:
    """The OpenAPI document."""
    return document(served())
