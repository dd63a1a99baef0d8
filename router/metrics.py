"""What the router counts, as Prometheus metrics; the only file that knows their names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from headrace.router.fleet import Fleet
from headrace.router.policy import PlacementReason

_DECISION_BUCKETS_S = (25e-6, 50e-6, 100e-6, 150e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 50e-3)


class RouterMetrics:
    """Counters of one router, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        placements = Counter(
            "headrace_router_placements", "Requests placed, by what decided", ["reason"], registry=self.registry
        )
        self.placements = {reason: placements.labels(reason.value) for reason in PlacementReason}
        self.resumes = Counter(
            "headrace_router_resumes",
            "Attempts that followed a lost, draining or full worker, with or without tokens delivered",
            registry=self.registry,
        )
        self.decision_seconds = Histogram(
            "headrace_router_decision_seconds",
            "Time of one placement, hashing of the prompt included",
            buckets=_DECISION_BUCKETS_S,
            registry=self.registry,
        )
        self.requests = Counter(
            "headrace_router_requests", "Requests that ended, by gRPC status", ["code"], registry=self.registry
        )

    def observe(self, fleet: Fleet) -> None:
        """Add gauges that read the fleet whenever they are scraped. Once."""
        gauges = {
            "headrace_router_requests_in_flight": ("Requests booked on workers", lambda: fleet.num_in_flight),
            "headrace_router_workers_ready": ("Workers that take requests", lambda: fleet.num_ready),
            "headrace_router_index_entries": ("Pairs of block hash and worker", lambda: len(fleet.index)),
            "headrace_router_index_entries_max": ("Bound of the entries", lambda: fleet.index.max_entries),
            "headrace_router_index_entries_dropped": (
                "Entries given up for lack of room since the start",
                lambda: fleet.index.num_dropped,
            ),
            "headrace_router_index_predicted_blocks": (
                "Blocks predicted on placement",
                lambda: fleet.index.num_predicted,
            ),
        }
        for name, (documentation, read) in gauges.items():
            Gauge(name, documentation, registry=self.registry).set_function(read)

    def serve(self, host: str, port: int) -> None:
        """Answer scrapes on this address, from a thread of its own. Raises OSError if it cannot be bound."""
        start_http_server(port, host, registry=self.registry)
