"""Two models of the chart without workers, on a real API server: the first request for each waits at the router, which
has KEDA start the first worker, and is answered by it. Models that nobody asks for lose their workers again.

Pods are processes that start and end as the chart says (`tests/infra/pods.py`). KEDA is not there: `Keda` does what its
operator does with triggers of type external-push, as the ScaledObjects of the chart say.
`python -m tests.soak rolling-update` runs this test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from headrace.common.tasks import end_tasks
from headrace.protos import keda_pb2, keda_pb2_grpc
from tests.deploy import custom_resources
from tests.deploy.chart import helm_library, rendered
from tests.e2e.serving import MODEL
from tests.e2e.small_model import small_model
from tests.infra.cluster import Object, RealCluster, path_of, real_cluster
from tests.infra.pods import Pods, pods_of
from tests.infra.test_rolling_update import WORKER_ARGS, until_routed, url_of
from tests.patience import patience

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.environ.get("HEADRACE_SOAK") != "1", reason="a minute: python -m tests.soak rolling-update"),
]

NAMESPACE = "scaled"
OTHER = "another"
FIRST, SECOND = "headrace-worker", "headrace-worker-more"
COOLDOWN_S = 1


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    with real_cluster(tmp_path_factory.mktemp("cluster")) as made:
        for definition in custom_resources.definitions():
            made.apply(definition)
        yield made


class Keda:
    """Sets the replicas of workloads from none to one and back, as their ScaledObjects and the router say."""

    def __init__(self, cluster: RealCluster, pods: Pods) -> None:
        self.set_replicas: dict[str, list[int]] = {}
        """The numbers that each workload was given, in order."""
        self._api = cluster.client()
        self._pods = pods
        scaled = cluster.items("ScaledObject", pods.namespace)
        self._tasks = [asyncio.create_task(self._scale(one["spec"])) for one in scaled if self._trigger(one["spec"])]

    async def close(self) -> None:
        """Scale no longer."""
        await end_tasks(*self._tasks)
        await self._api.aclose()

    @staticmethod
    def _trigger(spec: Object) -> dict[str, str] | None:
        found = [trigger["metadata"] for trigger in spec["triggers"] if trigger["type"] == "external-push"]
        return found[0] if found else None

    async def _scale(self, spec: Object) -> None:
        metadata, target = self._trigger(spec), spec["scaleTargetRef"]["name"]
        assert metadata is not None
        self.set_replicas[target] = []
        host, _, port = metadata["scalerAddress"].rpartition(":")
        service, namespace, _ = host.split(".")
        assert namespace == self._pods.namespace
        (address, *_) = self._pods.addresses(service, 0)
        assert address.endswith(f":{port}")
        reference = keda_pb2.ScaledObjectRef(namespace=namespace, scalerMetadata=metadata)
        active: asyncio.Queue[bool] = asyncio.Queue()
        async with grpc.aio.insecure_channel(address) as channel:
            reading = asyncio.create_task(self._read(channel, reference, active))
            try:
                is_active = await active.get()
                while True:
                    if is_active and self.set_replicas[target][-1:] != [1]:
                        await self._set(target, 1)
                    elif not is_active and self.set_replicas[target][-1:] == [1]:
                        # Unless it is active again meanwhile.
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(spec["cooldownPeriod"]):
                                is_active = await active.get()
                                continue
                        await self._set(target, spec["minReplicaCount"])
                    is_active = await active.get()
            finally:
                await end_tasks(reading)

    async def _read(
        self, channel: grpc.aio.Channel, reference: keda_pb2.ScaledObjectRef, active: asyncio.Queue[bool]
    ) -> None:
        async for message in keda_pb2_grpc.ExternalScalerStub(channel).StreamIsActive(reference):
            await active.put(message.result)

    async def _set(self, target: str, count: int) -> None:
        self.set_replicas[target].append(count)
        answer = await self._api.patch(
            path_of("StatefulSet", self._pods.namespace, target),
            headers={"Content-Type": "application/merge-patch+json"},
            content=json.dumps({"spec": {"replicas": count}}),
        )
        assert answer.status_code == 200, answer.text


@contextlib.asynccontextmanager
async def keda(cluster: RealCluster, pods: Pods) -> AsyncIterator[Keda]:
    """Scale inside."""
    running = Keda(cluster, pods)
    try:
        yield running
    finally:
        await running.close()


def release() -> list[Object]:
    """Two models, of which neither has a worker at first."""
    none = {"spec": {"replicas": 0}}
    soon = {"spec": {"cooldownPeriod": COOLDOWN_S}}
    values: dict[str, Any] = {
        "components": ["autoscaling-keda"],
        "image": {"repository": "headrace", "tag": "1"},
        "model": {"source": str(small_model()), "name": MODEL},
        "models": {"more": {"source": str(small_model()), "name": OTHER, "args": WORKER_ARGS, "patch": none}},
        "worker": {"args": WORKER_ARGS, "patch": none},
        "router": {"replicas": 1, "args": [f"--idle-after={patience(8):.0f}", "--scaling-window=1"]},
        "gateway": {"patch": {"spec": {"replicas": 1}}},
        "patches": {f"ScaledObject {name}": soon for name in (FIRST, SECOND)},
    }
    return rendered(helm_library(), values, namespace=NAMESPACE)


async def asked(pods: Pods, model: str) -> str:
    """The answer of a model, which waits for a worker if there is none."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    async with httpx.AsyncClient(timeout=patience(120), trust_env=False) as http:
        answer = await http.post(f"{url_of(pods)}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def workers(pods: Pods) -> list[str]:
    """The pods of workers."""
    return sorted(pod.name for pod in pods.pods if pod.owner in (FIRST, SECOND))


@pytest.mark.timeout(900)
async def test_the_first_request_of_each_model_is_held_until_keda_has_started_a_worker(
    cluster: RealCluster, tmp_path: Path
) -> None:
    cluster.make_namespace(NAMESPACE)
    cluster.apply_all(release(), NAMESPACE)
    async with pods_of(cluster, NAMESPACE, tmp_path / "pods") as pods:
        await pods.until_rolled_out("headrace:1", 120)
        await until_routed(pods)
        assert workers(pods) == [], "and the gateway is ready all the same"
        async with keda(cluster, pods) as scaler:
            began_s = time.monotonic()
            first, other = await asyncio.gather(asked(pods, MODEL), asked(pods, OTHER))
            print(f"the first answers of two models {time.monotonic() - began_s:.1f} s after the requests")
            assert first == other, "the same weights under two names"
            async with asyncio.timeout(patience(60)):
                while workers(pods):
                    await asyncio.sleep(0.1)
            assert scaler.set_replicas == {FIRST: [1, 0], SECOND: [1, 0]}
            assert await asked(pods, OTHER) == first
            assert scaler.set_replicas[SECOND][2] == 1
            assert scaler.set_replicas[FIRST] == [1, 0], "nobody has asked for it again"
        assert [pod for pod in (*pods.ended, *pods.pods) if pod.was_killed or pod.num_restarts] == []
        assert pods.failures == []
