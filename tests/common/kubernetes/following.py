"""A watch of a Service, and what it told, for tests."""

from __future__ import annotations

from pathlib import Path

from headrace.common.kubernetes.cluster import Cluster
from headrace.common.kubernetes.services import Endpoints, Service
from headrace.common.kubernetes.watch import Pace, ServiceWatch
from tests.router.fake_worker import until


class Following:
    """A watch and what it told."""

    def __init__(self, url: str, credentials: Path, pace: Pace, namespace: str = "fleet") -> None:
        self.cluster = Cluster(url, credentials)
        self.told: list[set[str]] = []
        self.ends: list[str] = []
        self.watch = ServiceWatch(
            Service("worker", namespace, 50061), self.cluster, self._seen, ended=self.ends.append, pace=pace
        )
        self.watch.start()

    def _seen(self, endpoints: Endpoints) -> None:
        self.told.append({one.pod for one in endpoints.values()})

    async def until_told(self, *pods: str) -> None:
        await until(lambda: bool(self.told) and self.told[-1] == set(pods))

    async def close(self) -> None:
        await self.watch.close()
        await self.cluster.close()
