"""`headrace models ps`, `load`, `unload` and `alias`: the models of a running `headrace serve`, or with --url those of
a fleet."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.fleet.completers import complete_served_models
from headrace.cli.fleet.fleet_access import ApiAccess, transport_of
from headrace.cli.fleet.gateway_access import FleetClient, operator_options
from headrace.cli.fleet.run_state import ServeRecord, only_serve
from headrace.cli.fleet.tables import console_for, print_columns
from headrace.cli.fleet.watching import watch_option, watched
from headrace.cli.models.completers import complete_known_models
from headrace.cli.models.model_cache import expanded
from headrace.common.commands import CommandError, CommandFailed
from headrace.common.host_memory import GIB

if TYPE_CHECKING:
    from headrace.protos import host_pb2

_LIST_TIMEOUT_S = 10.0
_TITLES = ("NAME", "STATE", "MEMORY", "WORKERS", "LOADED", "LAST USED", "UNTIL", "PROBLEM")

_port_option = click.option("--port", type=click.IntRange(1, 65535), help="Only the server on this port.")
_url_option = click.option("--url", help="Gateway to ask instead of the server that runs here, from anywhere.")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_port_option
@_url_option
@watch_option
@operator_options
def ps(as_json: bool, port: int | None, url: str | None, watch_s: float | None, access: ApiAccess) -> None:
    """Show the running server's models and their states.

    With --url those of a fleet, with the sums of their workers.
    """
    if url is not None:
        show_fleet_models(url, access, as_json=as_json, watch_s=watch_s)
        return

    def show() -> bool:
        rows = [_row(model) for model in _models(_record(port))]
        if as_json:
            click.echo(json.dumps(rows, indent=2 if watch_s is None else None))
        else:
            print_columns([_TITLES, *map(_cells, rows)])
        return True

    watched(show, watch_s)


def show_fleet_models(url: str, access: ApiAccess, *, as_json: bool, watch_s: float | None) -> None:
    """Print the models of the fleet behind a gateway, once or again and again."""
    from headrace.cli.fleet.fleet_view import MODEL_COLUMNS, Rates, model_rows, table_of, worker_rows

    rates = Rates()
    with FleetClient(url, access) as client:

        def show() -> bool:
            picture = client.picture()
            rows = model_rows(picture, worker_rows(picture, rates.of(picture.workers, time.monotonic())))
            if as_json:
                click.echo(json.dumps(rows, indent=2 if watch_s is None else None))
            else:
                table = table_of(MODEL_COLUMNS, rows)
                console_for(table).print(table)
            return True

        watched(show, watch_s)


@click.command()
@click.argument("name", shell_complete=complete_known_models)
@click.argument("model", required=False, shell_complete=complete_known_models)
@_port_option
@_url_option
@operator_options
def load(name: str, model: str | None, port: int | None, url: str | None, access: ApiAccess) -> None:
    """Load the model NAME, and wait until it is loaded.

    NAME is a model of the running server.

    With MODEL, a server that has no NAME gets it: a name in the cache or the catalogue, OWNER/NAME on a hub, a
    directory or a GGUF file. Such a model gives way to others if memory is short, and requests load it again.
    With --url it is loaded on the gateway's host, which needs the admin key.
    """
    if url is not None:
        with FleetClient(url, access) as client:
            client.change_model("load", {"model": name} | ({"path": model} if model else {}))
    else:
        from headrace.protos import host_pb2

        path = expanded(model) if model else None
        where = str(path.absolute()) if path is not None and path.exists() else model or ""
        request = host_pb2.LoadModelRequest(name=name, model=where, by_operator=True)
        _call(_record(port), "LoadModel", request, None)
    click.echo(f"{name} is loaded")


@click.command()
@click.argument("name", shell_complete=complete_served_models)
@_port_option
@_url_option
@operator_options
def unload(name: str, port: int | None, url: str | None, access: ApiAccess) -> None:
    """Unload the model NAME, and wait until it is unloaded.

    NAME is a model of the running server. Its requests end first.

    A model that is loaded on demand is loaded again for the next request. Others stay unloaded until headrace models
    load. With --url it is unloaded on the gateway's host, which needs the admin key.
    """
    if url is not None:
        with FleetClient(url, access) as client:
            client.change_model("unload", {"model": name})
    else:
        from headrace.protos import host_pb2

        _call(_record(port), "UnloadModel", host_pb2.UnloadModelRequest(name=name), None)
    click.echo(f"{name} is unloaded")


@click.command()
@click.argument("alias")
@click.argument("models", required=False)
@click.option(
    "--shadow", metavar="MODEL:PERCENT", default="", help="Model that gets copies of a share of the requests."
)
@_port_option
def alias(alias: str, models: str | None, shadow: str, port: int | None) -> None:
    """Let ALIAS stand for MODELS of the running server.

    Without MODELS, the alias is removed. MODELS is a model, or several with weights, such as a:90,b:10. A running
    answer stays with its model. The change lasts until the server stops.
    """
    from headrace.protos import host_pb2

    if shadow and not models:
        raise CommandError("--shadow is for an alias with MODELS")
    request = host_pb2.SetAliasRequest(alias=alias, models=models or "", shadow=shadow)
    _call(_record(port), "SetAlias", request, None)
    click.echo(f"{alias} is {models}" if models else f"{alias} is removed")


def _record(port: int | None) -> ServeRecord:
    return only_serve(port, if_none="start one", if_several="say which with --port")


def _models(record: ServeRecord) -> list[host_pb2.HostedModel]:
    from headrace.protos import host_pb2

    answers = _call(record, "WatchModels", host_pb2.WatchModelsRequest(), _LIST_TIMEOUT_S)
    try:
        with _failing(record):
            return list(next(answers).models)
    finally:
        answers.cancel()


def _call(record: ServeRecord, method: str, request: Any, timeout_s: float | None) -> Any:
    """Return the response of a serve. Raises CommandFailed."""
    from headrace.protos.host_pb2_grpc import ModelHostStub

    channel = transport_of(record.tls_dir, record.join_token_file).blocking_channel(record.host_address)
    with _failing(record):
        return getattr(ModelHostStub(channel), method)(request, timeout=timeout_s, wait_for_ready=True)


@contextmanager
def _failing(record: ServeRecord) -> Iterator[None]:
    """Context manager: raise CommandFailed if a call to a serve fails inside."""
    import grpc

    from headrace.protos.status import Reason, error_of

    try:
        yield
    except grpc.RpcError as error:
        status = error_of(error)
        if status.reason is Reason.DEADLINE:
            raise CommandFailed(
                f"the server on port {record.port} does not answer: it may be loading its first model; headrace status "
                "shows its processes"
            ) from None
        raise CommandFailed(status.message) from None


def _row(model: host_pb2.HostedModel) -> dict[str, Any]:
    """The model as JSON: memory in bytes, times in seconds from now. Unknown values are None."""
    from headrace.protos import host_pb2

    now_ms = time.time() * 1000
    is_loaded = model.state == host_pb2.HOSTED_MODEL_STATE_LOADED
    leaves_ms = model.last_used_ms + model.idle_ms - now_ms
    return {
        "name": model.name,
        "state": host_pb2.HostedModelState.Name(model.state).removeprefix("HOSTED_MODEL_STATE_").lower(),
        "problem": model.problem or None,
        "directory": model.directory,
        "on_demand": model.is_on_demand,
        "workers": model.num_workers,
        "memory_bytes": model.num_bytes or None,
        "loaded_s": round((now_ms - model.loaded_ms) / 1000, 1) if is_loaded else None,
        "unused_s": round((now_ms - model.last_used_ms) / 1000, 1) if is_loaded and model.is_on_demand else None,
        "idle_unload_in_s": round(leaves_ms / 1000, 1) if is_loaded and model.idle_ms else None,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    leaves_s = row["idle_unload_in_s"]
    until = "always" if not row["on_demand"] else "needed" if leaves_s is None else f"idle, {max(0.0, leaves_s):.0f} s"
    return (
        row["name"],
        row["state"],
        "" if row["memory_bytes"] is None else f"{row['memory_bytes'] / GIB:.2f} GiB",
        str(row["workers"]),
        "" if row["loaded_s"] is None else f"{row['loaded_s']:.0f} s ago",
        "" if row["unused_s"] is None else f"{row['unused_s']:.0f} s ago",
        until,
        row["problem"] or "",
    )
