"""The command lines of the processes are ones that the processes take, and pin them to their places."""

from __future__ import annotations

import itertools
from pathlib import Path

import click
import pytest

from headrace.cli.serving.placement import WorkerPlace
from headrace.cli.serving.plan import ProcessSpec
from headrace.gateway.__main__ import command as gateway
from headrace.ray.commands import Node, front_specs, worker_spec
from headrace.ray.places import Claim
from headrace.ray.settings import Fleet, Model
from headrace.router.__main__ import command as router
from headrace.worker.__main__ import command as worker

NODE = Node("id", "host-a", "10.0.0.1", 2)
PLACES = (WorkerPlace(0, (0, 1), 2), WorkerPlace(1, (2, 3), 2))
MODEL = Model("m", flags={"max_num_seqs": 4, "adapters": ["one=/a", "two=/b"]}, worker_args=("--log-level", "debug"))


def parsed(command: click.Command, spec: ProcessSpec) -> dict[str, object]:
    """The values that the command reads from the arguments after `-m MODULE`."""
    return command.make_context("x", list(spec.argv[3:])).params


def of_worker(fleet: Fleet, model: Model, tmp_path: Path, numbers: tuple[int, ...] = (1,)) -> ProcessSpec:
    claim = Claim(numbers, tuple(PLACES[number] for number in numbers), [])
    (tmp_path / "config.json").write_text("{}")
    return worker_spec(fleet, model, (tmp_path, "found"), NODE, claim, PLACES, (5001, 5002))


def test_a_worker_is_pinned_to_its_place(tmp_path: Path) -> None:
    spec = of_worker(Fleet((MODEL,), worker_drain_s=12.0), MODEL, tmp_path)
    found = parsed(worker, spec)
    assert spec.cpus == (2, 3)
    assert (found["threads"], found["memory_node"], found["worker_id"]) == (2, 1, "host-a/numa-1")
    assert (found["listen"], found["metrics"], spec.address) == ("10.0.0.1:5001", "10.0.0.1:5002", "10.0.0.1:5001")
    assert (found["name"], found["drain_timeout_s"], found["insecure"]) == ("found", 12.0, True)
    assert (found["max_num_seqs"], found["adapters"]) == (4, ("one=/a", "two=/b"))
    # Two workers share the host's memory.
    assert (found["kv_cache_share"], found["kv_cache_node_share"]) == (0.2, 0.4)
    assert spec.memory_flag == "--kv-memory"


def test_a_worker_over_several_numa_nodes_has_all_their_cpus(tmp_path: Path) -> None:
    spec = of_worker(Fleet((MODEL,)), MODEL, tmp_path, (0, 1))
    found = parsed(worker, spec)
    assert spec.cpus == (0, 1, 2, 3)
    assert (found["threads"], found["memory_node"], found["worker_id"]) == (4, None, "host-a/numa-0+1")
    assert found["kv_cache_share"] == 0.4


def test_a_worker_of_several_ranks_has_the_threads_of_each(tmp_path: Path) -> None:
    model = Model("m", numa_nodes=2, flags={"tensor_parallel": 2})
    spec = of_worker(Fleet((model,)), model, tmp_path, (0, 1))
    found = parsed(worker, spec)
    assert (found["tensor_parallel"], found["threads"], found["memory_node"]) == (2, 2, None)
    assert spec.memory_flag == "--kv-memory"


def test_a_size_that_is_given_holds(tmp_path: Path) -> None:
    model = Model("m", name="other", flags={"kv_cache_gb": 3})
    found = parsed(worker, of_worker(Fleet((model,)), model, tmp_path))
    assert (found["kv_cache_gb"], found["kv_cache_share"], found["name"]) == (3.0, 0.4, "other")


def test_memory_that_the_settings_name_is_used_instead(tmp_path: Path) -> None:
    model = Model("m", worker_args=("--kv-memory", "/dev/shm", "--keep-kv-memory"))
    assert of_worker(Fleet((model,)), model, tmp_path).memory_flag is None


def test_a_gateway_has_its_router_beside_it() -> None:
    fleet = Fleet((MODEL,), gateway_args=("--alias", "a=m"), router_args=("--max-ttft", "5"), gateway_drain_s=7.0)
    of_gateway, of_router = front_specs(fleet, NODE, (8000, 5001, 5002))
    front, back = parsed(gateway, of_gateway), parsed(router, of_router)
    assert (front["host"], front["port"], front["routers"]) == ("10.0.0.1", 8000, ("10.0.0.1:5001",))
    assert (front["aliases"], front["drain_timeout"]) == (("a=m",), 7.0)
    assert (back["listen"], back["metrics"], back["max_ttft"]) == ("10.0.0.1:5001", "10.0.0.1:5002", 5.0)
    assert of_gateway.address == "http://10.0.0.1:8000"
    # The gateway's answers need the router until they end.
    assert of_gateway.stop_phase < of_router.stop_phase


@pytest.mark.parametrize(
    ("files", "expected"),
    [({"join_token_file": "/token"}, ("/token", None)), ({"tls_dir": "/tls"}, (None, "/tls"))],
)
def test_with_files_the_processes_know_each_other(
    files: dict[str, str], expected: tuple[str | None, str | None], tmp_path: Path
) -> None:
    fleet = Fleet((MODEL,), **files)  # type: ignore[arg-type]
    of_gateway, of_router = front_specs(fleet, NODE, (8000, 5001, 5002))
    for command, spec in ((router, of_router), (worker, of_worker(fleet, MODEL, tmp_path))):
        found = parsed(command, spec)
        assert found["insecure"] is False
        assert tuple(found[name] and str(found[name]) for name in ("join_token_file", "tls_dir")) == expected
    given = dict(itertools.pairwise(of_gateway.argv))
    assert (given.get("--join-token-file"), given.get("--tls-dir")) == expected
