"""The worker's Prometheus metrics, read from its latest load report when scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from headrace.worker.watch import WatchHub

_GAUGES = {
    "num_running": ("requests_running", "Requests in the running batch."),
    "num_waiting": ("requests_waiting", "Requests that wait for their first step."),
    "num_uncached_tokens": ("uncached_tokens", "Prompt tokens still to be computed."),
    "num_blocks": ("kv_blocks", "KV blocks in all."),
    "num_free_blocks": ("kv_blocks_free", "KV blocks free for use, reusable content included."),
    "num_cached_blocks": ("kv_blocks_cached", "KV blocks that can be found by a prefix."),
    "prefill_tokens_per_s": ("prefill_tokens_per_second", "Learned rate of prompt processing."),
    "decode_step_ms": ("decode_step_milliseconds", "Learned time of a decode step."),
}


class LoadCollector(Collector):
    """Gives the hub's latest report the names that the gateway uses too."""

    def __init__(self, hub: WatchHub) -> None:
        self._hub = hub

    def collect(self) -> Iterator[Metric]:
        """All metrics as of now."""
        report = self._hub.report
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"headrace_worker_{name}", text, value=getattr(report, field))
        for name, value in report.counters.items():
            yield CounterMetricFamily(f"headrace_worker_{name}", f"Total of {name} since the start.", value=value)


def registry_of(hub: WatchHub) -> CollectorRegistry:
    """A registry with the worker's metrics."""
    registry = CollectorRegistry()
    registry.register(LoadCollector(hub))
    return registry
