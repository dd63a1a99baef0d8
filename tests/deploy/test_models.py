"""The model of a deployment is whatever `headrace pull` takes, and may be changed: workers find what was pulled."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli.models.model_cache import model_directory
from headrace.cli.models.pull import source_of
from headrace.common.model_files.cache import find_directory
from tests.deploy import test_compose_files
from tests.deploy.command_lines import refuse_what_is_unknown
from tests.deploy.kustomization import containers, render
from tests.deploy.test_kubernetes import DOWNWARD, KUBERNETES
from tests.deploy.test_systemd import HEADRACE, settings

MODELS = ("smollm2-135m", "qwen3-8b", "owner/m", "owner/m:Q8_0", "owner/m:Q8_0@try/this")
Commands = tuple[list[str], list[str]]


def compose(model: str, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setitem(test_compose_files.VARIABLES, "MODEL", model)
    services = test_compose_files.services("compose.yaml")
    return services["pull"]["command"], services["worker"]["command"]


def compose_hosts(model: str, monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setitem(test_compose_files.VARIABLES, "MODEL", model)
    services = test_compose_files.services("deploy/compose/host.yaml")
    return services["pull"]["command"], services["worker-1"]["command"]


def kubernetes(model: str, _monkeypatch: pytest.MonkeyPatch) -> Commands:
    values = {**DOWNWARD, "MODEL_SOURCE": model, "MODEL_NAME": "m"}
    (workers,) = [one for one in render(KUBERNETES / "overlays" / "fleet") if one["kind"] == "StatefulSet"]
    found = {
        container["name"]: [re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], arg) for arg in container["args"]]
        for container in containers(workers)
    }
    return found["pull"], found["worker"]


def systemd(model: str, _monkeypatch: pytest.MonkeyPatch) -> Commands:
    def argv(name: str) -> list[str]:
        (line,) = settings("headrace-worker@.service")[name]
        return shlex.split(re.sub(r"\$MODEL|\$\{MODEL\}", model, line).removeprefix(HEADRACE))

    return argv("ExecStartPre"), argv("ExecStart")


@pytest.mark.parametrize("deployment", [compose, compose_hosts, kubernetes, systemd])
def test_a_worker_finds_the_model_that_was_pulled_also_after_a_change(
    deployment: Callable[[str, pytest.MonkeyPatch], Commands], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    found = set()
    for model in MODELS:
        pull, worker = deployment(model, monkeypatch)
        params = refuse_what_is_unknown(monkeypatch, pull)
        name = params["name"]
        assert name is None or isinstance(name, str)
        source = source_of(str(params["model"]), name)
        pulled = model_directory(source.name)
        # `pull` gives no name to a second model.
        assert not pulled.exists()
        pulled.mkdir(parents=True)
        params = refuse_what_is_unknown(monkeypatch, worker)
        assert find_directory(str(params["model_dir"])) == (pulled, source.name)
        assert params["name"] in (None, "m")
        found.add(pulled)
    assert len(found) == len(MODELS)


def test_a_directory_is_taken_as_it_is_and_an_unknown_name_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert find_directory("mine") == (Path("mine"), "mine")
    assert find_directory(str(tmp_path / "mine")) == (tmp_path / "mine", "mine")
    (tmp_path / "cache" / "models" / "other").mkdir(parents=True)
    assert find_directory("./other") == (Path("./other"), "other")
    assert find_directory("nowhere") == (Path("nowhere"), "nowhere")
