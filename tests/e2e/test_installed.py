"""The wheel, installed into an empty environment, serves the demo model from an empty directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.distributions import ROOT, built_sdist, built_wheel
from tests.e2e.serving import HTTP, MODEL, Serve
from tests.patience import patience

pytestmark = pytest.mark.e2e

INSTALL_BOUND_S = 240.0


@pytest.mark.timeout(600)
def test_a_wheel_without_extras_answers(tmp_path: Path) -> None:
    wheel_dir, empty = tmp_path / "wheel", tmp_path / "empty"
    wheel_dir.mkdir()
    empty.mkdir()
    wheel = built_wheel(built_sdist(tmp_path), wheel_dir)
    environment = tmp_path / "environment"
    # That of the tests installs into the environment, so none has to be installed there.
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "--no-compile"]
    for command in (
        [sys.executable, "-m", "venv", "--without-pip", environment],
        [*pip, "--quiet", "--constraint", ROOT / "constraints.txt", "--only-binary", ":all:", wheel],
    ):
        done = subprocess.run(command, cwd=empty, capture_output=True, text=True, timeout=patience(INSTALL_BOUND_S))
        assert done.returncode == 0, done.stderr
    serve = Serve("--port", "0", program=[str(environment / "bin" / "headrace")], cwd=empty)
    try:
        serve.until_ready()
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        answer = HTTP.post(f"{serve.base_url}/v1/chat/completions", json={**asked, "max_tokens": 16, "temperature": 0})
    finally:
        serve.end()
    assert "Paris" in answer.json()["choices"][0]["message"]["content"], serve.tail()
    assert not list(empty.iterdir()), "it leaves nothing where it was started"
