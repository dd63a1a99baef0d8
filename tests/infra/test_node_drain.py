"""A machine is drained under load, as `kubectl drain` does it: its pods are evicted, and the chart's budgets let one of
each role go at a time. No request fails, and no stream is cut.

The API server is real, and decides on evictions; pods are processes (`tests/infra/pods.py`), and have objects on two
nodes (`tests/infra/pod_objects.py`). `python -m tests.soak rolling-update` runs it.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from tests.deploy.chart import helm_library
from tests.infra.cluster import RealCluster
from tests.infra.pod_objects import PodObjects, pod_objects
from tests.infra.pods import Pods, pods_of
from tests.infra.test_rolling_update import chart, clients, cluster, until_routed
from tests.patience import patience

__all__ = ["cluster"]  # the fixture

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.environ.get("HEADRACE_SOAK") != "1", reason="minutes: python -m tests.soak rolling-update"),
]

NAMESPACE = "drained"
REPLICAS = {"worker": 3, "router": 2, "gateway": 2}
NUM_CLIENTS = 4
LEFT, STAYS = "node-a", "node-b"


async def until_on_nodes(pods: Pods, objects: PodObjects) -> None:
    """Wait until each pod has its object."""
    async with asyncio.timeout(patience(30)):
        while len(await objects.on(LEFT)) + len(await objects.on(STAYS)) < len(pods.pods):
            await asyncio.sleep(0.1)


@pytest.mark.timeout(1800)
async def test_a_drained_machine_gives_its_pods_up_one_of_a_role_at_a_time(
    cluster: RealCluster, tmp_path: Path
) -> None:
    cluster.make_namespace(NAMESPACE)
    cluster.apply_all(chart(helm_library(), NAMESPACE, "1", REPLICAS, is_first=True), NAMESPACE)
    async with (
        pods_of(cluster, NAMESPACE, tmp_path / "pods") as pods,
        pod_objects(cluster, pods, (LEFT, STAYS)) as objects,
    ):
        await pods.until_rolled_out("headrace:1", 180)
        await until_routed(pods)
        await until_on_nodes(pods, objects)
        leaving = await objects.on(LEFT)
        assert len(leaving) == 4, "two workers, a router and a gateway"
        async with clients(pods, NUM_CLIENTS) as running:
            await running.more(2 * NUM_CLIENTS)
            began_s, num_before = time.monotonic(), running.num_good
            async with asyncio.timeout(patience(300)):
                await objects.drain(LEFT)
            await pods.until_rolled_out("headrace:1", 180)
            await running.more(2 * NUM_CLIENTS)
            num_refused = {owner: len(said) for owner, said in objects.refusals.items()}
            print(
                f"{len(leaving)} pods evicted in {time.monotonic() - began_s:.0f} s, {running.num_good - num_before} "
                f"streams, {len(running.bad)} bad; refused evictions: {num_refused}"
            )
        await until_on_nodes(pods, objects)
        assert sorted(objects.evicted) == sorted(leaving)
        assert await objects.on(LEFT) == []
        assert "disruption budget" in objects.refusals["headrace-worker"][0], "two of them would be too many"
        assert all(count == REPLICAS[owner.removeprefix("headrace-")] - 1 for owner, count in objects.num_others_ready)
        assert running.bad == []
        assert [pod for pod in (*pods.ended, *pods.pods) if pod.was_killed or pod.num_restarts] == []
        assert pods.failures == objects.failures == []
