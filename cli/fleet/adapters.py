"""`headrace adapters`: list, load and unload the LoRA adapters of a running fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import grpc

from headrace.cli.fleet.fleet_access import access_options, transport_of
from headrace.cli.fleet.run_state import only_serve
from headrace.cli.fleet.tables import print_columns
from headrace.common.commands import CommandFailed
from headrace.common.transport.channels import Transport
from headrace.protos import router_pb2, router_pb2_grpc
from headrace.protos.status import error_of

_LIST_TIMEOUT_S = 10.0
_LOAD_TIMEOUT_S = 150.0
_MIB = 1 << 20

_router_option = click.option(
    "--router", help="gRPC address of the router.  [default: that of the `headrace serve` that runs here]"
)


@click.group()
def adapters() -> None:
    """List, load and unload LoRA adapters."""


@adapters.command("list")
@_router_option
@access_options
def list_command(router: str | None, tls_dir: Path | None, join_token_file: Path | None) -> None:
    """Show all adapters, and how many workers have each in memory."""
    answer = _call(router, tls_dir, join_token_file, "ListModels", router_pb2.ListModelsRequest(), _LIST_TIMEOUT_S)
    if not answer.adapters:
        click.echo("no adapters")
        return
    rows = [("NAME", "MODEL", "RANK", "SIZE", "WORKERS", "IN MEMORY", "PATH")]
    for served in answer.adapters:
        adapter = served.adapter
        size = f"{adapter.num_bytes / _MIB:.1f} MiB"
        counts = str(served.num_workers), str(served.num_in_memory)
        rows.append((adapter.name, served.model, str(adapter.rank), size, *counts, adapter.path))
    print_columns(rows)


@adapters.command()
@click.argument("name")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--model", default="", help="The model that the adapter is for, if there are several.")
@click.option(
    "--in-place", is_flag=True, help="Replace an adapter of this name. Its running requests keep the old one."
)
@_router_option
@access_options
def load(
    name: str,
    path: Path,
    model: str,
    in_place: bool,
    router: str | None,
    tls_dir: Path | None,
    join_token_file: Path | None,
) -> None:
    """Load the adapter at PATH under NAME.

    PATH is a directory or a GGUF file on the workers' hosts.
    """
    request = router_pb2.RouterLoadAdapterRequest(name=name, path=str(path.absolute()), in_place=in_place, model=model)
    served = _call(router, tls_dir, join_token_file, "LoadAdapter", request, _LOAD_TIMEOUT_S).adapter
    click.echo(
        f"{name}: rank {served.adapter.rank}, at {served.num_workers} workers, in memory at {served.num_in_memory}"
    )


@adapters.command()
@click.argument("name")
@_router_option
@access_options
def unload(name: str, router: str | None, tls_dir: Path | None, join_token_file: Path | None) -> None:
    """Unload the adapter NAME. Its running requests continue."""
    request = router_pb2.RouterUnloadAdapterRequest(name=name)
    _call(router, tls_dir, join_token_file, "UnloadAdapter", request, _LOAD_TIMEOUT_S)
    click.echo(f"{name} is unloaded")


def _call(
    router: str | None, tls_dir: Path | None, join_token_file: Path | None, method: str, request: Any, timeout_s: float
) -> Any:
    """Return the router's response. Raises CommandError or CommandFailed."""
    address, transport = _found(router, tls_dir, join_token_file)
    with transport.blocking_channel(address) as channel:
        try:
            return getattr(router_pb2_grpc.RouterStub(channel), method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise CommandFailed(f"{address}: {error_of(error).message}") from None


def _found(router: str | None, tls_dir: Path | None, join_token_file: Path | None) -> tuple[str, Transport]:
    if router is not None:
        return router, transport_of(tls_dir, join_token_file)
    remedy = "say which router with --router"
    record = only_serve(None, if_none=remedy, if_several=remedy)
    return record.router_address, transport_of(record.tls_dir, record.join_token_file)
