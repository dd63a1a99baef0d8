"""`headrace status`: the processes that serve on this host, with data from supervisor, router, gateway and stages; with
--url the workers of a fleet."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
import grpc

from headrace.cli.fleet.completers import complete_served_models
from headrace.cli.fleet.fleet_access import ApiAccess, transport_of
from headrace.cli.fleet.fleet_view import Rates, print_fleet, worker_rows
from headrace.cli.fleet.gateway_access import FleetClient, operator_options
from headrace.cli.fleet.http_probe import http_status
from headrace.cli.fleet.run_state import (
    JoinRecord,
    ProcessRecord,
    ServeRecord,
    is_stopped,
    running_joins,
    running_serves,
)
from headrace.cli.fleet.tables import WIDTH_OF_A_PIPE, width_of
from headrace.cli.fleet.watching import watch_option, watched
from headrace.cli.fleet.worker_columns import LOST_STATES, WORKER_STATES, worker_columns
from headrace.common.commands import EXIT_FAILED, duration
from headrace.protos import router_pb2, router_pb2_grpc, stage_pb2, stage_pb2_grpc

if TYPE_CHECKING:
    from rich.console import Console

    from headrace.common.transport.channels import Transport

_ASK_TIMEOUT_S = 2.0
_STAGE_STATES = {
    stage_pb2.STAGE_STATE_WAITING: "waiting",
    stage_pb2.STAGE_STATE_LOADING: "loading",
    stage_pb2.STAGE_STATE_READY: "ready",
}
_COLOURS = {"ready": "green"} | dict.fromkeys(("failed", "suspect", "stopped", "unreachable", "not answering"), "red")


async def collect(record: ServeRecord) -> list[dict[str, Any]]:
    """One row for each process of a serve; `row_of` describes its fields."""
    (workers, is_router_silent), gateway_ready = await asyncio.gather(
        _list_workers(record),
        http_status(record.host, record.port, "/health/ready", _ASK_TIMEOUT_S, scheme=record.url.partition(":")[0]),
    )
    now_s = time.time()
    return [
        row_of(
            record,
            process,
            workers,
            gateway_ready == 200,
            now_s,
            is_router_silent=is_router_silent,
            is_stopped=process.pid is not None and is_stopped(process.pid),
        )
        for process in record.processes
    ]


def row_of(
    record: ServeRecord,
    process: ProcessRecord,
    workers: Mapping[str, router_pb2.WorkerInfo] | None,
    gateway_ready: bool,
    now_s: float,
    *,
    is_router_silent: bool = False,
    is_stopped: bool = False,
) -> dict[str, Any]:
    """The fields of one process. Pure.

    `workers` are the router's, by worker id, or None if the router does not respond; `is_router_silent` if it listens
    nevertheless. `is_stopped` is whether a signal or a debugger has stopped the process. Every row has role, name, pid,
    address, state, restarts, uptime_s, serve_pid and port. A worker also has silent_s (while it does not answer),
    model, serves (prefill, decode or both), kv_blocks, kv_blocks_free, kv_blocks_cached, state_slots, states_saved,
    window_slots, window_slots_held, kv_blocks_evicted, kv_blocks_given_up, kv_blocks_restored, kv_blocks_read,
    kv_blocks_not_written, kv_blocks_received, kv_blocks_taken_over, kv_disk_blocks, kv_disk_slots, cached_tokens (by
    tier), requests_running, requests_waiting, draft_tokens, draft_tokens_accepted and draft_tokens_by_proposer, which
    are None while unknown, the columns of `worker_columns._binding_columns`, ranks, and stages. A gateway also has
    grpc_address.
    """
    row = _process_columns(process, record.pid, record.port, now_s)
    answers = process.state == "starting"
    if process.role == "worker":
        info = workers.get(process.name) if workers is not None else None
        row |= worker_columns(info)
        if answers and info is not None:
            row |= _state_columns(info, process.started_s, now_s)
        elif answers and is_router_silent:
            row["state"] = "unknown"
    elif process.role == "router":
        if answers and (workers is not None or is_router_silent):
            row["state"] = "unreachable" if is_router_silent else "ready"
    else:
        row["grpc_address"] = f"{record.host}:{record.grpc_port}" if record.grpc_port else None
        row["state"] = "ready" if answers and gateway_ready else process.state
    if answers and is_stopped:
        row["state"] = "stopped"
    return row


def _process_columns(process: ProcessRecord, serve_pid: int, port: int | None, now_s: float) -> dict[str, Any]:
    return {
        "role": process.role,
        "name": process.name,
        "pid": process.pid,
        "address": process.address,
        "state": process.state,
        "restarts": process.restarts,
        "uptime_s": round(now_s - process.started_s, 1) if process.pid is not None else None,
        "serve_pid": serve_pid,
        "port": port,
    }


async def collect_stages(record: JoinRecord) -> list[dict[str, Any]]:
    """One row for each stage of a host that has joined; `stage_row_of` describes its fields."""
    transport = transport_of(record.tls_dir, record.join_token_file)
    asked = [_state_of_stage(transport, process) for process in record.processes]
    now_s = time.time()
    return [
        stage_row_of(record, process, state, now_s, is_silent=is_silent)
        for process, (state, is_silent) in zip(record.processes, await asyncio.gather(*asked), strict=True)
    ]


def stage_row_of(
    record: JoinRecord,
    process: ProcessRecord,
    found: stage_pb2.GetStageStateResponse | None,
    now_s: float,
    *,
    is_silent: bool = False,
) -> dict[str, Any]:
    """The fields of one stage. `found` is its own answer, None if there is none; `is_silent` if it listens then.

    Besides those of every row, it has model, join (where it offers itself), worker, first_layer, num_layers and
    compute_s; the last four are None while unknown.
    """
    row = _process_columns(process, record.pid, None, now_s)
    row |= {"model": record.model, "join": record.join}
    has_layers = found is not None and found.num_layers > 0
    row["worker"] = (found.worker or None) if found is not None else None
    row["first_layer"] = found.first_layer if found is not None and has_layers else None
    row["num_layers"] = found.num_layers if found is not None and has_layers else None
    row["compute_s"] = found.compute_seconds if found is not None else None
    if process.state == "starting":
        if found is not None:
            row["state"] = _STAGE_STATES.get(found.state, "unknown")
        elif is_silent:
            row["state"] = "unreachable"
        if process.pid is not None and is_stopped(process.pid):
            row["state"] = "stopped"
    return row


async def _state_of_stage(
    transport: Transport, process: ProcessRecord
) -> tuple[stage_pb2.GetStageStateResponse | None, bool]:
    """What a stage says of itself, None if it does not respond, and whether it listens without responding."""
    async with transport.channel(_reached_here(process.address)) as channel:
        try:
            return await stage_pb2_grpc.StageStub(channel).GetStageState(
                stage_pb2.GetStageStateRequest(), timeout=_ASK_TIMEOUT_S
            ), False
        except grpc.aio.AioRpcError as error:
            return None, error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def _reached_here(address: str) -> str:
    """The address under which this host reaches a process of its own, which may listen on all interfaces."""
    host, _, port = address.rpartition(":")
    return {"0.0.0.0": f"127.0.0.1:{port}", "[::]": f"[::1]:{port}"}.get(host, address)


def _state_columns(info: router_pb2.WorkerInfo, started_s: float, now_s: float) -> dict[str, Any]:
    """The state of a worker as its router reports it, with silent_s if it does not answer. A process that has not
    reported since its start is starting."""
    has_reported = info.report_age_ms > 0 and now_s - info.report_age_ms / 1000 > started_s
    lost = LOST_STATES.get(info.state, "unreachable") if has_reported else "starting"
    state = WORKER_STATES.get(info.state, lost)
    silent = {"silent_s": round(info.report_age_ms / 1000, 1)} if state == "not answering" else {}
    return {"state": state, **silent}


async def _list_workers(record: ServeRecord) -> tuple[dict[str, router_pb2.WorkerInfo] | None, bool]:
    """The router's workers, None if it does not respond, and whether it listens without responding."""
    transport = transport_of(record.tls_dir, record.join_token_file)
    async with transport.channel(record.router_address) as channel:
        try:
            answer = await router_pb2_grpc.RouterStub(channel).ListWorkers(
                router_pb2.ListWorkersRequest(), timeout=_ASK_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            return None, error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return {info.worker_id: info for info in answer.workers}, False


async def _collect_all(records: Sequence[ServeRecord], joins: Sequence[JoinRecord] = ()) -> list[dict[str, Any]]:
    groups = await asyncio.gather(*map(collect, records), *map(collect_stages, joins))
    return [row for rows in groups for row in rows]


def _print_stages(joins: Sequence[JoinRecord], rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    for record in joins:
        title = escape(f"{record.model} for the pipeline at {record.join} (serve --join: pid {record.pid})")
        table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
        for column in ("process", "pid", "state", "up", "restarts", "stage of", "layers", "address"):
            table.add_column(column, no_wrap=True, justify="right" if column in ("pid", "restarts") else "left")
        for row in rows:
            if row["serve_pid"] == record.pid:
                up = "" if row["uptime_s"] is None else duration(int(row["uptime_s"]))
                layers = "" if row["num_layers"] is None else _layers_text(row["first_layer"], row["num_layers"])
                first = [row["name"], _text(row["pid"]), _coloured(row["state"]), up, str(row["restarts"])]
                table.add_row(*first, escape(_text(row["worker"])), layers, escape(row["address"]))
        console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_PIPE, highlight=False)
        console.width = max(console.width, width_of(table))
        console.print(table)


def _print_table(records: Sequence[ServeRecord], rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_A_PIPE, highlight=False)
    for record in records:
        title = escape(f"{', '.join(record.models)} on {record.url}/v1 (serve: pid {record.pid})")
        table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
        for column in ("process", "pid", "state", "up", "restarts", "requests", "drafts", "KV blocks", "runs on"):
            is_short = column != "KV blocks"
            table.add_column(column, no_wrap=is_short, justify="right" if column in ("pid", "restarts") else "left")
        table.add_column("address", overflow="fold")
        for row in rows:
            if row["serve_pid"] == record.pid:
                table.add_row(*_cells(row))
        if not sys.stdout.isatty():
            console.width = max(WIDTH_OF_A_PIPE, width_of(table))
        if width_of(table) <= console.width:
            console.print(table)
        else:
            _print_narrowly(console, title, [row for row in rows if row["serve_pid"] == record.pid])


def _print_narrowly(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print each process on a line of its own, with its other figures below it. The terminal wraps long lines."""
    console.print(title, style="bold", soft_wrap=True)
    for row in rows:
        name, pid, state, up, restarts, requests, drafts, blocks, place, address = _cells(row)
        first = [f"pid {pid}" if pid else "", state, f"up {up}" if up else "", f"restarts {restarts}", requests]
        console.print(f"{name}  {', '.join(filter(None, first))}", soft_wrap=True)
        below = {"drafts": drafts, "KV blocks": blocks, "runs on": place, "address": address}
        for figure, text in below.items():
            if text:
                console.print(f"    {figure}: {text}", soft_wrap=True)


def _cells(row: Mapping[str, Any]) -> list[str]:
    from rich.markup import escape

    since = f" for {duration(int(row['silent_s']))}" if row.get("silent_s") is not None else ""
    state = _coloured(row["state"], since)
    requests = drafts = blocks = ""
    if row.get("kv_blocks") is not None:
        requests = f"{row['requests_running']} run, {row['requests_waiting']} wait"
        blocks = f"{row['kv_blocks_free']} free of {row['kv_blocks']}, {row['kv_blocks_cached']} cached"
        named = {"evicted": "evicted", "restored": "restored", "read": "from disk", "received": "from other workers"}
        blocks += "".join(f", {row[f'kv_blocks_{n}']} {text}" for n, text in named.items() if row[f"kv_blocks_{n}"])
        if row["state_slots"]:
            blocks += f"; states: {row['states_saved']} of {row['state_slots']} saved"
        if row["window_slots"]:
            blocks += f"; windows: {row['window_slots_held']} of {row['window_slots']} held"
        if row["kv_disk_slots"]:
            blocks += f"; disk: {row['kv_disk_blocks']} of {row['kv_disk_slots']}"
            if row["kv_blocks_not_written"]:
                blocks += f", {row['kv_blocks_not_written']} not written"
    if row.get("draft_tokens"):
        drafts = f"{row['draft_tokens_accepted'] / row['draft_tokens']:.0%} of {row['draft_tokens']} accepted"
        drafts += f" ({', '.join(row['draft_tokens_by_proposer'])})"
    up = "" if row["uptime_s"] is None else duration(int(row["uptime_s"]))
    place = _place_of(row)
    figures = [requests, drafts, blocks]
    name = row["name"] if row.get("serves") in (None, "both") else f"{row['name']} ({row['serves']})"
    return [name, _text(row["pid"]), state, up, str(row["restarts"]), *figures, place, escape(row["address"])]


def _coloured(state: str, since: str = "") -> str:
    colour = _COLOURS.get(state, "yellow")
    return f"[{colour}]{state}{since}[/{colour}]"


def _place_of(row: Mapping[str, Any]) -> str:
    """The CPUs, and the share of the worker's allocated memory that is on their node."""
    if row.get("cpus_allowed") is None:
        return ""
    stages = [f"stage {number}: {_layers_of(stage)}" for number, stage in enumerate(row["stages"])]
    if row["ranks"]:
        # Those of a pipeline are with its stages.
        return "; ".join(stages or _places_of_ranks(row["ranks"]))
    place = f"CPUs {row['cpus_allowed']}"
    node, by_node = row["numa_node"], row["anonymous_bytes"]
    if node is not None and any(by_node.values()):
        place += f", {by_node.get(str(node), 0) / sum(by_node.values()):.0%} of memory on node {node}"
    return "; ".join((place, *stages))


def _layers_of(stage: Mapping[str, Any]) -> str:
    layers = _layers_text(stage["first_layer"], stage["num_layers"])
    where = "" if stage["address"] is None else f" on {stage['address']}"
    total_s = stage["compute_s"] + stage["wait_s"]
    waited = f", waited {stage['wait_s'] / total_s:.0%}" if total_s else ""
    ranks = f" ({', '.join(_places_of_ranks(stage['ranks']))})" if stage["ranks"] else ""
    return f"{layers}{where}{waited}{ranks}"


def _places_of_ranks(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"rank {number}: {_place_of_rank(rank)}" for number, rank in enumerate(ranks)]


def _layers_text(first: int, count: int) -> str:
    return f"layer {first}" if count == 1 else f"layers {first} to {first + count - 1}"


def _place_of_rank(rank: Mapping[str, Any]) -> str:
    node = "" if rank["numa_node"] is None else f" on node {rank['numa_node']}"
    return f"CPUs {rank['cpus']}{node}"


def _text(value: object) -> str:
    return "" if value is None else str(value)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="A JSON list of objects with role, name, address, state, ...")
@click.option("--port", type=click.IntRange(1, 65535), help="Only the server on this port of this host.")
@click.option("--url", help="Show all workers of the fleet behind this gateway, such as http://10.0.0.5:8000.")
@click.option("--model", help="With --url: only the workers of this model.", shell_complete=complete_served_models)
@watch_option
@operator_options
@click.pass_context
def status(
    ctx: click.Context,
    as_json: bool,
    port: int | None,
    url: str | None,
    model: str | None,
    watch_s: float | None,
    access: ApiAccess,
) -> None:
    """Show the processes that serve on this host, or with --url all workers of a fleet.

    With --json and --watch, each update is one line. The exit status is 1 if nothing is serving.
    """
    if url is None:
        if model is not None:
            raise click.UsageError("--model is for --url, the workers of a fleet")
        found = watched(lambda: _show_host(port, as_json=as_json, is_watching=watch_s is not None), watch_s)
    else:
        if port is not None:
            raise click.UsageError("--port is for the processes of this host; write the port into --url")
        with FleetClient(url, access) as client:
            look = _FleetLook(client, model, as_json=as_json, is_watching=watch_s is not None)
            found = watched(look.show, watch_s)
    if not found:
        ctx.exit(EXIT_FAILED)


def _show_host(port: int | None, *, as_json: bool, is_watching: bool) -> bool:
    """Print the processes of this host. Returns whether there are any."""
    records = running_serves(port)
    joins = running_joins() if port is None else []
    rows = asyncio.run(_collect_all(records, joins))
    if as_json:
        click.echo(json.dumps(rows, indent=None if is_watching else 2))
    elif records or joins:
        _print_table(records, rows)
        _print_stages(joins, rows)
    else:
        where = "" if port is None else f" on port {port}"
        click.echo(
            f"nothing is being served{where}; headrace serve starts it, and --url shows a fleet elsewhere", err=True
        )
    return bool(records or joins)


class _FleetLook:
    """The workers of a fleet, and with further looks their rates."""

    def __init__(self, client: FleetClient, model: str | None, *, as_json: bool, is_watching: bool) -> None:
        self._client = client
        self._model = model
        self._as_json = as_json
        self._is_watching = is_watching
        self._rates = Rates()

    def show(self) -> bool:
        """Print the workers. Returns whether any takes requests."""
        picture = self._client.picture()
        rows = worker_rows(picture, self._rates.of(picture.workers, time.monotonic()))
        rows = [row for row in rows if self._model in (None, row["model"])]
        if self._model is not None and not rows:
            there_are = ", ".join(sorted({worker.model for worker in picture.workers if worker.model})) or "none"
            click.echo(f"no worker serves the model {self._model}; there is {there_are}", err=True)
        if self._as_json:
            click.echo(json.dumps(rows, indent=None if self._is_watching else 2))
        else:
            print_fleet(picture, rows)
        return any(row["state"] == "ready" for row in rows)
