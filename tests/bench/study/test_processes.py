"""Servers as processes: ready, watched, stopped with their children, and plain words when they do not start."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.bench.process_tree import descendants
from headrace.bench.study import processes
from headrace.bench.study.processes import Command, ServerError, end_left_over, started
from headrace.common.ports import free_port

# A server that lists its models, with a child that would outlive it.
SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "2"); self.end_headers(); self.wfile.write(b"{}")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVER


def command(code: str, port: int) -> Command:
    return Command([sys.executable, "-c", code, str(port)], {})


async def seen(code: str, log: Path) -> tuple[float, int, list[int]]:
    """CPU time and memory of the server, and its processes, which have ended afterwards."""
    port = free_port("127.0.0.1")
    async with started("a server", command(code, port), port, log, 60) as server:
        server.check()
        pid, _ = map(int, (log.parent / "server.pid").read_text().split())
        pids = [process.pid for process in descendants(pid)]
        return server.cpu_s(), server.memory_bytes(), pids


def has_ended(pids: list[int]) -> bool:
    """Whether all have, after a moment for those that were killed."""
    for _ in range(1000):
        if not any(descendants(pid) for pid in pids):
            return True
        time.sleep(0.01)
    return False


def test_a_server_is_watched_with_its_children_and_leaves_no_file_behind(tmp_path: Path) -> None:
    cpu_s, memory_bytes, pids = asyncio.run(seen(SERVER, tmp_path / "a.log"))
    assert cpu_s > 0
    assert memory_bytes > 1 << 20
    assert len(pids) == 2
    assert has_ended(pids)
    assert not (tmp_path / "server.pid").exists()


def test_a_server_that_does_not_end_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_STOP_S", 0.2)
    _, _, pids = asyncio.run(seen(STUBBORN, tmp_path / "a.log"))
    assert has_ended(pids)


def test_a_server_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(
        ServerError, match=r"a server ended with status 3; the last lines of .*a\.log:\n    no such model"
    ):
        asyncio.run(seen("print('no such model', flush=True); raise SystemExit(3)", tmp_path / "a.log"))


def test_a_program_that_is_missing_is_named(tmp_path: Path) -> None:
    async def start() -> None:
        async with started("a server", Command(["/no/such/python"], {}), 1, tmp_path / "a.log", 1):
            pass

    with pytest.raises(ServerError, match="a server: cannot start /no/such/python: No such file or directory"):
        asyncio.run(start())


def test_a_server_that_a_killed_study_left_behind_is_ended(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (own,) = descendants(process.pid)
    file = tmp_path / "server.pid"
    file.write_text(f"{process.pid} {own.began}")
    end_left_over(file)
    assert process.wait(10) != 0
    assert not file.exists()


def test_another_process_with_the_number_of_an_earlier_server_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "server.pid"
    file.write_text(f"{os.getpid()} 1")
    end_left_over(file)
    assert not file.exists()
