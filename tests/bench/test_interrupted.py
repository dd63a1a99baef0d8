"""Ctrl-C during a load: what was finished is told and saved as a part, and the exit status says so."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

from headrace.bench.load import Load, Run
from tests.bench.scripted_server import scripted_server
from tests.bench.test_load import FakeServer, conversation, single
from tests.bench.virtual_time import run

ROOT = Path(__file__).parents[2]


def stopped(server: FakeServer, at_s: float) -> tuple[Run, Load]:
    async def main() -> tuple[Run, Load]:
        load = Load(server, asyncio.get_running_loop().time, 2)
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(at_s, stop.set)
        return await load.open_loop([*single(6), conversation(1.0)], [0.0] * 7, stop), load

    return run(main())


def test_only_finished_requests_are_in_the_records_of_a_run_that_was_stopped() -> None:
    server = FakeServer(10.0)
    done, load = stopped(server, 25.0)
    assert (done.is_partial, [record.number for record in done.records]) == (True, [0, 1, 2, 3])
    assert done.num_open == 3  # two in flight, one waits for its turn
    assert all(record.ended_s <= 25.0 for record in done.records)
    assert done.duration_s == 20.0
    assert len(server.prompts) == 7  # nothing is asked after the end
    assert server.given_up == 2
    assert load.progress.done == 4


def test_a_run_that_ends_by_itself_is_no_part() -> None:
    done, _ = stopped(FakeServer(1.0), 1e6)
    assert (done.is_partial, done.num_open, len(done.records)) == (False, 0, 9)


def test_ctrl_c_tells_and_saves_what_was_finished(tmp_path: Path) -> None:
    saved = tmp_path / "r.json"
    args = ["--num-prompts", "400", "--request-rate", "20", "--input-len", "8", "--output-len", "3"]
    with scripted_server() as url:
        argv = [sys.executable, "-m", "headrace.bench", url, *args, "--result-filename", str(saved), "--model"]
        process = subprocess.Popen(
            [*argv, "ttft=1"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        for line in process.stderr:  # until the progress says that some are answered
            if re.search(r"load: [1-9]\d* of 400 requests, .* tok/s, TTFT \d+ ms, ITL", line):
                break
        process.send_signal(signal.SIGINT)
        told, warned = process.communicate(timeout=120)
    assert process.returncode == 130
    found = json.loads(saved.read_text())
    own = found["headrace"]
    assert own["partial"] is True
    assert 0 < found["completed"] < found["num_prompts"] == 400
    assert "PARTIAL: stopped after " in warned
    assert f"Successful requests:                     {found['completed']}" in told
    assert "STOPPED before the end" in told
