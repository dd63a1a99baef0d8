from __future__ import annotations

import subprocess
import sys

import pytest

from tests.patience import patience

# A process, up to the end of --help. It prints how many searches there were of all objects
# before modules were left out of them, whether there are searches now, and how many objects are left out.
_PROCESS = """
import gc, runpy, sys

early = 0

def note(phase, info):
    global early
    early += phase == "start" and info["generation"] == 2 and gc.get_freeze_count() == 0

module, *sys.argv[1:] = [*sys.argv[1:], "--help"]
gc.collect()
gc.callbacks.append(note)
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit:
    pass
print(early, gc.isenabled(), gc.get_freeze_count())
"""


@pytest.mark.parametrize("command", ["headrace.worker", "headrace.router", "headrace.gateway", "headrace.cli serve"])
def test_a_process_starts_without_searches_for_garbage(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROCESS, *command.split()],
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=True,
    )
    early, are_on, num_left_out = done.stdout.splitlines()[-1].split()
    assert (early, are_on) == ("0", "True")
    assert int(num_left_out) > 10_000
