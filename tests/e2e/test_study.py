"""A study of real servers: stopped in the middle, continued by the same command, and its summary."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.small_model import small_model
from tests.patience import patience

pytestmark = pytest.mark.e2e
PATIENCE_S = 60
# The command, with the shortest of loads: what is measured does not matter here.
BRIEF = """
import runpy
from dataclasses import replace
from headrace.bench.study import recipes
recipes.QUICK = replace(recipes.QUICK, seconds=0.5, capacity_prompts=4)
runpy.run_module("headrace.bench", run_name="__main__")
"""


def begin(directory: Path, peers: str) -> subprocess.Popen[str]:
    flags = ("--quick", "--only", "4", "--peers", peers, "--no-install", "--directory", str(directory))
    argv = [sys.executable, "-c", BRIEF, "study", "--model", str(small_model()), *flags]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def runs(directory: Path) -> dict[str, dict[str, Any]]:
    return {file.stem: json.loads(file.read_text()) for file in directory.glob("runs/4_*.json")}


def test_a_study_that_is_stopped_goes_on_with_the_next_run(tmp_path: Path) -> None:
    peer = "openvino-genai" if importlib.util.find_spec("openvino_genai") else "none"
    study = begin(tmp_path, peer)
    deadline_s = time.monotonic() + patience(PATIENCE_S)
    # Stopped while a server runs: that of the run after the first.
    while not (runs(tmp_path) and (tmp_path / "logs/server.pid").exists()):
        assert study.poll() is None, study.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    study.send_signal(signal.SIGTERM)
    _, words = study.communicate(timeout=patience(PATIENCE_S))
    assert study.returncode == 130, words
    assert "stopped; the same command continues with the next run" in words
    assert not (tmp_path / "logs/server.pid").exists()  # the server has been stopped, too
    before = runs(tmp_path)

    study = begin(tmp_path, peer)
    tables, words = study.communicate(timeout=patience(PATIENCE_S))
    assert study.returncode == 0, words
    after = runs(tmp_path)
    assert all(after[key] == run for key, run in before.items())
    servers = {"headrace"} if peer == "none" else {"headrace", peer}
    assert {(run["run"]["server"], run["run"]["kv_tokens"]) for run in after.values()} == {
        (server, tokens) for server in servers for tokens in (4096, 32_768)
    }
    for run in after.values():
        assert run["result"]["completed"] == run["run"]["num_prompts"]
        assert run["result"]["headrace"]["findings"] == []
        assert set(run["result"]["headrace"]["finish_reasons"]) == {"length"}
        assert run["server"]["cpu_s"] > 0
        assert run["server"]["memory_bytes"] > 10 << 20
        assert (run["server"]["preemptions"] is None) is (run["run"]["server"] != "headrace")
    # The same requests for all servers, counted by each itself.
    lengths = {
        (run["run"]["kv_tokens"], run["result"]["total_input_tokens"], run["result"]["total_output_tokens"])
        for run in after.values()
    }
    assert len(lengths) == 2
    assert "4. Throughput by KV memory" in tables
    assert (tmp_path / "summary.html").read_text().count("<svg") == 3
