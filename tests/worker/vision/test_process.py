"""The process that encodes images: what crashes, hangs or grows there ends one image, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.protos.status import Reason
from headrace.worker.config import ConfigurationError
from headrace.worker.vision import process
from headrace.worker.vision.child import NOT_A_NUMBER, TOO_LARGE
from headrace.worker.vision.encoder import NOT_ENCODED, Setting, UnsupportedModelError
from headrace.worker.vision.job import EncodeJob
from headrace.worker.vision.process import ENDED_TWICE, HANGS, NOT_STARTED, EncoderProcess
from tests.patience import patience, until
from tests.worker.vision.fake_child import HIDDEN_SIZE, NUM_LAYERS

MODULE = "tests.worker.vision.fake_child"
SETTING = Setting("model", 1 << 20, 1, "performance", 1 << 30, HIDDEN_SIZE, NUM_LAYERS)


class Run:
    """A process, and the jobs that have ended."""

    def __init__(self, setting: Setting = SETTING, **options: float) -> None:
        self.bell = threading.Event()
        self.process = EncoderProcess(setting, self.bell.set, module=MODULE, **options)  # type: ignore[arg-type]
        self.ended: list[EncodeJob] = []

    def ask(self, *files: str) -> list[EncodeJob]:
        jobs = [EncodeJob(file.encode(), file.encode(), "auto", int(file.split()[1])) for file in files]
        for job in jobs:
            self.process.encode(job)
        return jobs

    def wait(self, *jobs: EncodeJob) -> None:
        """Wait until these have ended."""
        until(lambda: self._take() and all(job in self.ended for job in jobs), "the end of images", 60)

    def _take(self) -> bool:
        self.ended += self.process.take_ended()
        return True


@contextmanager
def running(setting: Setting = SETTING, **options: float) -> Iterator[Run]:
    run = Run(setting, **options)
    try:
        yield run
    finally:
        run.process.close()
        assert run.process.pid == 0


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with running() as found:
        yield found


def test_states_have_the_tokens_of_their_image(run: Run) -> None:
    assert run.process.bytes_per_token == 4 * HIDDEN_SIZE * (1 + NUM_LAYERS)
    jobs = run.ask("see 5", "see 900", "see 1")
    run.wait(*jobs)
    for job, count in zip(jobs, (5, 900, 1), strict=True):
        assert job.states is not None
        assert job.states.deepstack is not None
        assert job.states.states.shape == (count, HIDDEN_SIZE)
        assert job.states.deepstack.shape == (NUM_LAYERS, count, HIDDEN_SIZE)
        assert (job.states.states == count).all()
        assert (job.states.deepstack == 7).all()
        assert job.begun_s > 0
    assert run.process.rate.tokens_per_s > 0
    assert run.bell.is_set()


@pytest.mark.parametrize(
    ("file", "reason", "problem"),
    [
        ("refuse 4 is not a picture", Reason.INVALID_FIELD, "is not a picture"),
        ("grow 4", Reason.INVALID_FIELD, TOO_LARGE),
        ("raise 4", Reason.INTERNAL, NOT_ENCODED),
        ("nan 4", Reason.INTERNAL, NOT_A_NUMBER),
    ],
)
def test_what_fails_ends_one_image_of_a_batch(run: Run, file: str, reason: Reason, problem: str) -> None:
    num_restarts = run.process.num_restarts
    bad, good = run.ask(file, "see 4")
    run.wait(bad, good)
    assert (bad.reason, bad.problem, bad.states) == (reason, problem, None)
    assert good.states is not None
    assert run.process.num_restarts == num_restarts


@pytest.mark.parametrize("verb", ["die", "invent", "rewind"])
def test_an_image_that_ends_the_process_fails_and_its_neighbours_do_not(run: Run, verb: str) -> None:
    num_restarts, num_files = run.process.num_restarts, num_open_files()
    first, bad, last = run.ask("see 2", f"{verb} 4", "see 3")
    run.wait(first, bad, last)
    assert (bad.reason, bad.problem) == (Reason.INVALID_FIELD, ENDED_TWICE)
    assert first.states is not None
    assert last.states is not None
    assert run.process.num_restarts > num_restarts
    assert num_open_files() == num_files
    num_restarts = run.process.num_restarts
    (again,) = run.ask(f"{verb} 4")
    run.wait(again)
    assert (again.reason, again.problem) == (Reason.INVALID_FIELD, ENDED_TWICE)
    assert run.process.num_restarts == num_restarts, "it is not tried again"


def test_an_image_that_has_ended_the_process_is_tried_again_after_a_while(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_s = time.monotonic()
    for count in range(process._MOST_REFUSED + 1):
        run.process._try_again([_twice_tried(b"%d" % count)], Reason.INVALID_FIELD, ENDED_TWICE)
    assert len(run.process._refused) == process._MOST_REFUSED
    run.process._try_again([_twice_tried(b"see 2")], Reason.INVALID_FIELD, ENDED_TWICE)
    (refused,) = run.ask("see 2")
    run.wait(refused)
    assert refused.problem == ENDED_TWICE
    monkeypatch.setattr(run.process, "_clock", lambda: start_s + process._REFUSED_S + 3600)
    (tried,) = run.ask("see 2")
    run.wait(tried)
    assert tried.states is not None


def _twice_tried(digest: bytes) -> EncodeJob:
    return EncodeJob(digest, digest, "auto", 2, num_tries=1)


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_an_image_is_told_that_no_process_starts_and_the_next_one_is_encoded(tmp_path: Path) -> None:
    with running(msgspec.structs.replace(SETTING, model_dir=str(tmp_path))) as run:
        num_files = num_open_files()
        (tmp_path / "lost").touch()
        (job,) = run.ask("die 4")
        run.wait(job)
        assert (job.reason, job.problem) == (Reason.NO_CAPACITY, NOT_STARTED)
        assert run.process.pid == 0
        (tmp_path / "lost").unlink()
        (job,) = run.ask("see 4")
        run.wait(job)
        assert job.states is not None
        assert num_open_files() == num_files


def test_a_failure_of_the_worker_itself_ends_one_image(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(link: socket.socket, shape: tuple[int, ...]) -> None:
        raise MemoryError

    monkeypatch.setattr(process, "receive_floats", fail)
    (job,) = run.ask("see 4")
    run.wait(job)
    assert (job.reason, job.problem) == (Reason.INTERNAL, NOT_ENCODED)
    monkeypatch.undo()
    (job,) = run.ask("see 4")
    run.wait(job)
    assert job.states is not None


def test_an_image_survives_a_process_that_others_end(run: Run, tmp_path: Path) -> None:
    jobs = run.ask(f"die_once 4 {tmp_path / 'died'}", "see 3")
    run.wait(*jobs)
    assert all(job.states is not None for job in jobs)
    gate = tmp_path / "gate"
    (job,) = run.ask(f"wait 4 {gate}")
    until(lambda: job.begun_s > 0, "the image is being encoded")
    pid = run.process.pid
    os.kill(pid, signal.SIGKILL)
    gate.touch()
    run.wait(job)
    assert job.states is not None
    assert run.process.pid != pid


def test_a_process_that_hangs_is_ended(tmp_path: Path) -> None:
    with running(stuck_after_s=patience(0.2)) as run:
        run.wait(*run.ask("see 4"))
        hanging, next_one = run.ask("hang 300", "see 4")
        run.wait(hanging, next_one)
        assert (hanging.reason, hanging.problem) == (Reason.INTERNAL, HANGS)
        assert next_one.states is not None
        assert run.process.num_restarts == 1


def test_a_process_warms_up_at_the_start_and_not_when_an_image_waits(tmp_path: Path) -> None:
    """Nothing depends on it: here it fails."""
    with running(msgspec.structs.replace(SETTING, model_dir=str(tmp_path))) as run:
        run.wait(*run.ask("see 4"))
        assert (tmp_path / "warm").read_text() == "warm\n"
        (job,) = run.ask(f"die_once 4 {tmp_path / 'died'}")
        run.wait(job)
        assert job.states is not None
        assert run.process.num_restarts == 1
        assert (tmp_path / "warm").read_text() == "warm\n"


def test_a_dropped_image_is_not_encoded(run: Run, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    first, dropped, last = run.ask(f"wait 300 {gate}", "see 299", "see 3")
    until(lambda: first.begun_s > 0, "the first image")
    run.process.drop(dropped)
    gate.touch()
    run.wait(first, last)
    assert dropped not in run.ended
    assert np.isclose(dropped.begun_s, 0.0)


def test_closing_ends_the_process_in_the_middle_of_an_image() -> None:
    with running() as run:
        (job,) = run.ask("hang 4")
        until(lambda: job.begun_s > 0, "the image")
        pid = run.process.pid
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("is_paused", [False, True])
def test_the_process_dies_with_its_worker_in_the_middle_of_an_image(is_paused: bool) -> None:
    program = (
        "import sys, time\n"
        "from headrace.worker.vision.job import EncodeJob\n"
        "from headrace.worker.vision.process import EncoderProcess\n"
        "from tests.worker.vision.test_process import MODULE, SETTING\n"
        "process = EncoderProcess(SETTING, lambda: None, module=MODULE)\n"
        "job = EncodeJob(b'', b'hang 4', 'auto', 4)\n"
        "process.encode(job)\n"
        "while not job.begun_s: time.sleep(0.01)\n"
        f"if {is_paused}: process.pause()\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(1e6)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        child = int(worker.stdout.readline())
        worker.kill()
        worker.wait()
    until(lambda: not Path(f"/proc/{child}").exists() or _is_zombie(child), "the end of the process")


def _is_zombie(pid: int) -> bool:
    return _state(pid) in "Z "


def _state(pid: int) -> str:
    """The kernel's letter for the state of a process; a space if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return " "


def test_a_paused_process_stands_still_until_it_is_resumed(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with running() as run:
        run.process.resume()
        (job,) = run.ask(f"wait 4 {gate}")
        until(lambda: job.begun_s > 0, "the image")
        for is_last in (False, False, True):
            run.process.pause()
            run.process.pause()
            until(lambda: _state(run.process.pid) == "T", "the pause")
            if is_last:  # a process that runs ends the image once the gate is there
                gate.touch()
            assert not run.process.take_ended()
            run.process.resume()
            assert _state(run.process.pid) != "T"
        run.wait(job)
        assert job.states is not None
        assert run.process.num_restarts == 0


def test_a_paused_process_that_is_killed_is_replaced_by_one_that_runs(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with running() as run:
        (job,) = run.ask(f"wait 4 {gate}")
        until(lambda: job.begun_s > 0, "the image")
        first = run.process.pid
        run.process.pause()
        gate.touch()
        os.kill(first, signal.SIGKILL)
        run.wait(job)
        assert job.states is not None
        assert run.process.pid not in (0, first)
        run.process.resume()
        (job,) = run.ask("see 4")
        run.wait(job)
        assert job.states is not None


def test_closing_ends_a_paused_process() -> None:
    with running() as run:
        pid = run.process.pid
        run.process.pause()
    assert not Path(f"/proc/{pid}").exists()
    run.process.pause()
    run.process.resume()


def test_a_tower_that_cannot_be_opened_is_told_at_the_start() -> None:
    setting = msgspec.structs.replace(SETTING, model_dir="no tower")
    with pytest.raises(ConfigurationError, match="did not start"):
        EncoderProcess(setting, lambda: None, module=MODULE)
    strange = msgspec.structs.replace(SETTING, model_dir="strange tower")
    with pytest.raises(UnsupportedModelError, match="its tower is of an unknown form"):
        EncoderProcess(strange, lambda: None, module=MODULE)
