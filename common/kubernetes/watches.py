"""The watches of the Services that a process was told of, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from headrace.common.kubernetes.cluster import Cluster
from headrace.common.kubernetes.services import Condition, Endpoints, service_of
from headrace.common.kubernetes.watch import PACE, Pace, ServiceWatch

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class ServiceWatches:
    """One watch for each Service. Start and close them in one event loop."""

    def __init__(
        self,
        services: Sequence[str],
        cluster: Cluster,
        seen: Callable[[str, Endpoints], None],
        *,
        registry: CollectorRegistry | None = None,
        prefix: str = "headrace",
        pace: Pace = PACE,
    ) -> None:
        """`services` are addresses such as kubernetes:///NAME:PORT. `seen` is called with such an address and the pods
        of its Service whenever they change. Metrics begin with `prefix`. Raises ValueError for a wrong address."""
        self._cluster = cluster
        self._watches: list[ServiceWatch] = []
        metrics = None if registry is None else _Metrics(registry, prefix)
        for address in dict.fromkeys(services):
            service = service_of(address)
            ended = (lambda reason: None) if metrics is None else partial(metrics.ended, service.name)
            watch = ServiceWatch(service, cluster, partial(seen, address), ended=ended, pace=pace)
            self._watches.append(watch)
            if metrics is not None:
                metrics.observe(watch)

    @property
    def have_listed(self) -> bool:
        """Whether the pods of every Service are known."""
        return all(watch.has_listed for watch in self._watches)

    def start(self) -> None:
        """Start all watches."""
        for watch in self._watches:
            watch.start()

    async def close(self) -> None:
        """End all watches, and the connections to the API server."""
        for watch in self._watches:
            await watch.close()
        await self._cluster.close()


class _Metrics:
    """The metrics of the watches of one process."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        from prometheus_client import Counter, Gauge

        self._current = Gauge(
            f"{prefix}_service_watch_up",
            "1 while changes of the pods of a Kubernetes Service arrive",
            ["service"],
            registry=registry,
        )
        self._pods = Gauge(
            f"{prefix}_service_pods",
            "Pods of a Kubernetes Service, by condition",
            ["service", "condition"],
            registry=registry,
        )
        self._ends = Counter(
            f"{prefix}_service_watch_ends",
            "Watches and lists of a Kubernetes Service that did not end as they should, by reason",
            ["service", "reason"],
            registry=registry,
        )

    def ended(self, service: str, reason: str) -> None:
        """Count the end of a watch or list."""
        self._ends.labels(service, reason).inc()

    def observe(self, watch: ServiceWatch) -> None:
        """Add gauges that read the watch whenever they are scraped."""
        name = watch.service.name
        self._current.labels(name).set_function(lambda: float(watch.is_current))
        for condition in Condition:
            self._pods.labels(name, condition.value).set_function(partial(watch.count, condition))
