"""The worker's Prometheus metrics: its load, read from the latest report when scraped, and the times of requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import prometheus_client
from prometheus_client import Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from headrace.common.telemetry.vllm_metrics import WAIT_BUCKETS, ModelFigures, Waits, families
from headrace.common.telemetry.worker_metrics import GAUGES, load_metrics
from headrace.protos.status import Reason
from headrace.worker.request.request import Request
from headrace.worker.server.watch import WatchHub

# The start time of each series would be that of the process.
prometheus_client.disable_created_metrics()

_DECODE_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0)


class LoadCollector(Collector):
    """Exports the hub's latest report when metrics are scraped."""

    def __init__(self, hub: WatchHub) -> None:
        self._hub = hub

    def collect(self) -> Iterator[Metric]:
        """The metrics of the latest report, one family after another."""
        load = self._hub.load()
        for family in load_metrics([((), load)], (), GAUGES, self._hub.counters):
            if family.samples:
                yield family
        text = "Tokens of a KV block."
        yield GaugeMetricFamily("headrace_worker_kv_block_tokens", text, value=self._hub.block_size)
        is_stuck = self._hub.silent_because is not None
        text = "1 while the engine has work and no step ends (--stuck-after-s), else 0."
        yield GaugeMetricFamily("headrace_worker_stuck", text, value=is_stuck)
        if self._hub.is_published is not None:
            text = "1 while the lease in Redis is renewed. Only with --redis."
            yield GaugeMetricFamily("headrace_worker_lease_published", text, value=self._hub.is_published)


class VllmCollector(Collector):
    """Exports the same report under the names of vLLM, for the model of this name."""

    def __init__(self, hub: WatchHub, model: str) -> None:
        self._hub = hub
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        adapters, max_adapters = self._hub.adapters_in_memory()
        yield from families(
            [ModelFigures.of(self._model, self._hub.load(), self._hub.block_size, adapters, max_adapters)]
        )


class RequestMetrics:
    """Histograms of the times of requests, in seconds, and counters of refused requests by reason."""

    def __init__(self, registry: CollectorRegistry, model: str = "", waits: Waits | None = None) -> None:
        """`waits` gets the waits of requests for the `model` too."""
        self._registry = registry
        self._model = model
        self._waits = waits
        self._queue = self._histogram("queue", "Time from the arrival of a request to its first step.", WAIT_BUCKETS)
        self._prefill = self._histogram(
            "prefill", "Time from the first step of a request to its first token.", WAIT_BUCKETS
        )
        self._decode = self._histogram("decode", "Time from the first token of a request to its end.", _DECODE_BUCKETS)
        self._per_token = self._histogram(
            "time_per_output_token", "Mean time between the tokens of an answer.", _PER_TOKEN_BUCKETS
        )
        self._refusals = Counter(
            "headrace_worker_refusals", "Refused requests, by reason.", ["reason"], registry=registry
        )
        self._image_refusals = Counter(
            "headrace_worker_image_refusals",
            "Requests refused for their images: text model (unsupported), number (count), size (bytes), content or "
            "number of pixels (file), tokens that are not the images' (tokens), more tokens than there is memory for "
            "(states), unknown detail (detail).",
            ["reason"],
            registry=registry,
        )
        self._images = self._histogram(
            "image_wait", "Time that a request waited for its images to be encoded.", WAIT_BUCKETS
        )

    def image_refused(self, label: str) -> None:
        """Count a request that was refused for its images."""
        self._image_refusals.labels(label).inc()

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"headrace_worker_{name}_seconds", text, buckets=buckets, registry=self._registry)

    def refused(self, reason: Reason) -> None:
        """Count a request that was refused for `reason`."""
        self._refusals.labels(reason.name.lower()).inc()

    def ended(self, request: Request, now_s: float) -> None:
        """Observe a request that has ended, even if early. The engine may not know yet that its caller has
        disconnected."""
        if not request.scheduled_s:
            return
        self._queue.observe(request.scheduled_s - request.arrival_s)
        if self._waits is not None:
            self._waits.scheduled(self._model, request.scheduled_s - request.arrival_s)
            if request.first_token_s:
                self._waits.first_token(self._model, request.first_token_s - request.arrival_s)
        if request.images:
            self._images.observe(request.image_wait_s)
        if not request.first_token_s:
            return
        self._prefill.observe(request.first_token_s - request.scheduled_s)
        decode_s = (request.ended_s or now_s) - request.first_token_s
        self._decode.observe(decode_s)
        num_tokens = request.num_generated_tokens - len(request.resume_token_ids)
        if num_tokens > 1:
            self._per_token.observe(decode_s / (num_tokens - 1))


def new_registry() -> CollectorRegistry:
    """A registry that has the metrics of this process: CPU time, memory and file descriptors."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry
