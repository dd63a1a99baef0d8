"""`headrace ray`: its options, and what it says without a cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.common import commands
from headrace.ray.__main__ import main, up
from headrace.ray.settings import Fleet


def run(*args: str) -> int:
    return commands.run(main, "headrace ray", args)


def fleet_of_flags(*args: str) -> Fleet:
    """The fleet that `headrace ray up ARGS` describes."""
    from headrace.ray.__main__ import _fleet_of_options

    options = up.make_context("up", list(args)).params
    return _fleet_of_options(options.pop("models"), options)


def test_flags_become_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    fleet = fleet_of_flags(
        "./here",
        "smollm2-135m",
        *("--max-workers", "4", "--numa-nodes", "2", "--kv-cache-gb", "3", "--queue-wait", "1", "--port", "0"),
        *("--kv-disk", "disk", "--api-keys", "/keys", "--admin-key-file", "/admin"),
    )
    first, second = fleet.models
    assert (first.model, second.model) == (str(tmp_path / "here"), "smollm2-135m")
    assert (first.min_workers, first.max_workers, first.numa_nodes) == (1, 4, 2)
    # Actors run in another directory.
    assert first.flags == {"kv_cache_gb": 3.0, "kv_disk": str(tmp_path / "disk")}
    assert first.scaling.queue_wait_s == 1.0
    assert (fleet.port, fleet.gateway_args) == (0, ("--api-keys", "/keys", "--admin-key-file", "/admin"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["a", "b", "--name", "x"], "--name is for one model"),
        (["a", "--min-workers", "3", "--max-workers", "2"], "models[0].max_workers is 2, less than min_workers (3)"),
        ([], "missing argument"),
    ],
)
def test_what_is_wrong_is_told_before_a_cluster_is_asked(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("up", *args) == commands.EXIT_REFUSED
    assert message in capsys.readouterr().err


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run("status") == commands.EXIT_REFUSED
    assert "install headrace[ray] on every node" in capsys.readouterr().err


def test_what_ray_prints_is_not_in_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def state(app: str) -> tuple[str, str, dict[str, Any]]:
        print("(raylet) The node with node id 1 has died")
        return "RUNNING", "", {}

    library = SimpleNamespace(init=lambda *args, **named: None, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", library)  # type: ignore[arg-type]
    monkeypatch.setattr("headrace.ray.__main__._state", state)
    monkeypatch.setattr("headrace.ray.__main__._members", lambda app: [])
    assert run("status", "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["state"] == "RUNNING"
    assert "has died" in printed.err
    assert run("status") == 0
    assert capsys.readouterr().out.startswith("headrace: running\n")


def test_a_host_tells_its_resources(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("resources") == 0
    assert json.loads(capsys.readouterr().out)["numa"] >= 1
