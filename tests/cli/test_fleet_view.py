"""The commands for a fleet behind a gateway: status, models, drain, undrain, explain and top with --url."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from google.protobuf.json_format import MessageToDict

from headrace.cli.fleet.fleet_view import WORKER_COLUMNS, Rates, model_rows, worker_rows
from headrace.cli.fleet.gateway_access import FleetPicture
from headrace.cli.fleet.top import Fleet, Screen, pressed, screen_of
from headrace.cli.main import cli
from headrace.protos import router_pb2
from headrace.protos.worker_pb2 import ROLE_PREFILL, Counters, Load
from tests.http_server import http_server, respond
from tests.patience import until

ADMIN = "an admin key of some length"


def worker(name: str, *, model: str = "m", tokens: int = 0, running: int = 0, **fields: Any) -> router_pb2.WorkerInfo:
    counters = Counters(
        tokens_generated=tokens,
        steps=tokens,
        infer_us=tokens * 30_000,
        overhead_us=tokens * 10_000,
        prompt_tokens_computed=tokens,
        prompt_tokens_cached=3 * tokens,
    )
    load = Load(num_running=running, num_blocks=100, num_free_blocks=75, counters=counters)
    state = fields.pop("state", router_pb2.WORKER_STATE_READY)
    return router_pb2.WorkerInfo(
        worker_id=name, address=f"10.0.0.7:{name[-1:]}", state=state, model=model, load=load, **fields
    )


@dataclass
class FakeGateway:
    """Answers as a gateway with an admin key."""

    url: str = ""
    workers: list[router_pb2.WorkerInfo] = field(default_factory=list)
    left: list[int] = field(default_factory=lambda: [0])
    """The requests that a worker has at each further drain."""
    posted: list[tuple[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    has_fleet: bool = True

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.keys.append(handler.headers.get("Authorization"))
        length = int(handler.headers.get("Content-Length") or 0)
        body = json.loads(handler.rfile.read(length)) if length else None
        if body is not None:
            self.posted.append((handler.path, body))
        status, found = self._found(handler.path, body)
        respond(handler, status, json.dumps(found).encode())

    def _found(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/tokenize":
            return 200, {"tokens": [5, 6]}
        if not self.has_fleet:
            return 404, {"error": {"message": f"there is nothing at {path}; the API is at /v1"}}
        if path == "/v1/fleet":
            shown = [
                MessageToDict(each, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
                for each in self.workers
            ]
            model = {"id": "m", "state": "loaded", "problem": "", "alias_of": "", "max_context_tokens": 512}
            return 200, {
                "gateway": {"host": "gw", "version": "1"},
                "routers": [{"address": "r:1", "connected": True}, {"address": "r:2", "connected": False}],
                "problem": "",
                "workers": shown,
                "models": [model, {**model, "id": "best", "alias_of": "m"}],
                "something_new": 1,
            }
        if self.keys[-1] != f"Bearer {ADMIN}" and path != "/v1/fleet/explain":
            return 401, {"error": {"message": "this needs the admin key, as Authorization: Bearer KEY"}}
        if path == "/v1/fleet/drain":
            return 200, {"worker": body["worker"], "num_running": self.left.pop(0)}
        if path == "/v1/fleet/explain":
            return 200, {"worker_id": "w1", "num_prompt_tokens": 2, "workers": [{"worker_id": "w1"}], "new": 1}
        return 200, {"id": "m", "state": "loaded"}


@pytest.fixture
def gateway(cache: Path) -> Iterator[FakeGateway]:
    fake = FakeGateway()
    fake.workers = [
        worker("w1", tokens=10, running=2, num_in_flight=3),
        worker("w2", state=router_pb2.WORKER_STATE_UNREACHABLE, detail="not reached yet", role=ROLE_PREFILL),
    ]
    with http_server(fake.answer, fake.answer) as fake.url:
        yield fake


@pytest.fixture
def admin(tmp_path: Path) -> str:
    (tmp_path / "admin.key").write_text(f"{ADMIN}\n")
    return str(tmp_path / "admin.key")


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, args)


# --- status and models ------------------------------------------------------------------------------------------------


def test_every_worker_of_the_fleet_is_shown_wherever_it_runs(gateway: FakeGateway) -> None:
    done = run("status", "--url", f"{gateway.url}/v1")
    assert done.exit_code == 0
    head, titles, first, second, note = done.stdout.splitlines()
    assert head == "gateway gw 1, routers: r:1; not connected: r:2, 1 of 2 workers ready"
    assert " ".join(titles.split()) == "worker model state in flight running waiting KV used hits step ms address"
    assert " ".join(first.split()) == "w1 m ready 3 2 0 25% 75% 40.0 10.0.0.7:1"
    assert second.split()[:4] == ["w2", "(prefill)", "m", "unreachable"]
    assert note == "w2: not reached yet"


def test_json_has_a_row_for_each_worker_and_unknown_fields_do_not_matter(gateway: FakeGateway) -> None:
    rows = json.loads(run("status", "--url", gateway.url, "--json", "--model", "m").stdout)
    assert [(row["name"], row["state"], row["requests_running"], row["kv_used"]) for row in rows] == [
        ("w1", "ready", 2, 0.25),
        ("w2", "unreachable", 0, 0.25),
    ]
    assert (rows[0]["cached_tokens"]["memory"], rows[0]["tokens_per_s"]) == (30, None)
    assert json.loads(run("status", "--url", gateway.url, "--json", "--model", "other").stdout) == []


def test_a_fleet_without_a_ready_worker_is_status_1(gateway: FakeGateway) -> None:
    gateway.workers = gateway.workers[1:]
    assert run("status", "--url", gateway.url).exit_code == 1


def test_a_model_without_workers_is_told_with_those_that_have_some(gateway: FakeGateway) -> None:
    done = run("status", "--url", gateway.url, "--model", "chat", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (1, [])
    assert done.stderr == "no worker serves the model chat; there is m\n"


@pytest.mark.parametrize("args", [("models",), ("models", "ps")])
def test_models_come_with_the_sums_of_their_workers(gateway: FakeGateway, args: tuple[str, ...]) -> None:
    rows = json.loads(run(*args, "--url", gateway.url, "--json").stdout)
    assert [(row["name"], row["alias_of"], row["workers"], row["workers_ready"]) for row in rows] == [
        ("m", None, 2, 1),
        ("best", "m", 2, 1),
    ]
    assert rows[0]["requests_running"] == 2
    assert "1 of 2" in run(*args, "--url", gateway.url).stdout


def test_models_are_loaded_and_unloaded_with_the_admin_key(gateway: FakeGateway, admin: str) -> None:
    assert run("models", "load", "m", "/there", "--url", gateway.url, "--admin-key-file", admin).exit_code == 0
    assert run("models", "unload", "m", "--url", gateway.url, "--admin-key-file", admin).exit_code == 0
    load, unload = gateway.posted
    assert load == ("/v1/load_model", {"model": "m", "path": "/there"})
    assert unload == ("/v1/unload_model", {"model": "m"})


# --- drain and explain ------------------------------------------------------------------------------------------------


def test_a_worker_anywhere_is_drained_and_taken_back(gateway: FakeGateway, admin: str) -> None:
    access = ("--url", gateway.url, "--admin-key-file", admin)
    assert run("drain", "w1", *access).output == "drained\n"
    gateway.left = [0, 0]
    assert run("undrain", "w1", *access).output == run("drain", "w1", "--undo", *access).output
    assert [body["undo"] for _, body in gateway.posted] == [False, True, True]


def test_a_drain_that_takes_longer_than_its_time_says_how_many_requests_run(gateway: FakeGateway, admin: str) -> None:
    gateway.left = [4] * 100_000
    done = run("drain", "w1", "--url", gateway.url, "--admin-key-file", admin, "--timeout", "0.3")
    assert (done.exit_code, done.output) == (1, "draining: 4 requests still run\n")
    gateway.left = [1] * 100_000
    done = run("drain", "w1", "--url", gateway.url, "--admin-key-file", admin, "--timeout", "0.3")
    assert (done.exit_code, done.output) == (1, "draining: 1 request still runs\n")
    assert all(0 < body["wait_s"] <= 10 for _, body in gateway.posted), "no request outlives a proxy"


def test_without_the_admin_key_the_remedy_is_told(gateway: FakeGateway) -> None:
    done = run("drain", "w1", "--url", gateway.url, "--api-key", "hr-x")
    assert done.exit_code == 1
    assert done.output.endswith("; give it with --admin-key-file\n")
    assert gateway.keys == ["Bearer hr-x"]


def test_a_name_without_a_serve_here_asks_for_the_url(cache: Path) -> None:
    done = run("drain", "worker-0")
    assert done.exit_code == 2
    assert "--url" in done.output


def test_a_placement_is_explained_by_a_gateway_elsewhere(gateway: FakeGateway) -> None:
    done = run("explain", "--url", gateway.url, "hello", "--tenant", "mill", "--session-key", "s", "--max-tokens", "7")
    assert done.exit_code == 0, done.output
    assert "-> w1" in done.stdout
    path, body = gateway.posted[-1]
    assert path == "/v1/fleet/explain"
    assert (body["tokens"], body["tenant"], body["session_key"], body["max_tokens"]) == ([5, 6], "mill", "s", 7)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("status", "--url", "http://127.0.0.1:1"), "no gateway at http://127.0.0.1:1"),
        (("status", "--url", "127.0.0.1:1"), "did you mean http://127.0.0.1:1"),
        (("status", "--url", "http://127.0.0.1:1", "--port", "1"), "--port"),
        (("status", "--model", "m"), "--url"),
        (("models", "--json", "ps"), "after `ps`"),
        (("models", "--json"), "models list and ps"),
        (("models", "--watch"), "models list and ps"),
        (("top", "--sort", "nosuch"), "kv-used"),
        (("top", "--url", "http://127.0.0.1:1", "-n", "1"), "no gateway at"),
        (("drain", "w", "--url", "http://127.0.0.1:1", "--admin-key-file", "/nowhere"), "/nowhere cannot be read"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(cache: Path, args: tuple[str, ...], said: str) -> None:
    done = run(*args)
    assert done.exit_code in (1, 2)
    assert said in done.output
    assert done.output.startswith("error: ")
    assert done.output.count("\n") == 1


def test_an_older_gateway_is_named_as_one(gateway: FakeGateway) -> None:
    gateway.has_fleet = False
    assert "an older version of headrace" in run("status", "--url", gateway.url).output


# --- rates and top ----------------------------------------------------------------------------------------------------


def picture_of(*workers: router_pb2.WorkerInfo) -> FleetPicture:
    return FleetPicture({"host": "gw", "version": "1"}, (), "", workers, ())


def test_rates_are_those_between_two_looks_and_none_after_a_restart() -> None:
    rates = Rates()
    before = picture_of(worker("w1", tokens=100), worker("w2", tokens=100))
    assert [row["tokens_per_s"] for row in worker_rows(before, rates.of(before.workers, 10.0))] == [None, None]
    after = picture_of(worker("w1", tokens=150), worker("w2", tokens=5))
    one, restarted = worker_rows(after, rates.of(after.workers, 15.0))
    assert (one["tokens_per_s"], one["prompt_tokens_per_s"], one["hit_ratio"], one["step_ms"]) == (10, 10, 0.75, 40)
    assert (restarted["tokens_per_s"], restarted["hit_ratio"]) == (None, 0.75)
    idle = worker_rows(after, rates.of(after.workers, 16.0))[0]
    assert (idle["tokens_per_s"], idle["hit_ratio"], idle["step_ms"]) == (0, None, None)


def test_sums_of_a_model_leave_out_what_is_unknown() -> None:
    model = {"id": "m", "state": "loaded", "problem": "", "alias_of": "", "max_context_tokens": None}
    picture = FleetPicture({}, (), "", [worker("w1"), router_pb2.WorkerInfo(worker_id="w2", model="m")], [model])
    (row,) = model_rows(picture, worker_rows(picture))
    assert (row["workers"], row["requests_running"], row["tokens_per_s"], row["kv_used"]) == (2, 0, None, 0.25)


@pytest.mark.parametrize(("wait_s", "shown"), [(3.5, "2"), (9.0, "2, rank 1 is slowest")])
def test_a_rank_for_which_the_others_wait_is_named(wait_s: float, shown: str) -> None:
    divided = worker("w1")
    for waited_s in (wait_s, 3.0):
        divided.load.ranks.add(step_seconds=20, wait_seconds=waited_s)
    (row,) = worker_rows(picture_of(divided))
    (column,) = (column for column in WORKER_COLUMNS if column.title == "ranks")
    assert column.text(row) == shown
    (whole,) = worker_rows(picture_of(worker("w2")))
    assert column.text(whole) == ""


@pytest.mark.parametrize(("wait_s", "shown"), [(3.5, "2"), (9.0, "2, stage 1 is slowest")])
def test_a_stage_for_which_the_others_wait_is_named(wait_s: float, shown: str) -> None:
    pipeline = worker("w1")
    for waited_s in (wait_s, 3.0):
        pipeline.load.stages.add(compute_seconds=20 - waited_s, wait_seconds=waited_s)
    (row,) = worker_rows(picture_of(pipeline))
    (column,) = (column for column in WORKER_COLUMNS if column.title == "stages")
    assert column.text(row) == shown
    (whole,) = worker_rows(picture_of(worker("w2")))
    assert column.text(whole) == ""


@pytest.mark.parametrize(
    ("waits_s", "expected"),
    [((3.0, 3.5), "2 + 2"), ((9.0, 3.0), "2 + 2, rank 1 is slowest"), ((), "2 + 1")],
)
def test_ranks_of_stages_are_counted_for_each(waits_s: Sequence[float], expected: str) -> None:
    pipeline = worker("w1")
    first, second = (pipeline.load.stages.add() for _ in range(2))
    for waited_s in (3.0, 3.5):
        first.ranks.add(step_seconds=20, wait_seconds=waited_s)
    for waited_s in waits_s:
        second.ranks.add(step_seconds=20, wait_seconds=waited_s)
    (row,) = worker_rows(picture_of(pipeline))
    (column,) = (column for column in WORKER_COLUMNS if column.title == "ranks")
    assert column.text(row) == expected


class StandIn:
    """A client with one picture."""

    def __init__(self, *workers: router_pb2.WorkerInfo) -> None:
        self.workers = workers

    def picture(self) -> FleetPicture:
        return picture_of(*self.workers)


def shown(fleet: Fleet, screen: Screen, height: int = 24) -> list[str]:
    from rich.console import Console

    console = Console(width=160, height=height, color_system=None)
    with console.capture() as capture:
        console.print(screen_of(fleet, screen, height))
    return capture.get().splitlines()


def test_keys_sort_filter_scroll_and_end() -> None:
    fleet = Fleet(StandIn(worker("a", running=1), worker("b", running=9), worker("c", model="n")))  # type: ignore[arg-type]
    fleet.look()
    screen = Screen()

    def names() -> list[str]:
        return [row["name"] for row in screen.rows(fleet.workers)]

    assert names() == ["a", "b", "c"]
    for _ in range(4):
        screen.press("s", fleet.names, 10)
    assert (screen.sort, names()) == ("running", ["b", "a", "c"])
    screen.press("r", fleet.names, 10)
    assert names() == ["c", "a", "b"]
    screen.press("f", fleet.names, 10)
    assert (screen.model, names()) == ("m", ["a", "b"])
    screen.press("f", fleet.names, 10)
    screen.press("f", fleet.names, 10)
    assert (screen.model, names()) == (None, ["c", "a", "b"])
    for key in pressed("\x1b[B\x1b[Bx "):
        screen.press(key, fleet.names, 10)
    assert [row["name"] for row in screen.window(screen.rows(fleet.workers), 2)] == ["a", "b"], "not beyond the end"
    screen.press("m", fleet.names, 10)
    assert (screen.view, screen.sort) == ("models", "model")
    screen.press("q", fleet.names, 10)
    assert screen.is_over


def test_a_picture_fits_the_terminal_and_says_what_it_leaves_out() -> None:
    fleet = Fleet(StandIn(*(worker(f"w{number}") for number in range(100, 200))))  # type: ignore[arg-type]
    fleet.look()
    lines = shown(fleet, Screen(sort="waiting"), 20)
    assert len(lines) <= 20
    assert "waiting *" in lines[3]
    assert "1-14 of 100" in lines[-2]


def test_a_gateway_that_is_lost_leaves_the_last_picture_and_says_why(gateway: FakeGateway) -> None:
    from headrace.cli.fleet.fleet_access import OPEN
    from headrace.cli.fleet.gateway_access import FleetClient

    with FleetClient(gateway.url, OPEN) as client:
        fleet = Fleet(client)
        fleet.look()
        gateway.has_fleet = False
        fleet.look()
    assert "older version" in fleet.problem
    assert any("w1" in line for line in shown(fleet, Screen()))


def test_a_pipe_gets_one_picture_after_another(gateway: FakeGateway) -> None:
    done = run("top", "--url", gateway.url, "-n", "2", "--interval", "0.2", "--sort", "running")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("w1", "w2"))] == ["w1", "w2"] * 2
    assert sum(line.startswith("running 2, waiting 0, ") for line in lines) == 2
    assert "tok/s" in lines[-3], "the second picture has rates"
    assert "running" in run("top", "--url", gateway.url, "--models", "-n", "1").stdout


def test_a_terminal_shows_the_fleet_until_a_key_ends_it(gateway: FakeGateway) -> None:
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace.cli", "top", "--url", gateway.url],
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.PIPE,
        env={**{name: value for name, value in os.environ.items() if name != "COLUMNS"}, "TERM": "xterm"},
    )
    os.close(terminal)
    seen = bytearray()

    def shows(text: bytes) -> bool:
        if select.select([main], [], [], 0.05)[0]:
            with contextlib.suppress(OSError):  # the other side is closed
                seen.extend(os.read(main, 65536))
        return text in seen

    try:
        until(lambda: shows(b"w1"), "a worker is shown", 30)
        os.write(main, b"m")
        until(lambda: shows(b"alias of"), "m shows the models", 10)
        os.write(main, b"q")
        until(lambda: shows(b"never") or process.poll() is not None, "q ends it", 10)
        assert (process.returncode, process.stderr and process.stderr.read()) == (0, b"")
    finally:
        process.kill()
        process.communicate()
        os.close(main)
    assert seen.endswith(b"\x1b[?25h\x1b[?1049l"), "the terminal has its cursor and its text back"
