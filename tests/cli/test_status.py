"""`headrace status`: rows merged from record, router and gateway."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from rich.table import Table

from headrace.cli.fleet import status
from headrace.cli.fleet.run_state import (
    JoinRecord,
    JoinState,
    ProcessRecord,
    RunState,
    ServeRecord,
    make_socket_directory,
    own_start_ticks,
    running_joins,
    running_serves,
    runtime_directory,
)
from headrace.cli.fleet.status import (
    _cells,
    _print_stages,
    _print_table,
    _reached_here,
    collect,
    collect_stages,
    row_of,
    stage_row_of,
)
from headrace.cli.fleet.tables import console_for
from headrace.cli.main import cli
from headrace.protos import router_pb2, router_pb2_grpc, stage_pb2, stage_pb2_grpc, worker_pb2

WORKER = ProcessRecord("worker-0", "worker", 11, "unix:/w", "starting", 0, 100.0)
ROUTER = ProcessRecord("router", "router", 12, "unix:/r", "starting", 0, 100.0)
GATEWAY = ProcessRecord("gateway", "gateway", 13, "http://127.0.0.1:9", "starting", 0, 100.0)
BINDING = worker_pb2.Binding(
    cpus_allowed="0-3",
    memory_policy="prefer:1",
    memory=[
        worker_pb2.NodeMemory(node=0, resident_bytes=200, anonymous_bytes=100),
        worker_pb2.NodeMemory(node=1, resident_bytes=300, anonymous_bytes=300, kv_bytes=200),
    ],
    kv_huge_bytes=150,
)
LOAD = worker_pb2.Load(
    num_running=2,
    num_waiting=1,
    num_blocks=100,
    num_free_blocks=90,
    num_cached_blocks=5,
    counters=worker_pb2.Counters(
        blocks_restored=3,
        blocks_given_up=8,
        blocks_read=4,
        blocks_not_written=9,
        blocks_received=5,
        blocks_taken_over=2,
        blocks_evicted=6,
        prompt_tokens_cached=100,
        prompt_tokens_from_disk=30,
        prompt_tokens_from_peers=10,
    ),
    num_disk_blocks=40,
    num_state_slots=7,
    num_saved_states=4,
    num_window_slots=30,
    num_held_window_slots=12,
    num_disk_slots=50,
    numa_node=1,
    binding=BINDING,
)


def record(port: int = 9, **changes: object) -> ServeRecord:
    made = ServeRecord(
        pid=os.getpid(),
        start_ticks=own_start_ticks(),
        url=f"http://127.0.0.1:{port}",
        host="127.0.0.1",
        port=port,
        grpc_port=0,
        models=("m",),
        router_address="unix:/nowhere/router.sock",
        socket_directory="/nowhere",
        processes=(WORKER, GATEWAY, ROUTER),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def info(state: int, *, load: bool = True) -> router_pb2.WorkerInfo:
    return router_pb2.WorkerInfo(worker_id="worker-0", model="m", state=state, load=LOAD if load else None)


def test_a_worker_shows_what_the_router_knows_of_it() -> None:
    row = row_of(record(), WORKER, {"worker-0": info(router_pb2.WORKER_STATE_READY)}, True, 107.5)
    assert row == {
        "role": "worker",
        "name": "worker-0",
        "pid": 11,
        "address": "unix:/w",
        "state": "ready",
        "restarts": 0,
        "uptime_s": 7.5,
        "serve_pid": os.getpid(),
        "port": 9,
        "silent_s": None,
        "model": "m",
        "serves": "both",
        "kv_blocks": 100,
        "kv_blocks_free": 90,
        "kv_blocks_cached": 5,
        "state_slots": 7,
        "states_saved": 4,
        "window_slots": 30,
        "window_slots_held": 12,
        "kv_blocks_evicted": 6,
        "kv_blocks_given_up": 8,
        "kv_blocks_restored": 3,
        "kv_blocks_read": 4,
        "kv_blocks_not_written": 9,
        "kv_blocks_received": 5,
        "kv_blocks_taken_over": 2,
        "kv_disk_blocks": 40,
        "kv_disk_slots": 50,
        "cached_tokens": {"memory": 60, "disk": 30, "peers": 10},
        "requests_running": 2,
        "requests_waiting": 1,
        "draft_tokens": 0,
        "draft_tokens_accepted": 0,
        "draft_tokens_by_proposer": {},
        "numa_node": 1,
        "cpus_allowed": "0-3",
        "memory_policy": "prefer:1",
        "resident_bytes": {"0": 200, "1": 300},
        "anonymous_bytes": {"0": 100, "1": 300},
        "kv_resident_bytes": {"0": 0, "1": 200},
        "kv_huge_bytes": 150,
        "ranks": [],
        "stages": [],
    }
    assert "disk: 40 of 50, 9 not written" in _cells(row)[7]


@pytest.mark.parametrize(
    ("known", "state"),
    [
        (router_pb2.WORKER_STATE_DRAINING, "draining"),
        (router_pb2.WORKER_STATE_SUSPECT, "suspect"),
        (router_pb2.WORKER_STATE_UNREACHABLE, "starting"),
    ],
)
def test_a_worker_that_takes_no_requests_is_not_ready(known: int, state: str) -> None:
    assert row_of(record(), WORKER, {"worker-0": info(known)}, True, 0)["state"] == state


@pytest.mark.parametrize(("report_age_ms", "state"), [(0, "starting"), (3_000, "unreachable"), (9_000, "starting")])
def test_a_lost_worker_is_unreachable_if_this_process_of_it_has_reported(report_age_ms: int, state: str) -> None:
    lost = info(router_pb2.WORKER_STATE_UNREACHABLE)
    lost.report_age_ms = report_age_ms
    assert row_of(record(), WORKER, {"worker-0": lost}, True, WORKER.started_s + 5)["state"] == state


@pytest.mark.parametrize(("report_age_ms", "state"), [(3_000, "not answering"), (9_000, "starting")])
def test_a_worker_that_hangs_is_not_answering_since_its_last_report(report_age_ms: int, state: str) -> None:
    hung = info(5)  # WORKER_STATE_NOT_ANSWERING
    hung.report_age_ms = report_age_ms
    row = row_of(record(), WORKER, {"worker-0": hung}, True, WORKER.started_s + 5)
    assert row["state"] == state
    if state == "not answering":
        assert row["silent_s"] == 3.0
        assert "not answering for 3 s" in _cells(row)[2]


def test_a_router_that_is_silent_is_unreachable_and_its_workers_are_unknown() -> None:
    states = [row_of(record(), each, None, True, 0, is_router_silent=True)["state"] for each in (ROUTER, WORKER)]
    assert states == ["unreachable", "unknown"]


async def test_a_frozen_process_is_stopped_and_a_frozen_router_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_ASK_TIMEOUT_S", 0.2)
    with subprocess.Popen(["sleep", "60"]) as frozen, socket.socket(socket.AF_UNIX) as silent:
        try:
            frozen.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, frozen.pid, os.WSTOPPED)  # noqa: ASYNC222
            silent.bind(str(tmp_path / "r.sock"))
            silent.listen()
            processes = (replace(WORKER, pid=frozen.pid), replace(ROUTER, pid=os.getpid()))
            rows = await collect(record(router_address=f"unix:{tmp_path / 'r.sock'}", processes=processes))
        finally:
            frozen.kill()
    assert [row["state"] for row in rows] == ["stopped", "unreachable"]


@pytest.mark.parametrize("state", ["restarting", "stopping", "failed"])
def test_what_the_supervisor_says_of_a_dead_process_outweighs_old_reports(state: str) -> None:
    dead = replace(WORKER, state=state, pid=None)
    row = row_of(record(), dead, {"worker-0": info(router_pb2.WORKER_STATE_READY)}, True, 0)
    assert (row["state"], row["pid"], row["uptime_s"]) == (state, None, None)


def test_while_the_router_is_silent_nothing_is_made_up() -> None:
    assert row_of(record(), WORKER, None, False, 0)["kv_blocks"] is None
    assert row_of(record(), ROUTER, None, False, 0)["state"] == "starting"
    assert row_of(record(), GATEWAY, None, False, 0)["state"] == "starting"
    unreported = {"worker-0": info(router_pb2.WORKER_STATE_UNREACHABLE, load=False)}
    assert row_of(record(), WORKER, unreported, False, 0)["kv_blocks"] is None


def test_a_worker_that_has_not_read_its_binding_shows_none() -> None:
    unread = info(router_pb2.WORKER_STATE_READY)
    unread.load.ClearField("binding")
    unread.load.ClearField("numa_node")
    row = row_of(record(), WORKER, {"worker-0": unread}, True, 0)
    assert row["kv_blocks"] == 100
    fields = ("numa_node", "cpus_allowed", "memory_policy", "resident_bytes", "anonymous_bytes", "kv_resident_bytes")
    assert [row[field] for field in (*fields, "kv_huge_bytes")] == [None] * 7


def test_a_divided_worker_is_one_row_with_its_ranks() -> None:
    divided = info(router_pb2.WORKER_STATE_READY)
    divided.load.ranks.add(numa_node=0, cpus="0-3", step_seconds=10, wait_seconds=4)
    divided.load.ranks.add(numa_node=1, cpus="4-7", step_seconds=10, wait_seconds=1)
    row = row_of(record(), WORKER, {"worker-0": divided}, True, 0)
    assert row["ranks"] == [
        {"numa_node": 0, "cpus": "0-3", "step_s": 10, "wait_s": 4},
        {"numa_node": 1, "cpus": "4-7", "step_s": 10, "wait_s": 1},
    ]
    assert "rank 0: CPUs 0-3 on node 0; rank 1: CPUs 4-7 on node 1" in _cells(row)


def test_a_pipeline_is_one_row_with_its_stages() -> None:
    first = info(router_pb2.WORKER_STATE_READY)
    first.load.stages.add(num_layers=13, compute_seconds=9, wait_seconds=1)
    first.load.stages.add(address="10.0.0.6:50071", first_layer=13, num_layers=1)
    row = row_of(record(), WORKER, {"worker-0": first}, True, 0)
    assert row["stages"] == [
        {"address": None, "first_layer": 0, "num_layers": 13, "compute_s": 9, "wait_s": 1, "ranks": []},
        {"address": "10.0.0.6:50071", "first_layer": 13, "num_layers": 1, "compute_s": 0, "wait_s": 0, "ranks": []},
    ]
    own = "CPUs 0-3, 75% of memory on node 1"
    assert f"{own}; stage 0: layers 0 to 12, waited 10%; stage 1: layer 13 on 10.0.0.6:50071" in _cells(row)
    # Both stages divide their layers.
    for ranks in (first.load.ranks, *(stage.ranks for stage in first.load.stages)):
        ranks.add(numa_node=0, cpus="0-3")
        ranks.add(cpus="4-7")
    row = row_of(record(), WORKER, {"worker-0": first}, True, 0)
    ranks_told = "(rank 0: CPUs 0-3 on node 0, rank 1: CPUs 4-7)"
    stages = f"stage 0: layers 0 to 12, waited 10% {ranks_told}; stage 1: layer 13 on 10.0.0.6:50071 {ranks_told}"
    assert stages in _cells(row)


async def test_the_table_says_where_a_worker_runs_and_how_much_of_its_memory_is_there(
    router: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = record(router_address=router)
    _print_table([shown], await collect(shown))
    assert "CPUs 0-3, 75% of memory on node 1" in capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 80, 120])
async def test_a_narrow_terminal_shows_every_figure_whole(
    router: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = record(router_address=router)
    rows = await collect(shown)
    _print_table([shown], rows)
    told = capsys.readouterr().out
    for row in rows:
        for text in (row["name"], f"pid {row['pid']}", row["state"], f"address: {row['address']}"):
            assert text in told
    assert "runs on: CPUs 0-3, 75% of memory on node 1" in told
    assert "…" not in told


def test_a_table_is_never_cut(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    table = Table(box=None)
    for number in range(12):
        table.add_column(f"column {number}", no_wrap=True)
    table.add_row(*(f"value-{number}" for number in range(12)))
    console_for(table).print(table)
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [[f"value-{n}" for n in range(12)]]


@pytest.mark.parametrize("is_narrow", [False, True])
def test_brackets_in_names_and_addresses_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_narrow: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_narrow)
    shown = record(models=("chat[/v2]", "[red]"), url="http://[fd00::5]:8000")
    listening = replace(GATEWAY, address="http://[fd00::5]:8000")
    _print_table([shown], [row_of(shown, listening, None, True, 107.5)])
    told = capsys.readouterr().out
    assert "chat[/v2], [red] on http://[fd00::5]:8000/v1" in told
    assert told.count("http://[fd00::5]:8000") == 2


class _Router(router_pb2_grpc.RouterServicer):
    async def ListWorkers(
        self, request: router_pb2.ListWorkersRequest, context: object
    ) -> router_pb2.ListWorkersResponse:
        return router_pb2.ListWorkersResponse(workers=[info(router_pb2.WORKER_STATE_READY)])


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[str]:
    address = f"unix:{tmp_path / 'r.sock'}"
    server = grpc.aio.server()
    router_pb2_grpc.add_RouterServicer_to_server(_Router(), server)
    server.add_insecure_port(address)
    await server.start()
    yield address
    await server.stop(None)


def test_the_role_of_a_worker_is_beside_its_name() -> None:
    known = info(router_pb2.WORKER_STATE_READY)
    known.role = worker_pb2.ROLE_PREFILL
    row = row_of(record(), WORKER, {"worker-0": known}, True, 107.5)
    assert (row["serves"], _cells(row)[0]) == ("prefill", "worker-0 (prefill)")


async def test_rows_come_from_a_live_router(router: str) -> None:
    worker, gateway, routing = await collect(record(router_address=router))
    assert (worker["state"], worker["kv_blocks_free"]) == ("ready", 90)
    assert (gateway["state"], routing["state"]) == ("starting", "ready")


JOINED = JoinRecord(
    pid=os.getpid(),
    start_ticks=own_start_ticks(),
    model="m",
    join="10.0.0.5:50070",
    processes=(
        ProcessRecord("stage-0", "stage", 21, "unix:/a", "starting", 1, 100.0),
        ProcessRecord("stage-1", "stage", None, "unix:/b", "restarting", 2, 100.0),
    ),
)
OWN_STATE = stage_pb2.GetStageStateResponse(
    state=stage_pb2.STAGE_STATE_READY, worker="worker-0 on a", first_layer=13, num_layers=17, compute_seconds=2.5
)


class _Stage(stage_pb2_grpc.StageServicer):
    async def GetStageState(
        self, request: stage_pb2.GetStageStateRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> stage_pb2.GetStageStateResponse:
        return OWN_STATE


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[str]:
    address = f"unix:{tmp_path / 's.sock'}"
    server = grpc.aio.server()
    stage_pb2_grpc.add_StageServicer_to_server(_Stage(), server)
    server.add_insecure_port(address)
    await server.start()
    yield address
    await server.stop(None)


async def test_stages_that_have_joined_say_whose_they_are_and_what_they_compute(
    stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = JOINED.processes
    shown = replace(JOINED, processes=(replace(first, address=stage), second))
    computing, restarting = rows = await collect_stages(shown)
    uptime_s = computing.pop("uptime_s")
    assert uptime_s > 100
    assert computing == {
        "role": "stage",
        "name": "stage-0",
        "pid": 21,
        "address": stage,
        "state": "ready",
        "restarts": 1,
        "serve_pid": os.getpid(),
        "port": None,
        "model": "m",
        "join": "10.0.0.5:50070",
        "worker": "worker-0 on a",
        "first_layer": 13,
        "num_layers": 17,
        "compute_s": 2.5,
    }
    assert (restarting["state"], restarting["worker"], restarting["num_layers"]) == ("restarting", None, None)
    computing["uptime_s"] = uptime_s
    _print_stages([shown], rows)
    printed = capsys.readouterr().out
    assert f"m for the pipeline at 10.0.0.5:50070 (serve --join: pid {os.getpid()})" in printed
    assert "worker-0 on a" in printed
    assert "layers 13 to 29" in printed
    assert stage in printed


@pytest.mark.parametrize(
    ("state", "is_silent", "expected"),
    [
        (stage_pb2.STAGE_STATE_WAITING, False, "waiting"),
        (stage_pb2.STAGE_STATE_LOADING, False, "loading"),
        (None, True, "unreachable"),
        (None, False, "starting"),
    ],
)
def test_a_stage_without_layers_has_a_state(state: stage_pb2.StageState | None, is_silent: bool, expected: str) -> None:
    found = None if state is None else stage_pb2.GetStageStateResponse(state=state)
    row = stage_row_of(JOINED, replace(JOINED.processes[0], pid=None), found, 107.5, is_silent=is_silent)
    assert row["state"] == expected
    assert (row["worker"], row["first_layer"], row["num_layers"]) == (None, None, None)


@pytest.mark.parametrize(
    ("listens", "reached"),
    [("0.0.0.0:5", "127.0.0.1:5"), ("[::]:5", "[::1]:5"), ("10.0.0.6:5", "10.0.0.6:5"), ("unix:/a", "unix:/a")],
)
def test_a_stage_is_asked_where_this_host_reaches_it(listens: str, reached: str) -> None:
    assert _reached_here(listens) == reached


def test_a_host_that_only_joined_shows_its_stages_and_serves_nothing(cache: Path) -> None:
    (runtime_directory() / "stages-1.json").write_text("{}")
    state = JoinState()
    assert not list(runtime_directory().iterdir()), "what a killed one left is gone"
    state.write(JOINED)
    assert running_serves() == []
    result = CliRunner().invoke(cli, ["status", "--json"])
    assert result.exit_code == 0
    assert [(row["name"], row["state"]) for row in json.loads(result.stdout)] == [
        ("stage-0", "starting"),
        ("stage-1", "restarting"),
    ]
    assert "for the pipeline at 10.0.0.5:50070" in CliRunner().invoke(cli, ["status"]).stdout
    assert CliRunner().invoke(cli, ["status", "--port", "9"]).exit_code == 1
    state.remove()
    assert running_joins() == []


def test_nothing_running_is_said_with_status_1(cache: Path) -> None:
    result = CliRunner().invoke(cli, ["status"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "nothing is being served; headrace serve starts it, and --url shows a fleet elsewhere\n"
    as_json = CliRunner().invoke(cli, ["status", "--json"])
    assert (as_json.exit_code, json.loads(as_json.stdout)) == (1, [])


def test_each_process_of_each_serve_is_listed(cache: Path) -> None:
    RunState(9).write(record(9))
    RunState(10).write(record(10))
    rows = json.loads(CliRunner().invoke(cli, ["status", "--json"]).stdout)
    assert [(row["port"], row["name"]) for row in rows] == [
        (port, name) for port in (9, 10) for name in ("worker-0", "gateway", "router")
    ]
    one = CliRunner().invoke(cli, ["status", "--port", "10"])
    assert one.exit_code == 0
    assert "worker-0" in one.stdout
    assert "127.0.0.1:10/v1" in one.stdout
    assert "127.0.0.1:9/v1" not in one.stdout


def test_the_record_of_a_serve_that_was_killed_counts_for_nothing(cache: Path) -> None:
    RunState(9).write(record(9, start_ticks=1))
    (runtime_directory() / "serve-11.json").write_text("{")
    assert running_serves() == []


def test_a_record_is_gone_with_its_sockets(cache: Path) -> None:
    directory = make_socket_directory(9)
    (directory / "router.sock").touch()
    written = record(9, socket_directory=str(directory))
    state = RunState(9)
    state.write(written)
    assert running_serves(9) == [written]
    state.remove(written)
    assert list(runtime_directory().iterdir()) == []


def test_the_next_serve_sweeps_what_a_killed_one_left(cache: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    RunState(9).write(record(9, start_ticks=1, socket_directory=str(make_socket_directory(9))))
    RunState(10).write(record(10, start_ticks=1, socket_directory=str(elsewhere)))
    directory = make_socket_directory(11)
    assert list(runtime_directory().iterdir()) == [directory]
    assert elsewhere.exists()


def test_two_serves_on_one_port_of_different_hosts_have_records_and_sockets_of_their_own(cache: Path) -> None:
    first = record(9, socket_directory=str(make_socket_directory(9)))
    RunState(9).write(first)
    second = record(9, socket_directory=str(make_socket_directory(9)))
    assert first.socket_directory != second.socket_directory
    state = RunState(9)
    state.write(second)
    assert len(running_serves(9)) == 2
    state.remove(second)
    assert running_serves(9) == [first]


def test_sockets_have_short_paths_and_are_private(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    directory = make_socket_directory(9)
    assert len(str(directory)) < 60
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.rmdir()


def test_a_runtime_directory_that_others_may_enter_is_refused(cache: Path) -> None:
    runtime_directory().chmod(0o755)
    result = CliRunner().invoke(cli, ["status"])
    assert result.exit_code == 2
    assert "must be a directory that belongs to this user alone" in result.stderr
