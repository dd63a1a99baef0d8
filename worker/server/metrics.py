"""The worker's Prometheus metrics: its load, read from the latest report when scraped, and the times of requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import prometheus_client
from prometheus_client import Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from headrace.common.kernel_files import format_list
from headrace.common.telemetry.vllm_metrics import ModelFigures, Waits, families, kv_use
from headrace.protos.status import Reason
from headrace.worker.host.binding import Binding, RankReport
from headrace.worker.request.request import Request
from headrace.worker.server.watch import WatchHub

# The start time of each series would be that of the process.
prometheus_client.disable_created_metrics()

_WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_DECODE_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0)

_GAUGES = {
    "num_running": ("requests_running", "Requests in the running batch."),
    "num_waiting": ("requests_waiting", "Requests that wait for their first step."),
    "num_fetching": ("requests_fetching", "Those of them that wait for KV blocks from the disk or another worker."),
    "num_encoding": ("requests_encoding", "Those of them that wait for their images to be encoded."),
    "num_running_background": ("requests_running_background", "Requests of batches in the running batch."),
    "num_waiting_background": ("requests_waiting_background", "Requests of batches that gave their places to others."),
    "encoding_tokens": ("encoding_tokens", "Image tokens that are being encoded or wait for it."),
    "image_tokens_per_s": ("image_tokens_per_second", "Mean rate of encoding images."),
    "num_cached_images": ("images_cached", "Images whose states are kept."),
    "image_cache_bytes": ("image_cache_bytes", "Memory of the states of images."),
    "num_uncached_tokens": ("uncached_tokens", "Prompt tokens that are not computed yet."),
    "num_blocks": ("kv_blocks", "All KV blocks."),
    "num_free_blocks": ("kv_blocks_free", "KV blocks that can be allocated, including those with cached content."),
    "num_cached_blocks": ("kv_blocks_cached", "KV blocks that the prefix cache can find."),
    "num_disk_blocks": ("disk_blocks", "KV blocks in the files of --kv-disk, which the workers of a host share."),
    "num_disk_slots": ("disk_slots", "KV blocks that fit into these files; 0 without --kv-disk."),
    "num_state_slots": ("state_slots", "Slots for states of recurrent layers; 0 for models without them."),
    "num_saved_states": ("states_saved", "States of recurrent layers that the prefix cache can find."),
    "num_window_slots": (
        "window_slots",
        "Slots for blocks of layers with a sliding window; 0 if these keep all tokens.",
    ),
    "num_held_window_slots": ("window_slots_held", "Those slots that the windows of running requests take."),
    "prefill_tokens_per_s": ("prefill_tokens_per_second", "Mean rate of prompt processing."),
    "decode_step_ms": ("decode_step_milliseconds", "Mean time of a decode step for each token of a stream."),
}


class LoadCollector(Collector):
    """Exports the hub's latest report when metrics are scraped."""

    def __init__(self, hub: WatchHub) -> None:
        self._hub = hub

    def collect(self) -> Iterator[Metric]:
        """The metrics of the latest report, one family after another."""
        load = self._hub.report.load
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"headrace_worker_{name}", text, value=getattr(load, field))
        text = "Part of the KV blocks that requests use, from 0 to 1."
        yield GaugeMetricFamily("headrace_worker_kv_use", text, value=kv_use(load.num_blocks, load.num_free_blocks))
        text = "Tokens of a KV block."
        yield GaugeMetricFamily("headrace_worker_kv_block_tokens", text, value=self._hub.block_size)
        is_stuck = self._hub.silent_because is not None
        text = "1 while the engine has work and no step ends (--stuck-after-s), else 0."
        yield GaugeMetricFamily("headrace_worker_stuck", text, value=is_stuck)
        if self._hub.is_published is not None:
            text = "1 while the lease in Redis is renewed. Only with --redis."
            yield GaugeMetricFamily("headrace_worker_lease_published", text, value=self._hub.is_published)
        for name, value in self._hub.counters.items():
            yield CounterMetricFamily(f"headrace_worker_{name}", f"Total of {name} since the start.", value=value)
        yield from binding_metrics(self._hub.binding)
        yield from rank_metrics(self._hub.ranks())


class VllmCollector(Collector):
    """Exports the same report under the names of vLLM, for the model of this name."""

    def __init__(self, hub: WatchHub, model: str) -> None:
        self._hub = hub
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        load, counters = self._hub.report.load, self._hub.counters
        cached = counters.get("prompt_tokens_cached", 0)
        adapters, max_adapters = self._hub.adapters_in_memory()
        yield from families(
            [
                ModelFigures(
                    self._model,
                    load.num_running,
                    load.num_waiting,
                    load.num_blocks,
                    load.num_free_blocks,
                    self._hub.block_size,
                    counters.get("prompt_tokens_computed", 0) + cached,
                    cached,
                    counters.get("tokens_generated", 0),
                    counters.get("preemptions", 0),
                    adapters,
                    max_adapters,
                )
            ]
        )


def binding_metrics(binding: Binding | None) -> Iterator[Metric]:
    """The Prometheus metrics of where threads and memory are; none while `binding` is unknown."""
    if binding is None:
        return
    node = "" if binding.numa_node is None else str(binding.numa_node)
    info = GaugeMetricFamily(
        "headrace_worker_binding_info",
        "Always 1. Labels: NUMA node (empty if there is not exactly one), allowed CPUs, memory policy.",
        labels=["numa_node", "cpus_allowed", "memory_policy"],
    )
    info.add_metric([node, format_list(binding.cpus), binding.memory_policy], 1)
    yield info
    for name, text, by_node in (
        ("resident_bytes", "Resident memory by NUMA node.", binding.resident_bytes),
        ("anonymous_bytes", "Resident anonymous memory by NUMA node.", binding.anonymous_bytes),
        ("kv_resident_bytes", "Resident memory of the KV cache by NUMA node.", binding.kv_bytes),
    ):
        gauge = GaugeMetricFamily(f"headrace_worker_{name}", text, labels=["node"])
        for number in sorted(binding.resident_bytes):
            gauge.add_metric([str(number)], by_node.get(number, 0))
        yield gauge
    yield GaugeMetricFamily("headrace_worker_kv_huge_bytes", "KV cache in huge pages.", value=binding.kv_huge_bytes)


def rank_metrics(ranks: Sequence[RankReport]) -> Iterator[Metric]:
    """The Prometheus metrics of the ranks of a divided model; none without any."""
    if not ranks:
        return
    steps = CounterMetricFamily(
        "headrace_worker_rank_step_seconds", "Time of the steps of each rank of a divided model.", labels=["rank"]
    )
    waits = CounterMetricFamily(
        "headrace_worker_rank_wait_seconds",
        "Part of it in which the rank waited for slower ones. The slowest waits least.",
        labels=["rank"],
    )
    for number, rank in enumerate(ranks):
        steps.add_metric([str(number)], rank.step_s)
        waits.add_metric([str(number)], rank.waited_s)
    yield from (steps, waits)


class RequestMetrics:
    """Histograms of the times of requests, in seconds, and counters of refused requests by reason."""

    def __init__(self, registry: CollectorRegistry, model: str = "", waits: Waits | None = None) -> None:
        """`waits` gets the waits of requests for the `model` too."""
        self._registry = registry
        self._model = model
        self._waits = waits
        self._queue = self._histogram("queue", "Time from the arrival of a request to its first step.", _WAIT_BUCKETS)
        self._prefill = self._histogram(
            "prefill", "Time from the first step of a request to its first token.", _WAIT_BUCKETS
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
            "number of pixels (file), tokens that are not the images' (tokens), unknown detail (detail).",
            ["reason"],
            registry=registry,
        )
        self._images = self._histogram(
            "image_wait", "Time that a request waited for its images to be encoded.", _WAIT_BUCKETS
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
