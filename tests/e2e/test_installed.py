"""The wheel, installed into an empty environment, does its work from an empty directory: alone, and with each of the
extras that README and docs tell people to install.

Extras download a gigabyte: `python -m tests.soak packages`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architectures.exports import PYTHON, written_checkpoints
from tests.deploy.distributions import ROOT, built_sdist, built_wheel
from tests.e2e.ray_head import LONG_S, running_head
from tests.e2e.serving import HTTP, MODEL, Serve, pulled_model
from tests.hub import running_hub
from tests.otlp import grpc_receiver
from tests.patience import patience, until

pytestmark = pytest.mark.e2e
extra = pytest.mark.skipif(os.environ.get("HEADRACE_SOAK") != "1", reason="a gigabyte: python -m tests.soak packages")

INSTALL_BOUND_S = 240.0
OF_ALL = {"headrace-gateway", "headrace-router", "headrace-worker"}
QUESTION = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 16,
    "temperature": 0,
}


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """The directory in which all is started, and left as it was."""
    directory = tmp_path / "empty"
    directory.mkdir()
    return directory


def installed(tmp_path: Path, empty: Path, extras: str = "") -> Path:
    """The folder with the commands of a new environment that has the wheel with these extras, such as "[ray]"."""
    (tmp_path / "wheel").mkdir()
    wheel = built_wheel(built_sdist(tmp_path), tmp_path / "wheel")
    environment = tmp_path / "environment"
    # That of the tests installs into the environment, so none has to be installed there.
    pip = [sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install", "--no-compile"]
    for command in (
        [sys.executable, "-m", "venv", "--without-pip", environment],
        [*pip, "--quiet", "--constraint", ROOT / "constraints.txt", "--only-binary", ":all:", f"{wheel}{extras}"],
    ):
        done = subprocess.run(command, cwd=empty, capture_output=True, text=True, timeout=patience(INSTALL_BOUND_S))
        assert done.returncode == 0, done.stderr
    return environment / "bin"


def served_answer(programs: Path, empty: Path, *flags: str) -> str:
    """What `headrace serve` answers to the question."""
    serve = Serve("--port", "0", *flags, program=[str(programs / "headrace")], cwd=empty)
    try:
        serve.until_ready()
        answer = HTTP.post(f"{serve.base_url}/v1/chat/completions", json=QUESTION)
    finally:
        serve.end()
    assert answer.status_code == 200, serve.tail()
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.timeout(600)
def test_a_wheel_without_extras_answers(tmp_path: Path, empty: Path) -> None:
    assert "Paris" in served_answer(installed(tmp_path, empty), empty)
    assert not list(empty.iterdir()), "it leaves nothing where it was started"


@extra
@pytest.mark.timeout(600)
def test_with_otel_it_sends_traces(tmp_path: Path, empty: Path) -> None:
    programs = installed(tmp_path, empty, "[otel]")
    with grpc_receiver() as receiver:
        assert "Paris" in served_answer(programs, empty, "--otlp-endpoint", receiver.url)
        until(lambda: {span.service for span in receiver.spans} >= OF_ALL, "spans arrive")


@extra
@pytest.mark.skipif(not PYTHON.exists(), reason="make .make/architectures/.done makes what writes a checkpoint")
@pytest.mark.timeout(900)
def test_with_export_it_pulls_safetensors(tmp_path: Path, empty: Path) -> None:
    programs = installed(tmp_path, empty, "[export]")
    with running_hub() as hub:
        hub.add_directory("owner/checkpoint", written_checkpoints(["llama"])["llama"])
        places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HEADRACE_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(
            [programs / "headrace", "pull", "owner/checkpoint", "--weights", "int4"],
            cwd=empty,
            env={name: value for name, value in os.environ.items() if name != "HEADRACE_EXPORT_PYTHON"} | places,
            capture_output=True,
            text=True,
            timeout=patience(INSTALL_BOUND_S),
        )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "cache/models/owner--checkpoint:int4/openvino_model.bin").stat().st_size > 0
    assert not list(empty.iterdir()), "it leaves nothing where it was started"


@extra
@pytest.mark.timeout(900)
def test_with_ray_it_starts_a_fleet_on_a_cluster(tmp_path: Path, empty: Path) -> None:
    pulled_model()
    programs = installed(tmp_path, empty, "[ray]")
    with running_head(programs) as head:
        run = [head.program("headrace"), "ray"]
        options = {"cwd": empty, "env": {**head.environment, "RAY_ADDRESS": head.address}, "timeout": patience(LONG_S)}
        up = subprocess.run([*run, "up", MODEL, "--port", "0"], capture_output=True, text=True, **options)
        assert up.returncode == 0, up.stderr + head.logs()
        address = next(word for word in up.stdout.split() if word.startswith("http://"))
        answer = HTTP.post(f"{address.removesuffix('/v1')}/v1/chat/completions", json=QUESTION)
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        down = subprocess.run([*run, "down"], capture_output=True, text=True, **options)
        assert down.returncode == 0, down.stderr
        until(lambda: not head.processes(), "all processes end", LONG_S)
    assert not list(empty.iterdir()), "it leaves nothing where it was started"
