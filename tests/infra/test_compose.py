"""compose.yaml on a real engine: comes up, answers, loses nothing when a worker is killed, goes down gracefully.

Needs a container engine, its Compose plugin and the image `headrace` (docker build -t headrace .); where clients must
enter a network namespace to reach published ports, HEADRACE_TEST_ENTER has the command that runs another one there.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.model_cache import model_directory
from tests.e2e.serving import MODEL, headrace

ROOT = Path(__file__).parent.parent.parent
PORT = "18000"
ENTER = shlex.split(os.environ.get("HEADRACE_TEST_ENTER", ""))
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
STORY = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}


def docker(*args: str, check: bool = True) -> str:
    environment = {**os.environ, "PORT": PORT, "GRPC_PORT": "18001", "KV_CACHE_GB": "0.5"}
    done = subprocess.run(["docker", *args], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout


def why_not() -> str | None:
    """Why no compose test can run here; None if it can."""
    try:
        for command in (("info",), ("compose", "version"), ("image", "inspect", "headrace")):
            if subprocess.run(["docker", *command], capture_output=True, check=False, timeout=20).returncode:
                return f"docker {' '.join(command)} fails here"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no container engine answers here: {error}"
    return None


REASON = why_not()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=REASON or ""), pytest.mark.timeout(400)]


def curl(path: str, body: dict[str, object]) -> list[str]:
    return [
        *ENTER,
        "curl",
        "-sN",
        f"http://127.0.0.1:{PORT}{path}",
        "-H",
        "Content-Type: application/json",
        "-d",
        json.dumps(body),
    ]


@pytest.fixture(scope="module")
def composed() -> Iterator[None]:
    pulled = headrace("pull", MODEL, timeout_s=600)
    assert pulled.returncode == 0, pulled.stderr
    docker("volume", "create", "headrace_models")
    mount = Path(json.loads(docker("volume", "inspect", "headrace_models"))[0]["Mountpoint"])
    target = mount / "models" / "served"
    if not target.exists():
        subprocess.run(["mkdir", "-p", str(target.parent)], check=True)
        subprocess.run(["cp", "-r", str(model_directory(MODEL).resolve()), str(target)], check=True)
        subprocess.run(["chown", "-R", "10001:10001", str(mount)], check=True)
    docker("compose", "up", "-d", "--no-build", "--pull", "never", "--wait", "--scale", "worker=2")
    yield
    docker("compose", "down")


@pytest.mark.usefixtures("composed")
def test_a_client_at_the_published_port_gets_its_answer() -> None:
    answer = json.loads(subprocess.check_output(curl("/v1/chat/completions", QUESTION)))
    assert "Paris" in answer["choices"][0]["message"]["content"]


@pytest.mark.usefixtures("composed")
def test_a_worker_that_is_killed_mid_stream_loses_nothing() -> None:
    with subprocess.Popen(curl("/v1/completions", STORY), stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        received = [client.stdout.readline() for _ in range(40)]
        docker("kill", busy_worker())
        received += client.stdout.readlines()
    events = [line.removeprefix("data: ").strip() for line in received if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert not any('"error"' in event for event in events)
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"


def busy_worker() -> str:
    """The container of the worker that is generating."""
    metrics = [*ENTER, "curl", "-s", f"http://127.0.0.1:{PORT}/metrics"]
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for line in subprocess.check_output(metrics, text=True).splitlines():
            if line.startswith("headrace_worker_requests_running{") and float(line.split()[-1]) > 0:
                return line.split('worker="')[1].split("/")[0]
    raise AssertionError("no worker is busy")


@pytest.mark.usefixtures("composed")
def test_containers_run_without_root_and_on_a_root_that_cannot_be_written() -> None:
    name = docker("compose", "ps", "-q", "gateway").split()[0]
    assert docker("exec", name, "id", "-u").strip() == "10001"
    assert docker("inspect", "-f", "{{.HostConfig.ReadonlyRootfs}}", name).strip() == "true"
