"""`headrace drain WORKER` and `headrace undrain WORKER`: let one worker end its requests and take no new ones, or take
them again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from headrace.cli.fleet.completers import complete_workers
from headrace.cli.fleet.fleet_access import ApiAccess, access_options, transport_of
from headrace.cli.fleet.gateway_access import FleetClient, operator_options
from headrace.cli.fleet.run_state import only_serve
from headrace.common.commands import EXIT_FAILED, CommandFailed
from headrace.common.flags import FiniteRange

# Of one request to a gateway. Proxies close those that are silent for long.
_LOOK_S = 10.0
_UNDO_S = 10.0

_worker_argument = click.argument("worker", shell_complete=complete_workers)
_url_option = click.option(
    "--url", help="Gateway of the worker's fleet, such as http://10.0.0.5:8000. This needs its admin key."
)


@click.command()
@_worker_argument
@click.option("--undo", is_flag=True, help="Let the worker take requests again; the same as headrace undrain.")
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=0.2),
    default=600.0,
    show_default=True,
    help="Seconds to wait for running requests. The worker continues to drain after that.",
)
@_url_option
@access_options
@operator_options
def drain(
    worker: str,
    undo: bool,
    timeout_s: float,
    url: str | None,
    tls_dir: Path | None,
    join_token_file: Path | None,
    access: ApiAccess,
) -> None:
    """Drain WORKER: it finishes its requests and takes no new ones.

    WORKER is a worker of the `headrace serve` that runs here, such as worker-0, or an address, HOST:PORT or unix:/path.
    With --url it is the name or address of any worker of that fleet, as headrace status --url shows it. From then on
    its health is NOT_SERVING and routers skip it. The exit status is 1 while requests still run.
    """
    if undo:
        _undrain(worker, url, tls_dir, join_token_file, access)
        return
    if url is not None:
        with FleetClient(url, access) as client:
            left = _drained(client, worker, timeout_s)
    else:
        left = _direct(worker, tls_dir, join_token_file, undo=False, timeout_s=timeout_s)
    click.echo("drained" if not left else f"draining: {_still(left)}")
    sys.exit(EXIT_FAILED if left else 0)


@click.command()
@_worker_argument
@_url_option
@access_options
@operator_options
def undrain(
    worker: str, url: str | None, tls_dir: Path | None, join_token_file: Path | None, access: ApiAccess
) -> None:
    """Let WORKER, which drains, take requests again. WORKER and --url are as for headrace drain."""
    _undrain(worker, url, tls_dir, join_token_file, access)


def _undrain(
    worker: str, url: str | None, tls_dir: Path | None, join_token_file: Path | None, access: ApiAccess
) -> None:
    if url is not None:
        with FleetClient(url, access) as client:
            client.drain(worker, undo=True)
    else:
        _direct(worker, tls_dir, join_token_file, undo=True, timeout_s=_UNDO_S)
    click.echo("takes requests again")


def _drained(client: FleetClient, worker: str, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> int:
    """Drain a worker through its gateway. Returns the number of requests that are left after the timeout. On a
    terminal, shows this number while it waits."""
    until_s = clock() + timeout_s
    while True:
        begun_s = clock()
        wait_s = min(_LOOK_S, max(0.2, until_s - begun_s))
        _, left = client.drain(worker, wait_s=wait_s)
        # A worker that still hands its cached blocks over has no request left, and answers only when they are gone.
        is_over = not left and clock() - begun_s < wait_s - 0.2
        if is_over or clock() >= until_s:
            return left
        if sys.stderr.isatty():
            click.echo(f"draining: {_still(left) if left else 'handing cached blocks over'}", err=True)


def _still(left: int) -> str:
    return "1 request still runs" if left == 1 else f"{left} requests still run"


def _direct(worker: str, tls_dir: Path | None, join_token_file: Path | None, *, undo: bool, timeout_s: float) -> int:
    """Call the worker, or the router of the serve of this host if it is only named. Returns the requests that are
    left."""
    import grpc

    from headrace.protos import router_pb2, router_pb2_grpc, worker_pb2, worker_pb2_grpc
    from headrace.protos.status import error_of

    calls: Any
    request: Any
    if ":" in worker:
        transport, address = transport_of(tls_dir, join_token_file), worker
    else:
        remedy = "give the worker's address, or its fleet's gateway with --url"
        record = only_serve(None, if_none=remedy, if_several=remedy)
        transport, address = transport_of(record.tls_dir, record.join_token_file), record.router_address
    with transport.blocking_channel(address) as channel:
        if ":" in worker:
            calls, request = worker_pb2_grpc.WorkerStub(channel).Drain, worker_pb2.DrainRequest(undo=undo)
        else:
            calls = router_pb2_grpc.RouterStub(channel).DrainWorker
            request = router_pb2.DrainWorkerRequest(worker=worker, undo=undo)
        try:
            return int(calls(request, timeout=timeout_s).num_running)
        except grpc.RpcError as error:
            raise CommandFailed(f"{worker}: {error_of(error).message}") from None
