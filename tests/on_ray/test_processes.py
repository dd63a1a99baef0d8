"""Processes of an actor: started again, given up, and gone with their actor and its raylet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.cli.serving.plan import ProcessSpec
from headrace.ray.processes import Processes, ProcessesError
from tests.e2e.serving import alive
from tests.patience import until


def spec(code: str) -> ProcessSpec:
    return ProcessSpec("worker", "worker", (sys.executable, "-c", code), "127.0.0.1:1")


async def test_a_process_that_dies_is_started_again_and_given_up_after_several_deaths(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    processes = Processes([spec(f"open({str(starts)!r}, 'a').write('x'); raise SystemExit(1)")], 1.0)
    processes.start()

    async def never() -> bool:
        return False

    with pytest.raises(ProcessesError, match="3 restarts within 60 s: worker ended with status 1"):
        await processes.until(never)
    await processes.stop()
    assert len(starts.read_text()) >= 3


async def test_the_sentence_of_a_process_that_refuses_its_arguments_is_told() -> None:
    processes = Processes([spec("print('error: no such model'); raise SystemExit(2)")], 1.0)
    processes.start()

    async def never() -> bool:
        return False

    with pytest.raises(ProcessesError, match="no such model"):
        await processes.until(never)
    await processes.stop()


async def test_it_is_told_if_everything_else_on_the_host_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    log = SimpleNamespace(warning=lambda text, *args: said.append(text % args), info=lambda *args: None)
    monkeypatch.setattr("headrace.ray.processes.log", log)
    for niceness in (0, 15):
        monkeypatch.setattr("headrace.ray.processes.os.getpriority", lambda *which, found=niceness: found)
        processes = Processes([spec("raise SystemExit(0)")], 1.0)
        processes.start()
        await processes.stop()
    assert said == [
        "niceness is 15, so other programs of this host get the CPUs first; start Ray with RAY_worker_niceness=0"
    ]


async def test_a_process_gets_what_the_actor_has_but_not_its_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    seen = tmp_path / "seen"
    told = "os.environ.get('OMP_NUM_THREADS', '-') + os.environ['HF_HUB_OFFLINE']"
    code = f"import os, time; open({str(seen)!r}, 'w').write({told}); time.sleep(600)"
    processes = Processes([spec(code)], 1.0)
    processes.start()

    async def is_seen() -> bool:
        return seen.exists() and len(seen.read_text()) == 2

    await processes.until(is_seen)
    await processes.stop()
    assert seen.read_text() == "-1"


# An actor whose parent, in place of a raylet, can be killed alone. It tells its pid and that of its process.
_ACTOR = """
import asyncio, os, sys
from headrace.cli.serving.plan import ProcessSpec
from headrace.ray.processes import Processes, end_without_raylet

async def run():
    spec = ProcessSpec("worker", "worker", (sys.executable, "-c", "import time; time.sleep(600)"), "127.0.0.1:1")
    processes = Processes([spec], 1.0)
    ending = asyncio.create_task(end_without_raylet(processes.stop, 0.05))
    processes.start()
    while processes.first.pid is None:
        await asyncio.sleep(0.01)
    print(os.getpid(), processes.first.pid, flush=True)
    await ending

asyncio.run(run())
"""
_RAYLET = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.parametrize("victim", ["raylet", "actor"])
def test_no_process_outlives_its_actor_and_no_actor_its_raylet(victim: str) -> None:
    raylet = subprocess.Popen([sys.executable, "-c", _RAYLET, _ACTOR], stdout=subprocess.PIPE, text=True)
    assert raylet.stdout is not None
    actor, process = map(int, raylet.stdout.readline().split())
    os.kill(raylet.pid if victim == "raylet" else actor, signal.SIGKILL)
    until(lambda: not alive(actor) and not alive(process), "both are gone", 10)
    raylet.wait()
    raylet.stdout.close()
