"""The router's Prometheus metrics. Only this file knows their names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from headrace.common.telemetry.scrapes import serve_scrapes
from headrace.common.transport.session_server import MAX_SESSIONS, SessionServer
from headrace.common.transport.sessions import MAX_UNSENT_BYTES
from headrace.protos.status import Reason
from headrace.router.dispatch.admission import Admission
from headrace.router.dispatch.scaling import Scaling, ScalingSignal
from headrace.router.fleet.fleet import Fleet
from headrace.router.fleet.leases import LeaseReader
from headrace.router.placement.policy import PlacementReason

# All series begin when the process starts, so omit their own creation times.
prometheus_client.disable_created_metrics()

_QUEUE_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_DECISION_BUCKETS_S = (25e-6, 50e-6, 100e-6, 150e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 50e-3)


# Name, text and value of the gauges of each model.
_OF_MODELS: Sequence[tuple[str, str, Callable[[ScalingSignal], float]]] = (
    ("workers_ready", "Workers that take requests", lambda signal: signal.num_ready),
    ("workers_wanted", "Workers that the forecast demand needs", lambda signal: signal.num_wanted),
    ("queue_wait_milliseconds", "Expected wait of a request that arrives now", lambda signal: signal.queue_wait_ms),
    ("backlog_seconds", "Time in which the workers compute the prompts that wait", lambda signal: signal.backlog_s),
    ("kv_pressure", "Part of the KV blocks that requests use, from 0 to 1", lambda signal: signal.kv_pressure),
    ("requests_waiting", "Requests that wait at this router", lambda signal: signal.num_waiting),
    ("requests_at_workers", "Requests at workers or on the way there", lambda signal: signal.num_at_workers),
)


class RequestLoad(NamedTuple):
    """Number of requests and bytes that are held, and their maxima."""

    held: int
    most_held: int
    num_bytes: int
    most_bytes: int


class HoldsRequests(Protocol):
    """An object that knows which requests are held, and the bytes that they take."""

    @property
    def request_load(self) -> RequestLoad:
        """How many requests are held now, and the bytes that they take."""
        ...


def resident_bytes() -> int:
    """The resident memory of this process in bytes (statm in proc(5))."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class _Signals(Collector):
    """The newest scaling signals, as metrics with the label `model`."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        signals = self._scaling.latest
        for name, text, read in _OF_MODELS:
            gauge = GaugeMetricFamily(f"headrace_model_{name}", text, labels=["model"])
            for signal in signals:
                gauge.add_metric([signal.model], read(signal))
            yield gauge
        refusals = CounterMetricFamily(
            "headrace_model_refusals",
            "Requests that were refused for lack of room or workers",
            labels=["model", "reason"],
        )
        for signal in signals:
            for reason, number in signal.num_refused.items():
                refusals.add_metric([signal.model, reason], number)
        yield refusals


class RouterMetrics:
    """Counters of one router, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        placements = self._counter("placements", "Placed requests, by the reason of the placement", "reason")
        self.placements = {reason: placements.labels(reason.value) for reason in PlacementReason}
        self.resumes = self._counter(
            "resumes",
            "Requests that continued on another worker because theirs was lost, with or without delivered tokens",
        )
        worker_refusals = self._counter(
            "worker_refusals", "Attempts that a worker refused because it was full or draining", "reason"
        )
        self.worker_refusals = {reason: worker_refusals.labels(reason) for reason in ("full", "draining")}
        self.given_back = self._counter(
            "given_back",
            "Placements that a worker gave back because other routers had given it more work than was believed",
        )
        self.prefills = self._counter(
            "prefills", "Answers that continued at another worker after one with --role prefill had computed the prompt"
        )
        self.handovers = self._counter(
            "handovers", "Draining workers whose cached blocks this router handed over to others"
        )
        self.blocks_handed_over = self._counter("blocks_handed_over", "Cached KV blocks handed over")
        self.decision_seconds = Histogram(
            "headrace_router_decision_seconds",
            "Time of one placement, hashing of the prompt included",
            buckets=_DECISION_BUCKETS_S,
            registry=self.registry,
        )
        self.queue_seconds = Histogram(
            "headrace_router_queue_seconds",
            "Time from a request's arrival, or the loss of its worker, to its placement",
            buckets=_QUEUE_BUCKETS_S,
            registry=self.registry,
        )
        self.requests = self._counter("requests", "Requests that ended, by gRPC status", "code")
        self._refusals = self._counter(
            "refusals", "Requests that this router itself ended with an error, by reason", "reason"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"headrace_router_{name}", text, labels, registry=self.registry)

    def refused(self, reason: Reason) -> None:
        """Count a request that this router itself ended with an error."""
        self._refusals.labels(reason.name.lower()).inc()

    def observe(self, fleet: Fleet) -> None:
        """Add gauges that read the fleet whenever they are scraped. Call once."""
        index = fleet.index
        self._gauge("requests_in_flight", "Requests booked on workers", lambda: fleet.num_in_flight)
        self._gauge("workers_ready", "Workers that take requests", lambda: fleet.num_ready)
        self._gauge(
            "workers_not_answering",
            "Lost workers whose processes may run, but do not answer",
            lambda: sum(link.silent_s > 0 for link in fleet.links()),
        )
        self._gauge(
            "longest_silence_seconds",
            "Time since the last report of the worker that has not answered for longest; 0 if there is none",
            lambda: max((link.silent_s for link in fleet.links()), default=0.0),
        )
        self._gauge("index_entries", "Pairs of block hash and worker", lambda: len(index))
        self._gauge("index_entries_max", "Maximum of the entries", lambda: index.max_entries)
        self._gauge("index_entries_dropped", "Entries given up for lack of room", lambda: index.num_dropped)
        self._gauge("index_disk_entries", "Pairs of worker and hash of a block on its disk", lambda: len(index.disk))
        self._gauge("index_predicted_blocks", "Blocks predicted on placement", lambda: index.num_predicted)
        self._gauge("index_predicted_blocks_max", "Maximum of the predicted blocks", lambda: index.max_predicted)
        self._gauge("sessions", "Sessions whose worker is remembered", lambda: fleet.num_sessions)
        self._gauge("sessions_max", "Maximum of the remembered sessions", lambda: fleet.max_sessions)
        self._gauge("unread_bytes", "Bytes received from workers and not passed on yet", lambda: fleet.num_unread_bytes)
        self._gauge("unread_bytes_max", "Maximum of these bytes", lambda: fleet.max_unread_bytes)
        self._gauge("resident_bytes", "Memory of the process", resident_bytes)

    def observe_requests(self, admission: Admission, holder: HoldsRequests) -> None:
        """Add gauges that read the queue and the held requests whenever they are scraped. Call once."""
        self._gauge("requests_waiting", "Requests that wait for room on a worker", lambda: admission.num_waiting)
        self._gauge("requests_waiting_max", "Maximum of the waiting requests", lambda: admission.max_waiting)
        self._gauge("requests_held", "Requests in flight, waiting ones included", lambda: holder.request_load.held)
        self._gauge("requests_held_max", "Maximum of the requests in flight", lambda: holder.request_load.most_held)
        self._gauge("request_bytes", "Bytes of the requests in flight", lambda: holder.request_load.num_bytes)
        self._gauge("request_bytes_max", "Maximum of these bytes", lambda: holder.request_load.most_bytes)

    def observe_scaling(self, scaling: Scaling) -> None:
        """Add the signals of each model that autoscalers follow. Call once."""
        self.registry.register(_Signals(scaling))

    def observe_sessions(self, sessions: SessionServer) -> None:
        """Add gauges that read the callers' sessions whenever they are scraped. Call once."""
        self._gauge("callers", "Sessions of gateways", lambda: sessions.num_sessions)
        self._gauge("callers_max", "Maximum of the sessions of gateways", lambda: MAX_SESSIONS)
        self._gauge("unsent_bytes", "Bytes that gateways have not taken yet", lambda: sessions.num_unsent_bytes)
        self._gauge("unsent_bytes_max", "Maximum of these bytes", lambda: MAX_UNSENT_BYTES * sessions.num_sessions)

    def observe_leases(self, leases: LeaseReader) -> None:
        """Add gauges for whether Redis can be read and written. Call once."""
        self._gauge("redis_up", "1 while the leases in Redis can be read", lambda: float(leases.is_connected))
        self._gauge("redis_writable", "1 while Redis takes writes", lambda: float(leases.is_writable))

    def _gauge(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        Gauge(f"headrace_router_{name}", documentation, registry=self.registry).set_function(read)

    def serve(self, host: str, port: int) -> None:
        """Answer scrapes on this address, in a separate thread. Raises OSError if it cannot be bound."""
        serve_scrapes(host, port, self.registry)
