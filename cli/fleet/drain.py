"""`headrace drain WORKER`: let one worker end its requests and take no new ones, or take them again."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import grpc

from headrace.cli.fleet.fleet_access import access_options, transport_of
from headrace.common.commands import EXIT_FAILED, CommandFailed
from headrace.common.flags import FiniteRange
from headrace.protos import worker_pb2, worker_pb2_grpc
from headrace.protos.status import error_of


@click.command()
@click.argument("worker")
@click.option("--undo", is_flag=True, help="Let the worker take requests again.")
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=0.2),
    default=600.0,
    show_default=True,
    help="Seconds to wait for running requests. The worker continues to drain after that.",
)
@access_options
def drain(worker: str, undo: bool, timeout_s: float, tls_dir: Path | None, join_token_file: Path | None) -> None:
    """Drain WORKER (HOST:PORT or unix:/path): it finishes its requests and takes no new ones.

    From then on its health is NOT_SERVING and routers skip it. The exit status is 1 while requests still run.
    """
    with transport_of(tls_dir, join_token_file).blocking_channel(worker) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        try:
            left = stub.Drain(worker_pb2.DrainRequest(undo=undo), timeout=timeout_s).num_running
        except grpc.RpcError as error:
            raise CommandFailed(f"{worker}: {error_of(error).message}") from None
    if undo:
        click.echo("takes requests again")
        return
    click.echo("drained" if not left else f"draining: {left} requests still run")
    sys.exit(EXIT_FAILED if left else 0)
