"""`headrace health TARGET`: check one process, for probes of containers and supervisors."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from headrace.cli.fleet.fleet_access import access_options, transport_of
from headrace.cli.fleet.http_probe import http_status
from headrace.common.commands import EXIT_FAILED

if TYPE_CHECKING:
    from headrace.common.transport.channels import Transport

_TIMEOUT_S = 2.0


@click.command()
@click.argument("target")
@click.option("--service", default="", help="gRPC service to check; by default the server as a whole.")
@access_options
def health(target: str, service: str, tls_dir: Path | None, join_token_file: Path | None) -> None:
    """Exit with 0 if TARGET serves: a gateway as http(s)://HOST:PORT, a router or worker as HOST:PORT or unix:/path."""
    if target.startswith(("http://", "https://")):
        scheme, host, port = _parts_of(target)
        status = asyncio.run(http_status(host, port, "/health/ready", _TIMEOUT_S, scheme=scheme))
        serves = None if status is None else status == 200
        remedy = "is it https?" if scheme == "http" else "is it http?"
    else:
        serves = _grpc_serves(target, service, transport_of(tls_dir, join_token_file))
        remedy = "" if tls_dir else "a fleet with TLS wants --tls-dir"
    if serves is None:
        click.echo(f"not serving: no answer from {target}" + (f"; {remedy}" if remedy else ""))
    else:
        click.echo("serving" if serves else "not serving")
    sys.exit(0 if serves else EXIT_FAILED)


def _parts_of(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of a URL. Raises UsageError if it is none."""
    try:
        parts = urlsplit(url)
        if parts.hostname is not None:
            return parts.scheme, parts.hostname, parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError:  # a port that is no number, or half of an IPv6 address
        pass
    raise click.UsageError(f"{url} is no address; write http://HOST:PORT")


def _grpc_serves(target: str, service: str, transport: Transport) -> bool | None:
    """Whether the process says that it serves; None if it does not answer."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with transport.blocking_channel(target) as channel:
        try:
            check: Any = health_pb2_grpc.HealthStub(channel)
            answer = check.Check(health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            silent = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            return None if error.code() in silent else False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
