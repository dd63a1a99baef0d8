"""The files of deploy/ray as docs/how-to/ray.md runs them: `ray start --head`, `serve deploy`, `serve run`; and a
model whose last worker stops and whose first one starts for a request that waits.

`python -m tests.soak ray` runs it. tests/deploy/test_ray.py holds the files to the parser of `serve deploy` in every
run.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.ray_head import LONG_S, SLOW_PROXIES, Head, running_head
from tests.e2e.serving import HTTP, MODEL, pulled_model
from tests.e2e.small_model import small_model
from tests.patience import patience, until
from tests.ports import free_port

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.environ.get("HEADRACE_SOAK") != "1", reason="minutes: python -m tests.soak ray"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="make .venv/.ray installs it"),
]

FILES = Path(__file__).parents[2] / "deploy" / "ray"
# Of a model without workers, until the last one is stopped.
DOWN_DELAY_S = 5.0


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    pulled_model()
    with running_head() as running:
        yield running


def copied(name: str, directory: Path, of_model: Mapping[str, Any] | None = None) -> tuple[Path, str]:
    """A file of ours with a free port for Serve's proxies, and their URL. `of_model` changes its only model."""
    config = yaml.safe_load((FILES / name).read_text())
    port = free_port()
    config["http_options"] = {**config.get("http_options", {}), "port": port}
    if of_model is not None:
        (application,) = config["applications"]
        (model,) = application["args"]["models"]
        model.update(of_model)
    path = directory / name
    path.write_text(yaml.safe_dump(config))
    return path, f"http://127.0.0.1:{port}"


def answer(url: str) -> str:
    """The text of a chat's answer through Serve's proxy."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
    response = HTTP.post(f"{url}/v1/chat/completions", json=body, timeout=patience(LONG_S))
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


@contextmanager
def serve_run(head: Head, path: Path) -> Iterator[None]:
    """`serve run FILE` in the foreground: the application runs inside, and is ended as with Ctrl-C. Runs it again while
    Serve's proxies start."""
    process = _start_serve_run(head, path)
    try:
        while not _runs(head, process):
            said = _said(head)
            assert SLOW_PROXIES in said, said
            process = _start_serve_run(head, path)
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(patience(LONG_S))


def _start_serve_run(head: Head, path: Path) -> subprocess.Popen[bytes]:
    with (head.log.parent / "serve-run.log").open("wb") as log:
        return subprocess.Popen(
            [head.program("serve"), "run", str(path), "--address", head.address],
            env=head.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _runs(head: Head, process: subprocess.Popen[bytes]) -> bool:
    """Wait until the application runs, or its command has ended. Whether it runs."""
    until(lambda: process.poll() is not None or head.is_running(), "the application runs", LONG_S)
    return process.poll() is None


def _said(head: Head) -> str:
    """What `serve run` wrote."""
    return (head.log.parent / "serve-run.log").read_text()


def ended(head: Head) -> bool:
    """Whether nothing of headrace runs any more."""
    return not head.processes()


def test_serve_deploy_runs_the_sample_file(head: Head, tmp_path: Path) -> None:
    path, url = copied("serve.yaml", tmp_path)
    began_s = time.monotonic()
    head.serve("deploy", str(path))
    until(head.is_running, "the application runs", LONG_S)
    assert answer(url)
    print(f"serve deploy to the first answer: {time.monotonic() - began_s:.0f} s")
    assert yaml.safe_load(head.serve("status"))["applications"]["headrace"]["status"] == "RUNNING"
    assert len(head.processes("gateway")) == len(head.processes("router")) == 2
    assert len(head.processes("worker")) == 1
    head.serve("shutdown", "--yes")
    until(lambda: ended(head), "all processes end", LONG_S)


def test_serve_run_runs_the_sample_of_ray_serve_llm_until_it_is_interrupted(head: Head, tmp_path: Path) -> None:
    path, url = copied("llm-config.yaml", tmp_path)
    with serve_run(head, path):
        assert answer(url)
    until(lambda: ended(head), "all processes end", LONG_S)


def test_the_last_worker_stops_and_the_first_one_starts_for_a_request_that_waits(head: Head, tmp_path: Path) -> None:
    # Answers of two processes are compared.
    flags = {"max_num_seqs": 8, "execution_mode": "accuracy"}
    bounds = {"min_workers": 0, "max_workers": 1, "scaling": {"down_delay_s": DOWN_DELAY_S}}
    model = {"model": str(small_model()), "name": MODEL, "flags": flags, **bounds}
    path, url = copied("serve.yaml", tmp_path, model)
    head.serve("deploy", str(path))
    until(head.is_running, "the application runs without a worker", LONG_S)
    texts = []
    for _ in range(2):
        assert head.processes("worker") == []
        began_s = time.monotonic()
        texts.append(answer(url))
        print(f"the first request after a pause: {time.monotonic() - began_s:.1f} s")
        assert len(head.processes("worker")) == 1
        until(lambda: head.processes("worker") == [], "the worker stops", LONG_S)
    assert texts[0] == texts[1] != ""
    head.serve("shutdown", "--yes")
    until(lambda: ended(head), "all processes end", LONG_S)
