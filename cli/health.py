"""`headrace health TARGET`: one question to one process, for probes of containers and supervisors."""

from __future__ import annotations

import asyncio
import sys
from typing import Any
from urllib.parse import urlsplit

import click

from headrace.cli.errors import EXIT_FAILED
from headrace.cli.http_probe import http_status

_TIMEOUT_S = 2.0


@click.command()
@click.argument("target")
@click.option("--service", default="", help="gRPC service to ask about; by default the server as a whole.")
def health(target: str, service: str) -> None:
    """Exit with 0 if TARGET serves: a gateway as http://HOST:PORT, a router or worker as HOST:PORT or unix:/path."""
    if target.startswith("http://"):
        parts = urlsplit(target)
        if parts.hostname is None:
            raise click.UsageError(f"{target} names no host; write http://HOST:PORT")
        serves = asyncio.run(http_status(parts.hostname, parts.port or 80, "/health/ready", _TIMEOUT_S)) == 200
    else:
        serves = _grpc_serves(target, service)
    click.echo("serving" if serves else "not serving")
    sys.exit(0 if serves else EXIT_FAILED)


def _grpc_serves(target: str, service: str) -> bool:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            check: Any = health_pb2_grpc.HealthStub(channel)
            answer = check.Check(health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
