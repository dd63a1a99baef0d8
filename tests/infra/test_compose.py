"""compose.yaml on a real engine: comes up, answers, loses nothing when workers come, go, die or exceed their memory,
and goes down gracefully.

Needs a container engine (tests/infra/engine.py), its Compose plugin, the image `headrace` (docker build -t headrace .)
and a Redis: REDIS_IMAGE, by default that of compose.yaml.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import headrace, until
from tests.infra import engine
from tests.infra.engine import ENTER, PYTHON_IMAGE, ROOT
from tests.patience import patience
from tests.test_readme import Block, blocks_of

PORT, GRPC_PORT = "18000", "18001"
BASE_URL = f"http://127.0.0.1:{PORT}"
PROJECT = "headrace-test"
REDIS_IMAGE = os.environ.get("REDIS_IMAGE", "redis:7-alpine")
NUM_STREAMS, MAX_TOKENS = 6, 160
# What the image may have beyond the one that it is built on, which has 130 MB as its makers publish it.
MOST_OWN_BYTES = 550e6
WORKER_MEMORY_BYTES = 2 << 30
SETTINGS = {
    "COMPOSE_PROJECT_NAME": PROJECT,
    "PORT": PORT,
    "GRPC_PORT": GRPC_PORT,
    "KV_CACHE_GB": "0.25",
    "WORKER_MEMORY": str(WORKER_MEMORY_BYTES),
    "REDIS_IMAGE": REDIS_IMAGE,
    "COMPOSE_FILE": str(ROOT / "compose.yaml"),
}
# Texts can be compared then, whatever else is in a batch.
ACCURATE = (
    "services: { worker: { environment: { HEADRACE_WORKER_EXECUTION_MODE: accuracy, HEADRACE_WORKER_THREADS: '1' } } }"
)
EXCEED = """
import time
taken = []
while True:
    taken.append(bytearray(b"x") * (16 << 20))
    time.sleep(0.01)
"""
# Prefer memory of node 0 (set_mempolicy of x86-64); the status is that of the call.
PREFER = "import ctypes, sys; sys.exit(-ctypes.CDLL(None).syscall(238, 1, ctypes.byref(ctypes.c_ulong(1)), 64))"
# What clients do at the published ports.
CLIENT_BLOCKS = [
    block
    for document in ("README.md", "docs/reference/grpc.md")
    for block in blocks_of((ROOT / document).read_text())
    if block.reason_not_to_run is None and ("127.0.0.1:8000" in block.code or "127.0.0.1:8001" in block.code)
]


def docker(*args: str, check: bool = True, **settings: str) -> str:
    return engine.docker(*args, check=check, **{**SETTINGS, **settings})


def up(num_workers: int) -> None:
    docker(
        *("compose", "up", "-d", "--no-build", "--pull", "never", "--no-recreate", "--wait"),
        *("--scale", f"worker={num_workers}"),
    )


@contextmanager
def other_system(profiles: str, files: str, **settings: str) -> Iterator[Callable[..., str]]:
    """Another set of compose files, up while inside; gives what runs docker with its settings."""
    fill_volume()
    settings = {"COMPOSE_FILE": files, "COMPOSE_PROFILES": profiles, **settings}
    try:
        docker("compose", "up", "-d", "--no-build", "--pull", "never", "--wait", **settings)
        yield lambda *args: docker(*args, **settings)
    finally:
        print(docker("compose", "logs", "--no-color", check=False, **settings)[-8000:])
        docker("compose", "down", "--volumes", **settings)


REASON = engine.why_not("headrace", PYTHON_IMAGE, REDIS_IMAGE, compose=True)
pytestmark = [pytest.mark.skipif(REASON is not None, reason=REASON or ""), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    override = tmp_path_factory.mktemp("compose") / "accurate.yaml"
    override.write_text(ACCURATE)
    SETTINGS["COMPOSE_FILE"] += f":{override}"
    fill_volume()
    begun_s = time.monotonic()
    try:
        up(num_workers=1)
    except AssertionError:
        print(docker("compose", "logs", "--no-color", check=False)[-8000:])
        docker("compose", "down", "--volumes")
        raise
    print(f"healthy {time.monotonic() - begun_s:.1f} s after docker compose up")
    yield
    print(docker("compose", "logs", "--no-color", check=False)[-8000:])
    docker("compose", "down", "--volumes")


def fill_volume() -> None:
    """Have the model in the volume, so that nothing is fetched."""
    docker("compose", "down", "--volumes")
    labels = (f"com.docker.compose.project={PROJECT}", "com.docker.compose.volume=models")
    engine.make_models_volume(f"{PROJECT}_models", *labels)


def client(*args: object) -> subprocess.Popen[str]:
    """Clients of another process, see tests/infra/stream_client.py."""
    command = [*ENTER, sys.executable, "-m", "tests.infra.stream_client", BASE_URL, *map(str, args)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the clients have failed"
    return line.strip()


def results_of(process: subprocess.Popen[str]) -> list[list[Any]]:
    """Text, number of tokens, reason of the finish, error, and whether the end came, of each stream."""
    found: list[list[Any]] = json.loads(line_of(process))
    assert process.wait(patience(60)) == 0
    return found


@pytest.fixture(scope="module")
def undisturbed(composed: None) -> list[list[Any]]:
    """The results of streams without a failure."""
    process = client("streams", NUM_STREAMS, MAX_TOKENS)
    assert line_of(process) == "begun"
    results = results_of(process)
    assert [result[1:] for result in results] == [[MAX_TOKENS, "length", None, True]] * NUM_STREAMS
    return results


def metrics() -> list[str]:
    return subprocess.check_output([*ENTER, "curl", "-s", f"{BASE_URL}/metrics"], text=True).splitlines()


def workers_with(metric: str) -> list[str]:
    """Containers of the workers for which this metric is not 0."""
    lines = [line for line in metrics() if line.startswith(f"{metric}{{") and float(line.split()[-1]) > 0]
    return [line.split('worker="')[1].split("/")[0] for line in lines]


def until_workers_are_known(count: int) -> None:
    until(lambda: len(workers_with("headrace_worker_up")) == count, f"{count} workers are up", 60)


def container(service: str, index: int = 1) -> str:
    return f"{PROJECT}-{service}-{index}"


@contextmanager
def load(num_clients: int) -> Iterator[subprocess.Popen[str]]:
    """Requests without end while inside; outside none of them has failed."""
    process = client("load", num_clients)
    try:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        outcome = json.loads(line_of(process))
        assert outcome["errors"] == []
        assert outcome["finished"] > 0
    finally:
        process.kill()
        process.wait()


def more(process: subprocess.Popen[str], count: int) -> None:
    """Wait until this many more requests have ended."""
    assert process.stdin is not None
    print(count, file=process.stdin, flush=True)
    assert line_of(process) == "done"


def answer(question: str, **fields: Any) -> dict[str, Any]:
    """The system's answer to a question, as the gateway sends it."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 32, **fields}
    ask = [*ENTER, "curl", "-s", f"{BASE_URL}/v1/chat/completions", "-H", "Content-Type: application/json"]
    answered: dict[str, Any] = json.loads(subprocess.check_output([*ask, "-d", json.dumps(body)]))
    return answered


def capital() -> str:
    """The system's answer for the capital of France, if it responds."""
    return str(answer("What is the capital of France?")["choices"][0]["message"]["content"])


@pytest.mark.usefixtures("composed")
def test_everything_is_healthy() -> None:
    found = [json.loads(line) for line in docker("compose", "ps", "--all", "--format", "json").splitlines()]
    states = {service["Name"]: (service["State"], service["Health"], service["ExitCode"]) for service in found}
    running = [
        container("gateway"),
        container("redis"),
        container("redis-responses"),
        container("router"),
        container("router", 2),
        container("worker"),
    ]
    assert states == dict.fromkeys(running, ("running", "healthy", 0)) | {
        container("kv-memory"): ("running", "healthy", 0),
        **{container(name): ("exited", "", 0) for name in ("pull", "secrets")},
    }
    whole, base = (image["Size"] for image in json.loads(docker("image", "inspect", "headrace", PYTHON_IMAGE)))
    print(f"the image has {whole / 1e6:.0f} MB, {base / 1e6:.0f} of them in the one that it is built on")
    assert whole - base < MOST_OWN_BYTES


@pytest.mark.usefixtures("composed")
@pytest.mark.parametrize("block", CLIENT_BLOCKS, ids=lambda block: block.language)
def test_the_examples_of_the_readme_work_at_the_published_ports(block: Block) -> None:
    code = block.code.replace("127.0.0.1:8000", f"127.0.0.1:{PORT}").replace("127.0.0.1:8001", f"127.0.0.1:{GRPC_PORT}")
    command = ["bash", "-euo", "pipefail", "-c", code] if block.language == "bash" else [sys.executable, "-c", code]
    done = subprocess.run(
        [*ENTER, *command], cwd=ROOT, capture_output=True, text=True, timeout=patience(60), check=False
    )
    assert done.returncode == 0, done.stderr
    said = re.sub(r'data: .*?"content":"([^"]*)".*\n*', r"\1", done.stdout)
    assert ("Paris" if "capital of France" in block.code else '"content": "') in said


@pytest.mark.usefixtures("composed")
def test_containers_run_without_root_and_on_a_root_that_cannot_be_written() -> None:
    for name in (container("gateway"), container("router", 2), container("worker")):
        assert docker("exec", name, "id", "-u").strip() == "10001"
        status = dict(line.split(":", 1) for line in docker("exec", name, "cat", "/proc/1/status").splitlines())
        assert status["Uid"].split() == ["10001"] * 4
        assert {int(status[kind], 16) for kind in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
        assert status["NoNewPrivs"].strip() == "1"
        for path in ("/x", "/opt/headrace/x", "/home/headrace/x"):
            refused = docker("exec", name, "sh", "-c", f"touch {path} 2>&1", check=False)
            assert "Read-only file system" in refused


@pytest.mark.usefixtures("composed")
def test_workers_come_and_go_under_load() -> None:
    with load(num_clients=4) as requests:
        more(requests, 4)
        up(num_workers=3)
        until_workers_are_known(3)
        more(requests, 16)
        up(num_workers=1)
        until_workers_are_known(1)
        more(requests, 4)


def test_a_router_that_is_killed_mid_stream_loses_nothing(undisturbed: list[list[Any]]) -> None:
    process = client("streams", NUM_STREAMS, MAX_TOKENS)
    assert line_of(process) == "begun"
    docker("kill", container("router", 2))
    assert results_of(process) == undisturbed
    up(num_workers=1)


def test_a_worker_that_is_killed_mid_stream_loses_nothing(undisturbed: list[list[Any]]) -> None:
    up(num_workers=2)
    until_workers_are_known(2)
    process = client("streams", NUM_STREAMS, MAX_TOKENS)
    assert line_of(process) == "begun"
    docker("kill", workers_with("headrace_worker_requests_running")[0])
    assert results_of(process) == undisturbed
    up(num_workers=2)


def test_a_worker_that_is_killed_has_its_cached_prefixes_when_it_is_back() -> None:
    up(num_workers=1)
    until_workers_are_known(1)
    question = "Repeat this. " + "A river rises in the hills and runs to the sea. " * 20
    first = answer(question, cache_salt="killed")
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    (worker,) = workers_with("headrace_worker_up")
    docker("kill", worker)
    up(num_workers=1)
    until_workers_are_known(1)
    again = answer(question, cache_salt="killed")
    usage = again["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 64
    assert again["choices"] == first["choices"]


def resident_bytes(name: str) -> int:
    """Memory of the container's first process."""
    return 1024 * int(docker("exec", name, "cat", "/proc/1/status").split("VmRSS:")[1].split()[0])


def limit_memory(name: str, num_bytes: int) -> None:
    docker("update", "--memory", str(num_bytes), "--memory-swap", str(num_bytes), name)


def test_a_worker_that_exceeds_its_memory_is_started_again_and_its_streams_go_on(undisturbed: list[list[Any]]) -> None:
    up(num_workers=2)
    until_workers_are_known(2)
    process = client("streams", NUM_STREAMS, MAX_TOKENS)
    assert line_of(process) == "begun"
    victim = workers_with("headrace_worker_requests_running")[0]
    inspect = ("inspect", "-f", "{{.RestartCount}} {{.State.StartedAt}}", victim)
    restarts, started_at = docker(*inspect).split()
    # The kernel ends whoever has most of the memory of the container: with so little left, the worker, not what takes
    # the rest.
    limit_memory(victim, resident_bytes(victim) + (128 << 20))
    with subprocess.Popen(["docker", "exec", victim, "python", "-c", EXCEED], stderr=subprocess.DEVNULL) as eater:
        until(lambda: docker(*inspect).split()[1] != started_at, "the worker is started again", 60)
        limit_memory(victim, WORKER_MEMORY_BYTES)
        eater.wait(patience(60))
    assert int(docker(*inspect).split()[0]) > int(restarts)
    assert results_of(process) == undisturbed
    until_workers_are_known(2)


def test_what_is_answered_while_all_goes_down_is_answered_to_the_end(undisturbed: list[list[Any]]) -> None:
    since = str(time.time())
    process = client("streams", NUM_STREAMS, MAX_TOKENS)
    assert line_of(process) == "begun"
    docker("compose", "down")
    assert results_of(process) == undisturbed
    ends = docker(
        *("events", "--since", since, "--until", str(time.time()), "--filter", "event=die"),
        *("--filter", f"label=com.docker.compose.project={PROJECT}"),
        *("--format", "{{.Actor.Attributes.name}} {{.Actor.Attributes.exitCode}}"),
    )
    codes = dict(line.split() for line in ends.splitlines())
    assert {container("gateway"), container("router"), container("router", 2), container("worker")} <= set(codes)
    assert codes.pop(container("kv-memory")) == "137"  # It only holds memory, and compose.yaml has it killed.
    assert set(codes.values()) == {"0"}


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a CPU for each of two workers is needed")
def test_a_server_with_two_nodes_has_a_worker_on_the_cores_of_each() -> None:
    files = f"{ROOT / 'compose.yaml'}:{ROOT / 'deploy/compose/two-socket.yaml'}"
    with other_system("", files, WORKER_CPUS="0", WORKER_1_CPUS="1") as compose:
        until_workers_are_known(2)
        for service, cpu in (("worker", "0"), ("worker-1", "1")):
            status = compose("exec", container(service), "cat", "/proc/1/status")
            assert status.split("Cpus_allowed_list:")[1].split()[0] == cpu
            compose("exec", container(service), "python", "-c", PREFER)
        assert "Paris" in capital()


def test_a_host_of_a_fleet_comes_up_on_its_own_address(tmp_path: Path) -> None:
    files = str(ROOT / "deploy/compose/host.yaml")
    made = headrace("certs", "create", str(tmp_path / "certificates"))
    assert made.returncode == 0, made.stderr
    subprocess.run(["chown", "-R", "10001:10001", str(tmp_path / "certificates")], check=True)
    settings = {"HOST_ADDRESS": "127.0.0.1", "REDIS_URL": "rediss://127.0.0.1:6379/0"}
    settings["TLS_DIR"] = str(tmp_path / "certificates")
    with other_system("front,redis,two-socket", files, **settings) as compose:
        until_workers_are_known(2)
        assert "Paris" in capital()
        plain = ("exec", "-e", "HEADRACE_TLS_DIR=", "-e", "HEADRACE_JOIN_TOKEN_FILE=", container("router"))
        asked = ("sh", "-c", "headrace health 127.0.0.1:50051 || true")
        assert compose(*plain, *asked).startswith("not serving: no answer from 127.0.0.1:50051")
