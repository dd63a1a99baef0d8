"""Whether a process gets on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from headrace.worker.host.progress import Progress, Work, work_of
from tests.patience import until


class Process:
    """A process at a time that a test sets, which has done as much as it says."""

    def __init__(self) -> None:
        self.now_s, self.work = 0.0, Work(0.0, 0)
        self.progress = Progress(1, 80.0, clock=lambda: self.now_s, work=lambda _: self.work)

    def is_lost_at(self, *times_s: float) -> list[bool]:
        """What is found at these times."""
        found = []
        for self.now_s in times_s:
            found.append(self.progress.is_lost())
        return found


def test_a_process_that_stands_still_for_the_bound_is_lost() -> None:
    assert Process().is_lost_at(*range(10, 90, 10)) == [False] * 7 + [True]


def test_one_that_computes_or_reads_is_not() -> None:
    process = Process()
    assert process.is_lost_at(*range(10, 80, 10)) == [False] * 7
    process.work = Work(0.8, 0)
    assert process.is_lost_at(*range(80, 160, 10)) == [False] * 8
    process.work = Work(0.8, 1)
    assert process.is_lost_at(*range(160, 250, 10)) == [False] * 8 + [True]


def test_what_waiting_threads_take_is_no_progress() -> None:
    process = Process()
    for number in range(8):
        process.work = Work(0.005 * number, 0)
        found = process.is_lost_at(10.0 * (1 + number))
    assert found == [True]


def test_time_in_which_nobody_looked_counts_little() -> None:
    process = Process()
    assert process.is_lost_at(1000, 1010, 1020) == [False] * 3
    assert process.is_lost_at(*range(1030, 1070, 10)) == [False, False, False, True]


def test_work_that_begins_anew_has_all_of_the_bound() -> None:
    process = Process()
    assert process.is_lost_at(*range(10, 80, 10)) == [False] * 7
    process.progress.begin()
    assert process.is_lost_at(80, 90, 150) == [False, False, False]


def test_the_kernel_says_what_a_process_does(tmp_path: Path) -> None:
    """One that computes gets on, and stands still once it is stopped."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            progress = Progress(process.pid, 0.4)
            began = work_of(process.pid)
            until(lambda: work_of(process.pid).cpu_s > began.cpu_s, "it computes")
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            until(progress.is_lost, "it stands still")
        finally:
            process.kill()
    assert work_of(process.pid) == Work(0.0, 0)
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/stat").write_text("7 (a) b) S 1 7 7 0 -1 4194560 100 0 30 0 250 50 0 0 20 0 1 0 1 1 1")
    (tmp_path / "proc/7/io").write_text("rchar: 9\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 1\n")
    of_seven = Work(300 / os.sysconf("SC_CLK_TCK"), 30 + 12288)
    assert work_of(7, tmp_path) == of_seven
    (tmp_path / "proc/5/task/5").mkdir(parents=True)
    (tmp_path / "proc/5/task/5/children").write_text("7 ")
    assert work_of(5, tmp_path) == of_seven, "of one that waits for those that it has started"
