"""A worker that is told to stop."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.patience import patience

BOUND_S = 20.0
# A worker whose model takes a minute to load.
LOADING = """
import time
from headrace.worker import serving

def load(*_):
    print("loading", flush=True)
    time.sleep(60)

serving.load = load
from headrace.worker.__main__ import main
main()
"""


def test_a_worker_that_still_loads_stops_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOADING, "--model", str(tmp_path), "--listen", f"unix:{tmp_path}/worker.sock"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"loading\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(patience(BOUND_S)) == 0
        finally:
            process.kill()
