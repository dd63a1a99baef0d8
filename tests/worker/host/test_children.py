"""What a process has started ends before it becomes another program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# In a process of its own, because the test runner has started others.
_PROGRAM = """
import os, signal, subprocess
from headrace.worker.host.children import end_children
started = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
os.kill(started[0].pid, signal.SIGSTOP)
end_children()
print(*(child.pid for child in started))
end_children()
"""


def test_all_children_are_gone_and_leave_nothing_to_wait_for() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    pids = done.stdout.split()
    assert len(pids) == 2
    assert not any(Path("/proc", pid).exists() for pid in pids)
