"""A fleet on Ray: `headrace ray up`, answers, deaths of a worker and of an actor, `headrace ray down`.

tests/e2e/test_ray_nodes.py loses nodes and the head, which takes minutes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.ray_cluster import RayCluster, ray_cluster
from tests.e2e.serving import BOUND_S, MODEL, alive, headrace
from tests.e2e.small_model import small_model
from tests.e2e.streams import chat_body, run_streams
from tests.patience import until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="make .venv/.ray installs it"),
]

TOKENS = 120
BODIES = [chat_body(number, TOKENS, temperature=0) for number in range(4)]
SIZES = ("--kv-cache-gb", "0.3", "--max-num-seqs", "8", "--execution-mode", "accuracy")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """One node with two places, and a fleet on it. `url` is its gateway's."""
    with ray_cluster() as made:
        made.start(num_cpus=1, resources={"numa": 2}, include_dashboard=False)
        admin_key(made).write_text("an admin key of some length\n")
        flags = ("--name", MODEL, "--min-workers", "2", "--port", "0", "--admin-key-file", str(admin_key(made)), *SIZES)
        ready = made.headrace("up", str(small_model()), *flags, timeout_s=6 * BOUND_S)
        made.url = ready.split()[1].removesuffix("/v1")
        yield made


def admin_key(cluster: RayCluster) -> Path:
    """The file of the gateways' admin key."""
    return cluster.log.parent / "admin.key"


def actor_of(pid: int) -> int:
    """The parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def workers(cluster: RayCluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = cluster.status()["workers"]
    return found


def two_workers(cluster: RayCluster) -> bool:
    return len(cluster.processes("worker")) == 2


async def test_workers_are_pinned_and_a_killed_one_is_back_in_its_place(cluster: RayCluster) -> None:
    status = cluster.status()
    assert status["state"] == "RUNNING"
    first, second = status["workers"]
    assert {first["worker_id"], second["worker_id"]} == {"head/numa-0", "head/numa-1"}
    for worker in (first, second):
        assert os.sched_getaffinity(worker["pid"]) == set(worker["cpus"])
        environment = Path(f"/proc/{worker['pid']}/environ").read_bytes()
        assert b"OMP_NUM_THREADS=" not in environment
    undisturbed = await run_streams(cluster.url, BODIES)

    async def kill() -> None:
        os.kill(first["pid"], signal.SIGKILL)

    disturbed = await run_streams(cluster.url, BODIES, disturb_behind=10, disturb=kill)
    assert [stream.result for stream in disturbed] == [stream.result for stream in undisturbed]
    assert all(stream.error is None and stream.num_tokens == TOKENS for stream in disturbed)
    until(lambda: two_workers(cluster), "the worker is back", BOUND_S)
    until(lambda: sum(worker["restarts"] for worker in workers(cluster)) == 1, "it is told", BOUND_S)
    # The same actor has started it.
    assert actor_of(second["pid"]) in map(actor_of, cluster.processes("worker"))


def test_the_commands_for_any_fleet_see_and_change_it(cluster: RayCluster) -> None:
    access = ("--url", cluster.url, "--admin-key-file", str(admin_key(cluster)))
    drained = headrace("drain", "head/numa-0", *access)
    assert drained.stdout == "drained\n", drained.stderr
    shown = headrace("status", *access, "--json")
    states = {row["name"]: row["state"] for row in json.loads(shown.stdout)}
    assert states == {"head/numa-0": "draining", "head/numa-1": "ready"}
    taken_back = headrace("undrain", "head/numa-0", *access)
    assert taken_back.returncode == 0, taken_back.stderr


async def test_ray_replaces_an_actor_and_no_stream_is_cut(cluster: RayCluster) -> None:
    undisturbed = await run_streams(cluster.url, BODIES)
    pid = cluster.processes("worker")[0]
    actor = actor_of(pid)

    async def kill() -> None:
        os.kill(actor, signal.SIGKILL)

    disturbed = await run_streams(cluster.url, BODIES, disturb_behind=10, disturb=kill)
    assert [stream.result for stream in disturbed] == [stream.result for stream in undisturbed]
    until(lambda: not alive(pid), "its process ends with the actor", BOUND_S)
    until(lambda: two_workers(cluster), "Ray has made another one", 2 * BOUND_S)


def test_nothing_is_left_after_down(cluster: RayCluster) -> None:
    assert cluster.processes("gateway")
    assert cluster.processes("router")
    cluster.headrace("down", timeout_s=4 * BOUND_S)
    until(lambda: not cluster.processes(), "all processes end", BOUND_S)
