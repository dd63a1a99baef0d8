"""A fleet on a Ray cluster of three nodes and a head: these are lost while streams run, workers come and go under load,
and everything is replaced. Nothing is lost, no process is left.

`python -m tests.soak ray` runs it, in ten minutes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.groups import ranks_behind
from tests.e2e.ray_cluster import RayCluster, ray_cluster
from tests.e2e.serving import BOUND_S, MODEL, alive
from tests.e2e.small_model import small_model
from tests.e2e.streams import chat_body, hits, load, run_streams
from tests.patience import patience, until
from tests.ports import free_port
from tests.redis_server import RedisServer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.environ.get("HEADRACE_SOAK") != "1", reason="minutes: python -m tests.soak ray"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="make .venv/.ray installs it"),
]

NODES = ("one", "two", "three")
NODE = {"num_cpus": 1, "resources": {"numa": 2}}
# A lost node is noticed in seconds rather than in a quarter of a minute: what has ended refuses connections at once. On
# a crowded machine, a node that only answers late is not lost.
QUICK = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": int(1000 * patience(2)),
    "health_check_failure_threshold": 3,
}
TOKENS = 300
BODIES = [chat_body(number, TOKENS, temperature=0) for number in range(6)]
# On a crowded machine, requests may wait for minutes until there are more workers.
SIZES = ("--kv-cache-gb", "0.3", "--max-num-seqs", "4", "--execution-mode", "accuracy", "--max-ttft", "600")
_LONG_S = 6 * BOUND_S


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """A head without CPUs, whose state is in a Redis, and three nodes with two places each."""
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    try:
        with ray_cluster({"RAY_REDIS_ADDRESS": f"127.0.0.1:{server.port}"}) as made:
            port = free_port()
            made.start(num_cpus=0, dashboard_port=port, include_dashboard=True, _system_config=QUICK)
            made.dashboard = f"http://127.0.0.1:{port}"
            for name in NODES:
                made.tell("add", name=name, **NODE)
            yield made
            made.end()
    finally:
        server.kill()


def up(cluster: RayCluster, *flags: str) -> None:
    """Start the fleet, or change it. `cluster.url` is then its first gateway's."""
    ready = cluster.headrace(
        "up", str(small_model()), "--name", MODEL, "--port", "0", *SIZES, *flags, timeout_s=_LONG_S
    )
    cluster.url = ready.split()[1].removesuffix("/v1")


def num_workers(cluster: RayCluster) -> int:
    return len(cluster.processes("worker"))


def serves(cluster: RayCluster, count: int) -> Callable[[], bool]:
    """Whether so many workers are members of the fleet, and none drains."""

    def holds() -> bool:
        workers = cluster.status()["workers"]
        return num_workers(cluster) == count == len([one for one in workers if not one["is_draining"]])

    return holds


async def in_thread(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Run it while streams go on."""
    return await asyncio.to_thread(function, *args, **named)


async def same_answers(cluster: RayCluster, disturb: Callable[[], Awaitable[None]]) -> None:
    """Streams that are disturbed say the same as undisturbed ones."""
    undisturbed = await run_streams(cluster.url, BODIES)
    assert all(stream.error is None and stream.num_tokens == TOKENS for stream in undisturbed)
    disturbed = await run_streams(cluster.url, BODIES, disturb_behind=10, disturb=disturb)
    assert [stream.result for stream in disturbed] == [stream.result for stream in undisturbed]


def node_with_a_worker(cluster: RayCluster) -> tuple[str, list[int]]:
    """A node with workers and without a gateway, which no other could replace; and the workers' processes."""
    status = cluster.status()
    taken = {gateway["node"] for gateway in status["gateways"]}
    by_node: dict[str, list[int]] = {}
    for worker in status["workers"]:
        by_node.setdefault(worker["node"], []).append(worker["pid"])
    node = next(node for node in sorted(by_node) if node not in taken)
    return node, by_node[node]


async def test_one_worker_becomes_four_under_load_and_one_again(cluster: RayCluster) -> None:
    await in_thread(up, cluster, "--max-workers", "4", "--down-delay", "30")
    assert num_workers(cluster) == 1
    async with load(cluster.url, num_clients=32, max_tokens=48) as many:
        await in_thread(until, lambda: num_workers(cluster) == 4, "there are four workers", _LONG_S)
        await many.more(200)
    async with load(cluster.url, num_clients=1, max_tokens=48) as few:
        await in_thread(until, lambda: num_workers(cluster) == 1, "there is one worker", _LONG_S)
        await few.more(3)
    print(f"answers under load: {len(many.finished)}, while workers stop: {len(few.finished)}")
    assert [stream.error for stream in (*many.failed, *few.failed)] == []


@pytest.mark.parametrize("way", ["remove", "kill_raylet"])
async def test_a_node_is_lost_mid_stream(cluster: RayCluster, way: str) -> None:
    await in_thread(up, cluster, "--min-workers", "4")
    until(serves(cluster, 4), "four workers serve", _LONG_S)
    node, pids = node_with_a_worker(cluster)

    async def lose() -> None:
        await in_thread(cluster.tell, way, name=node)

    await same_answers(cluster, lose)
    until(lambda: not any(map(alive, pids)), "the workers of the node end", _LONG_S)
    until(serves(cluster, 4), "they are replaced elsewhere", _LONG_S)
    if way == "kill_raylet":
        cluster.tell("remove", name=node)
    cluster.tell("add", name=node, **NODE)


async def test_the_head_is_restarted_mid_stream(cluster: RayCluster) -> None:
    before = cluster.processes()

    async def restart() -> None:
        await in_thread(cluster.tell, "restart_head")

    await same_answers(cluster, restart)
    assert cluster.processes() == before
    until(lambda: cluster.status()["state"] == "RUNNING", "the application is known again", _LONG_S)
    # And Ray is in charge again.
    victim = cluster.processes("worker")[0]
    actor = int(Path(f"/proc/{victim}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(actor, signal.SIGKILL)
    until(serves(cluster, 4), "an actor that dies is replaced", _LONG_S)


async def test_all_workers_are_replaced_under_load_and_keep_their_hits(cluster: RayCluster) -> None:
    prompts = [[7 + (start * 131 + number) % 5000 for number in range(512)] for start in range(24)]
    await hits(cluster.url, prompts)
    before = await hits(cluster.url, prompts)
    old = set(cluster.processes("worker"))
    async with load(cluster.url, num_clients=4, max_tokens=48) as running:
        url = cluster.url
        await in_thread(up, cluster, "--min-workers", "4", "--worker-drain", "20")
        await in_thread(until, lambda: not old & set(cluster.processes("worker")), "all are new", _LONG_S)
        await in_thread(until, serves(cluster, 4), "four workers serve", _LONG_S)
    after = await hits(url, prompts)
    print(f"hits {before:.3f} before, {after:.3f} after; {len(running.finished)} answers")
    assert [stream.error for stream in running.failed] == []
    assert after >= 0.9 * before


async def test_the_ranks_of_a_worker_take_a_placement_group_on_one_node(cluster: RayCluster) -> None:
    await in_thread(up, cluster, "--min-workers", "2", "--tensor-parallel", "2", "--worker-drain", "20")
    await in_thread(until, serves(cluster, 2), "two divided workers serve", _LONG_S)
    workers = cluster.status()["workers"]
    assert [one["worker_id"] for one in workers] == [f"{one['node']}/numa-0+1" for one in workers]
    groups = await in_thread(cluster.tell, "placement_groups")
    assert [(group["strategy"], group["bundles"]) for group in groups] == [("STRICT_PACK", [{"numa": 1.0}] * 2)] * 2
    assert [len(group["nodes"]) for group in groups] == [1, 1]
    (rank,) = ranks_behind(workers[0]["pid"])

    async def kill() -> None:
        os.kill(rank, signal.SIGKILL)

    await same_answers(cluster, kill)
    until(serves(cluster, 2), "the worker is back", _LONG_S)
    until(lambda: [len(ranks_behind(one)) for one in cluster.processes("worker")] == [1, 1], "with its ranks", BOUND_S)


def test_a_job_may_ask_for_the_fleet(cluster: RayCluster) -> None:
    ray = str(Path(sys.executable).with_name("ray"))
    headrace = str(Path(sys.executable).with_name("headrace"))
    done = subprocess.run(
        [ray, "job", "submit", "--address", cluster.dashboard, "--", headrace, "ray", "status"],
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=patience(_LONG_S),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "headrace: running" in done.stdout


def test_nothing_is_left_after_down(cluster: RayCluster) -> None:
    cluster.headrace("down", timeout_s=_LONG_S)
    until(lambda: not cluster.processes(), "all processes end", BOUND_S)
