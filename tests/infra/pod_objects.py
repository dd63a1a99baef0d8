"""Pods as objects of the API server, on nodes, so that they can be evicted.

`tests/infra/pods.py` runs the processes. Here each of its pods has its object: it tells whether the pod is ready, and a
pod whose object is deleted, as by an eviction, ends. Budgets get the status that the disruption controller of
Kubernetes writes. Whether an eviction is allowed is the server's decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence

from headrace.common.tasks import end_tasks
from tests.infra.cluster import Object, RealCluster, path_of
from tests.infra.pods import Pod, Pods

_POLL_S = 0.25
# The command waits for 5 s until it tries an eviction again.
_AGAIN_S = 1.0
_UID = "headrace.test/uid"
_MERGE = {"Content-Type": "application/merge-patch+json"}


class PodObjects:
    """The objects of the pods of a namespace. A new pod is on the node with the fewest of its workload, of those that
    take pods. Use `pod_objects`."""

    def __init__(self, cluster: RealCluster, pods: Pods) -> None:
        self.failures: list[str] = []
        self.refusals: dict[str, list[str]] = {}
        """What the server said when it refused evictions, by workload."""
        self.evicted: list[str] = []
        self.num_others_ready: list[tuple[str, int]] = []
        """With each eviction: the workload, and how many other pods of it were ready then."""
        self._pods = pods
        self._namespace = pods.namespace
        self._api = cluster.client()
        self._task = asyncio.create_task(self._run(), name="pod objects")

    async def close(self) -> None:
        """Follow the pods no longer."""
        await end_tasks(self._task)
        await self._api.aclose()

    # -- what `kubectl drain` does --------------------------------------------------------------------------------

    async def drain(self, node: str) -> None:
        """Let the node take no more pods, and evict those that it has. Returns when they have ended."""
        answer = await self._api.patch(
            path_of("Node", name=node), headers=_MERGE, content=json.dumps({"spec": {"unschedulable": True}})
        )
        assert answer.status_code == 200, answer.text
        await asyncio.gather(*(self._evict(one) for one in await self._items("Pod") if one["spec"]["nodeName"] == node))

    async def on(self, node: str) -> list[str]:
        """The names of the pods on a node."""
        return [one["metadata"]["name"] for one in await self._items("Pod") if one["spec"]["nodeName"] == node]

    async def _evict(self, one: Object) -> None:
        """Ask for an eviction until it is allowed, and wait until the pod is gone."""
        name, path = one["metadata"]["name"], path_of("Pod", self._namespace, one["metadata"]["name"])
        owner = next(pod.owner for pod in self._pods.pods if pod.name == name)
        eviction = {
            "apiVersion": "policy/v1beta1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": self._namespace},
        }
        while True:
            answer = await self._api.post(f"{path}/eviction", json=eviction)
            if answer.status_code == 201:
                break
            assert answer.status_code == 429, answer.text
            self.refusals.setdefault(owner, []).append(answer.json()["message"])
            await asyncio.sleep(_AGAIN_S)
        others = [pod for pod in self._pods.of(owner) if pod.name != name and pod.is_ready and not pod.is_terminating]
        self.num_others_ready.append((owner, len(others)))
        self.evicted.append(name)
        while True:
            found = await self._api.get(path)
            if found.status_code == 404 or found.json()["metadata"]["uid"] != one["metadata"]["uid"]:
                return
            await asyncio.sleep(_POLL_S)

    # -- what a kubelet, a scheduler and the disruption controller do -----------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                # Budgets are read first: a server that allows an eviction changes the budget before the pod, and a
                # status of an older version is then refused.
                budgets = await self._items("PodDisruptionBudget")
                objects = {one["metadata"]["annotations"][_UID]: one for one in await self._items("Pod")}
                await self._follow(objects)
                for budget in budgets:
                    await self._write_status(budget, list(objects.values()))
                await asyncio.sleep(_POLL_S)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.failures.append(repr(error))
            raise

    async def _follow(self, objects: Mapping[str, Object]) -> None:
        """Make what pods and objects lack of each other equal."""
        living = {pod.uid: pod for pod in self._pods.pods if not pod.is_gone}
        for uid, one in objects.items():
            pod, path = living.get(uid), path_of("Pod", self._namespace, one["metadata"]["name"])
            if pod is None:
                answer = await self._api.delete(path, params={"gracePeriodSeconds": "0"})
                assert answer.status_code in (200, 404), answer.text
            elif "deletionTimestamp" in one["metadata"]:
                pod.delete()
            elif _is_ready(one) != pod.is_ready:
                await self._tell(path, ready=pod.is_ready)
        there = list(objects.values())
        names = {one["metadata"]["name"] for one in there}
        for pod in living.values():
            if pod.uid not in objects and pod.name not in names and not pod.is_terminating:
                there.append(await self._make(pod, there))

    async def _make(self, pod: Pod, objects: Sequence[Object]) -> Object:
        nodes = [node for node in await self._items("Node") if not node["spec"].get("unschedulable")]
        label = pod.labels.items()
        there = Counter(one["spec"]["nodeName"] for one in objects if label <= one["metadata"]["labels"].items())
        node = min((node["metadata"]["name"] for node in nodes), key=lambda name: (there[name], name))
        claims = [
            {"name": name, "persistentVolumeClaim": {"claimName": f"{name}-{pod.name}"}}
            for name in self._pods.claims_of(pod.owner)
        ]
        spec = {**pod.spec, "nodeName": node, "volumes": [*pod.spec.get("volumes", ()), *claims]}
        metadata = {"name": pod.name, "labels": pod.labels, "annotations": {_UID: pod.uid}}
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        made = await self._api.post(path_of("Pod", self._namespace), json=whole)
        assert made.status_code == 201, made.text
        await self._tell(path_of("Pod", self._namespace, pod.name), ready=pod.is_ready)
        found: Object = made.json()
        return found

    async def _tell(self, path: str, *, ready: bool) -> None:
        """Write the status of a pod that runs."""
        conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
        status = {"status": {"phase": "Running", "conditions": conditions}}
        answer = await self._api.patch(f"{path}/status", headers=_MERGE, content=json.dumps(status))
        assert answer.status_code in (200, 404), answer.text

    async def _write_status(self, budget: Object, objects: Sequence[Object]) -> None:
        """How many pods of a budget are healthy, and how many of them may be evicted."""
        chosen = budget["spec"]["selector"]["matchLabels"].items()
        expected = sum(
            one["spec"]["replicas"]
            for one in self._pods.workloads
            if chosen <= one["spec"]["template"]["metadata"]["labels"].items()
        )
        ours = [one for one in objects if chosen <= one["metadata"]["labels"].items()]
        names = {one["metadata"]["name"] for one in ours if "deletionTimestamp" not in one["metadata"]}
        # Those whose eviction was allowed, and that are not deleted yet.
        disrupted = {
            name: since_s
            for name, since_s in budget.get("status", {}).get("disruptedPods", {}).items()
            if name in names
        }
        healthy = [one for one in ours if one["metadata"]["name"] in names - disrupted.keys() and _is_ready(one)]
        desired = expected - budget["spec"]["maxUnavailable"]
        status = {
            "observedGeneration": budget["metadata"]["generation"],
            "disruptedPods": disrupted,
            "expectedPods": expected,
            "desiredHealthy": desired,
            "currentHealthy": len(healthy),
            "disruptionsAllowed": max(0, len(healthy) - desired),
        }
        if status == {**status, **budget.get("status", {})}:
            return
        path = path_of("PodDisruptionBudget", self._namespace, budget["metadata"]["name"])
        answer = await self._api.put(f"{path}/status", json={**budget, "status": status})
        assert answer.status_code in (200, 409), answer.text

    async def _items(self, kind: str) -> list[Object]:
        answer = await self._api.get(path_of(kind, self._namespace))
        assert answer.status_code == 200, answer.text
        group = {"PodDisruptionBudget": "policy/v1beta1"}.get(kind, "v1")
        return [{"apiVersion": group, "kind": kind, **one} for one in answer.json()["items"]]


def _is_ready(one: Object) -> bool:
    conditions = one.get("status", {}).get("conditions", ())
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


@contextlib.asynccontextmanager
async def pod_objects(cluster: RealCluster, pods: Pods, nodes: Sequence[str]) -> AsyncIterator[PodObjects]:
    """Give the pods objects inside, on these nodes."""
    for name in nodes:
        cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    objects = PodObjects(cluster, pods)
    try:
        yield objects
    finally:
        await objects.close()
