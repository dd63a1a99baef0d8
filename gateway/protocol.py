"""The interface of a protocol: a folder whose `protocol` module has one `PROTOCOL`, listed in `protocols`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from headrace.gateway.access.admission import AdmissionControl
from headrace.gateway.chat.generation import Plan
from headrace.gateway.edge.endpoint import Endpoint
from headrace.gateway.edge.grpc_edge import GrpcService
from headrace.gateway.fields import FieldTable
from headrace.gateway.services import Services
from headrace.protos.router_pb2 import RedisState


class CannotServeError(Exception):
    """The gateway cannot serve with these flags. The message is a sentence with the remedy."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The arguments with which a protocol is opened."""

    services: Services
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Values of the protocol's own options, by parameter name."""
    shared_redis_url: str | None = None
    """The Redis of leases, limits and keys (`--redis`)."""
    admission: AdmissionControl = field(default_factory=AdmissionControl)
    """Admits the requests."""


class OpenProtocol:
    """A running protocol. Subclasses override what they need."""

    def __init__(self, endpoints: Sequence[Endpoint] = (), grpc_services: Sequence[GrpcService] = ()) -> None:
        """A gateway with a gRPC port serves the gRPC services."""
        self.endpoints = endpoints
        self.grpc_services = grpc_services

    def meet(self, endpoints: Sequence[Endpoint]) -> None:
        """Learn the endpoints of all open protocols. Called once, before `run`."""

    def redis_states(self) -> Mapping[str, RedisState]:
        """The state of each Redis that it uses, by purpose. Health endpoints show them."""
        return {}

    async def plan_of(self, path: str, body: bytes) -> Plan | None:
        """The plan of the request with this path and body, for an endpoint picker; None for a path that is not known.
        Raises `StatusError`."""
        return None

    async def run(self) -> None:
        """Do background work until cancelled."""
        await asyncio.Event().wait()

    def refuse_new(self) -> None:
        """Refuse new requests that do not come over HTTP, because the gateway stops."""
        for service in self.grpc_services:
            service.servicer.calls.stopping = True

    async def drain(self, timeout_s: float) -> None:
        """Finish work that no open request waits for, within this time."""

    async def close(self) -> None:
        """Close connections. Called once, after `drain`."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """A protocol of the gateway."""

    open: Callable[[Setup], OpenProtocol]
    """Opens it on the running event loop. Raises `CannotServeError`."""
    fields: Sequence[FieldTable] = ()
    """The tables of its fields, from which the reference is written."""
    options: Sequence[click.Option] = ()
    """Its flags of `headrace gateway`."""

    def flags(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the protocol's own options, from all values by parameter name."""
        return {option.name: values[option.name] for option in self.options if option.name is not None}
