"""Several models on one host, as real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.cli.models.model_cache import cache_directory
from tests.e2e.serving import BOUND_S, HTTP, READY_BOUND_S, Serve, headrace, until
from tests.e2e.small_model import small_model
from tests.gguf_models import TinyModel, write_gguf
from tests.patience import patience
from tests.ports import free_port

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]


@contextmanager
def serving_models(*args: str) -> Iterator[Serve]:
    """`headrace serve` on a free port, ready."""
    serve = Serve("--port", "0", *args)
    try:
        serve.until_ready()
        yield serve
    finally:
        serve.end()


def ask(serve: Serve, model: str, text: str = "Once", **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": text, "max_tokens": 8, "temperature": 0, **fields}
    return httpx.post(f"{serve.base_url}/v1/completions", json=body, timeout=patience(2 * READY_BOUND_S))


def states(serve: Serve) -> dict[str, str]:
    """Model -> its state."""
    answer = HTTP.get(f"{serve.base_url}/v1/models", timeout=patience(BOUND_S)).json()
    return {model["id"]: model["state"] for model in answer["data"]}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights were cut off."""
    copy = tmp_path_factory.mktemp("models") / "damaged"
    shutil.copytree(small_model(), copy, ignore=shutil.ignore_patterns("headrace.json"))
    path = copy / "openvino_model.bin"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return copy


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, damaged: Path) -> Iterator[Serve]:
    """Two models, of which one has two names, and a third that cannot be loaded."""
    path = tmp_path_factory.mktemp("settings") / "models.toml"
    path.write_text(
        f'[[models]]\nmodel = "{small_model()}"\nname = "first"\naliases = ["gpt-4o"]\nkv_cache_gb = 0.1\n'
        f'[[models]]\nmodel = "{small_model()}"\nname = "second"\nkv_cache_gb = 0.1\nmax_context_tokens = 256\n'
        f'[[models]]\nmodel = "{damaged}"\nname = "third"\nkv_cache_gb = 0.1\n'
    )
    with serving_models("--models", str(path)) as serve:
        yield serve


def test_each_model_answers_under_its_names(system: Serve) -> None:
    answers = {name: ask(system, name) for name in ("first", "second", "gpt-4o")}
    assert [answer.status_code for answer in answers.values()] == [200] * 3
    assert [answer.json()["model"] for answer in answers.values()] == ["first", "second", "first"]
    assert len({answer.json()["choices"][0]["text"] for answer in answers.values()}) == 1, "the same weights"


def test_each_model_has_settings_of_its_own(system: Serve) -> None:
    listed = httpx.get(f"{system.base_url}/v1/models", timeout=patience(5)).json()["data"]
    lengths = {model["id"]: model["max_model_len"] for model in listed}
    assert lengths["second"] == 256 < lengths["first"] == lengths["gpt-4o"]


def test_a_model_that_cannot_be_loaded_says_why_and_harms_nobody(system: Serve) -> None:
    until(lambda: states(system)["third"] == "failed", "the third model has failed")
    assert states(system) == {"first": "loaded", "gpt-4o": "loaded", "second": "loaded", "third": "failed"}
    refused = ask(system, "third")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "model_not_loaded"
    assert "model 'third' cannot be loaded: " in refused.json()["error"]["message"]
    assert str(small_model().parent) not in refused.json()["error"]["message"]
    assert ask(system, "first").status_code == 200


def test_an_unknown_model_is_not_found(system: Serve) -> None:
    refused = ask(system, "nosuch")
    assert refused.status_code == 404
    assert "there are 'first', 'gpt-4o', 'second', 'third'" in refused.json()["error"]["message"]


def test_an_alias_is_split_and_changed_while_requests_come(system: Serve) -> None:
    port = str(system.port)
    assert headrace("models", "alias", "split", "first:90,second:10", "--port", port).returncode == 0
    until(lambda: "split" in states(system), "the alias is known")
    with ThreadPoolExecutor(8) as beside:
        answers = list(beside.map(lambda number: ask(system, "split", max_tokens=1), range(200)))
    assert {answer.status_code for answer in answers} == {200}
    num_second = sum(answer.json()["model"] == "second" for answer in answers)
    assert 4 <= num_second <= 40, "nearly five standard deviations around 20"
    assert headrace("models", "alias", "split", "second", "--port", port).stdout == "split is second\n"
    until(lambda: ask(system, "split", max_tokens=1).json()["model"] == "second", "the change is known")
    assert {ask(system, "split", max_tokens=1).json()["model"] for _ in range(20)} == {"second"}
    assert headrace("models", "alias", "split", "--port", port).stdout == "split is removed\n"
    until(lambda: ask(system, "split").status_code == 404, "the alias is gone")
    refused = headrace("models", "alias", "split", "nosuch", "--port", port)
    assert "this host has no model 'nosuch'" in refused.stderr


def test_status_shows_the_model_of_each_worker(system: Serve) -> None:
    workers = {row["name"]: row["model"] for row in system.status() if row["role"] == "worker"}
    assert workers == {"worker-0": "first", "worker-1": "second"}
    assert "first, second, third on http" in headrace("status").stdout


def test_a_killed_worker_comes_back_and_the_other_model_is_not_disturbed(system: Serve) -> None:
    before, other = system.process_of("worker-0"), system.process_of("worker-1")
    os.kill(before["pid"], signal.SIGKILL)
    assert ask(system, "second").status_code == 200
    assert ask(system, "first").status_code == 200
    after = system.process_of("worker-0")
    assert after["pid"] != before["pid"]
    assert system.process_of("worker-1")["pid"] == other["pid"]


def test_models_can_be_arguments(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(small_model(), copy, ignore=shutil.ignore_patterns("headrace.json"))
    with serving_models(str(small_model()), str(copy), "--kv-cache-gb", "0.1") as serve:
        assert states(serve) == {small_model().name: "loaded", "copy": "loaded"}
        assert ask(serve, "copy").status_code == 200


@pytest.fixture(scope="module")
def on_demand(tmp_path_factory: pytest.TempPathFactory, damaged: Path) -> Iterator[Serve]:
    """Three models with memory for two, and one that cannot be loaded. All are loaded on demand."""
    path = tmp_path_factory.mktemp("settings") / "models.toml"
    models = [(name, small_model()) for name in ("a", "b", "c")] + [("bad", damaged)]
    tables = [f'[[models]]\nmodel = "{where}"\nname = "{name}"\non_demand = true\n' for name, where in models]
    path.write_text("memory_gb = 1.8\n" + "kv_cache_gb = 0.1\n".join([*tables, ""]))
    with serving_models(
        "--models", str(path), "--ollama-manage", "--ollama-blobs", str(path.parent / "blobs")
    ) as serve:
        yield serve


def loaded(serve: Serve) -> list[str]:
    """The loaded models, as `headrace models ps` shows them."""
    shown = headrace("models", "ps", "--json", "--port", str(serve.port))
    assert shown.returncode == 0, shown.stderr
    return [row["name"] for row in json.loads(shown.stdout) if row["state"] == "loaded"]


def test_models_on_demand_come_and_go_within_the_budget(on_demand: Serve) -> None:
    assert loaded(on_demand) == []
    text = ask(on_demand, "a").json()["choices"][0]["text"]
    assert ask(on_demand, "b").status_code == 200
    assert loaded(on_demand) == ["a", "b"]
    time.sleep(1)  # the host looks at its workers twice a second
    assert ask(on_demand, "a").status_code == 200
    time.sleep(1)
    assert ask(on_demand, "c").status_code == 200
    assert loaded(on_demand) == ["a", "c"], "b was used the longest time ago"
    assert ask(on_demand, "b").json()["choices"][0]["text"] == text
    running = httpx.get(f"{on_demand.base_url}/api/ps", timeout=patience(5)).json()["models"]
    assert sorted(model["name"] for model in running) == loaded(on_demand)
    assert all(model["size"] > 1 << 29 for model in running)


def test_a_model_on_demand_that_cannot_be_loaded_says_why_and_frees_its_memory(on_demand: Serve) -> None:
    refused = ask(on_demand, "bad")
    assert refused.status_code == 503
    assert "cannot be loaded" in refused.json()["error"]["message"]
    assert ask(on_demand, "a").status_code == 200


def test_a_worker_that_is_killed_while_it_loads_is_started_again(on_demand: Serve) -> None:
    assert headrace("models", "unload", "a", "--port", str(on_demand.port)).returncode == 0
    with ThreadPoolExecutor(1) as beside:
        asked = beside.submit(ask, on_demand, "a")
        until(lambda: any(row["model"] is None for row in workers_of(on_demand)), "a worker that loads")
        (row,) = [row for row in workers_of(on_demand) if row["model"] is None]
        os.kill(row["pid"], signal.SIGKILL)
        assert asked.result().status_code == 200


def workers_of(serve: Serve) -> list[dict[str, Any]]:
    """The rows of workers that have a process."""
    return [row for row in serve.status() if row["role"] == "worker" and row["pid"] is not None]


def test_a_stream_ends_before_its_model_gives_way(on_demand: Serve) -> None:
    long = {"model": "a", "prompt": "Once", "max_tokens": 600, "ignore_eos": True, "stream": True}
    others = [name for name in ("b", "c") if name not in loaded(on_demand)] or ["b"]
    with httpx.stream(
        "POST", f"{on_demand.base_url}/v1/completions", json=long, timeout=patience(2 * READY_BOUND_S)
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        with ThreadPoolExecutor(2) as beside:
            asked = [beside.submit(ask, on_demand, name) for name in (*others, "b")]
            events = [line for line in lines if line.startswith("data: ")]
            assert events[-1] == "data: [DONE]"
            assert '"finish_reason":"length"' in events[-2]
            assert [one.result().status_code for one in asked] == [200] * len(asked)


def test_an_operator_adds_a_model(on_demand: Serve) -> None:
    port = str(on_demand.port)
    added = headrace("models", "load", "new", str(small_model()), "--port", port, timeout_s=READY_BOUND_S)
    assert added.stdout == "new is loaded\n", added.stderr
    assert ask(on_demand, "new").status_code == 200
    assert headrace("models", "unload", "new", "--port", port).stdout == "new is unloaded\n"
    assert states(on_demand)["new"] == "unloaded"
    refused = headrace("models", "load", "nosuch", "--port", port)
    assert refused.returncode == 1
    assert "this host has no model 'nosuch'; there is a, b, bad, c, new" in refused.stderr
    refused = headrace("models", "load", "other", "/nowhere", "--port", port)
    assert "unknown model '/nowhere'" in refused.stderr


def test_ollamas_client_names_makes_and_unloads_models_unmodified(on_demand: Serve, tmp_path: Path) -> None:
    python = ROOT / ".make" / "clients" / "bin" / "python"
    if not python.exists():
        pytest.skip("the clients are not installed: make test")
    environment = {**os.environ, "HEADRACE_TEST_BASE_URL": f"{on_demand.base_url}/v1", "HEADRACE_TEST_MODEL": "a"}
    environment["HEADRACE_TEST_GGUF"] = str(write_gguf(TinyModel(), tmp_path / "tiny.gguf"))
    script = ROOT / "tests" / "e2e" / "clients" / "managing_ollama.py"
    bound_s = patience(2 * READY_BOUND_S)
    done = subprocess.run(
        [python, script], env=environment, capture_output=True, text=True, timeout=bound_s, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "a" not in loaded(on_demand)
    # Nothing is left of which the deleted model could come back.
    assert not any(name.startswith("sent") for name in states(on_demand))
    assert [
        *(cache_directory() / "models").glob("*sent-v1-*"),
        *(cache_directory() / "locks").glob("sent-v1-*.held"),
    ] == []


def test_what_clients_have_created_is_served_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the name that is left of two."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = tmp_path / "models.toml"
    path.write_text(
        f'memory_gb = 1.8\n[[models]]\nmodel = "{small_model()}"\nname = "a"\non_demand = true\nkv_cache_gb = 0.1\n'
    )
    gguf = write_gguf(TinyModel(), tmp_path / "tiny.gguf").read_bytes()
    digest = f"sha256:{sha256(gguf).hexdigest()}"
    asked = {"model": "kept", "prompt": "hi", "raw": True, "stream": False, "options": {"temperature": 0}}
    args = ("--models", str(path), "--ollama-manage", "--ollama-blobs", str(tmp_path / "blobs"))
    args += ("--execution-mode", "accuracy", "--port", str(free_port()))

    def send(serve: Serve, method: str, call: str, **content: Any) -> httpx.Response:
        url = f"{serve.base_url}/api/{call}"
        answer = HTTP.request(method, url, timeout=patience(2 * READY_BOUND_S), **content)
        assert answer.is_success, answer.text
        return answer

    with serving_models(*args) as serve:
        send(serve, "POST", f"blobs/{digest}", content=gguf)
        send(serve, "POST", "create", json={"model": "sent:v1", "files": {"tiny.gguf": digest}, "stream": False})
        send(serve, "POST", "copy", json={"source": "sent:v1", "destination": "kept"})
        send(serve, "DELETE", "delete", json={"model": "sent:v1"})
        text = send(serve, "POST", "generate", json=asked).json()["response"]
    with serving_models(*args) as serve:
        assert states(serve) == {"a": "unloaded", "kept": "unloaded"}
        assert send(serve, "POST", "generate", json=asked).json()["response"] == text
        send(serve, "DELETE", "delete", json={"model": "kept"})
        assert states(serve) == {"a": "unloaded"}
    folders = cache_directory() / "models", cache_directory() / "locks"
    assert [found for folder in folders for found in folder.glob("sent-v1-*") if found.suffix != ".lock"] == []
