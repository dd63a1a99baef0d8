"""Metrics under the names of vLLM, which schedulers and autoscalers of other projects read (--vllm-metrics).

The values are those of our own metrics. Where vLLM's metric means something that we do not count, the nearest is given,
and docs/how-to/llm-d.md says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.protos.load_report import kv_use
from headrace.protos.worker_pb2 import Load

WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class ModelFigures(NamedTuple):
    """The numbers of one model at one worker, or the sums over several. `adapters` are LoRA adapters in memory."""

    model: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    block_size: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    num_preemptions: int
    adapters: Sequence[str] = ()
    max_adapters: int = 0

    @classmethod
    def of(
        cls, model: str, load: Load, block_size: int, adapters: Sequence[str] = (), max_adapters: int = 0
    ) -> ModelFigures:
        """The numbers of a worker with this load."""
        counters = load.counters
        return cls(
            model,
            load.num_running,
            load.num_waiting,
            load.num_blocks,
            load.num_free_blocks,
            block_size,
            counters.prompt_tokens_computed + counters.prompt_tokens_cached,
            counters.prompt_tokens_cached,
            counters.tokens_generated,
            counters.preemptions,
            adapters,
            max_adapters,
        )

    @property
    def kv_use(self) -> float:
        """The part of the KV blocks that requests use, from 0 to 1."""
        return kv_use(self.num_blocks, self.num_free_blocks)

    def plus(self, other: ModelFigures) -> ModelFigures:
        """The sums. The adapters are those of both."""
        return ModelFigures(
            self.model,
            self.num_running + other.num_running,
            self.num_waiting + other.num_waiting,
            self.num_blocks + other.num_blocks,
            self.num_free_blocks + other.num_free_blocks,
            self.block_size or other.block_size,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_prompt_tokens + other.cached_prompt_tokens,
            self.generated_tokens + other.generated_tokens,
            self.num_preemptions + other.num_preemptions,
            sorted({*self.adapters, *other.adapters}),
            max(self.max_adapters, other.max_adapters),
        )


_GAUGES: Sequence[tuple[str, str, Callable[[ModelFigures], float]]] = (
    ("num_requests_running", "Requests in the running batch.", lambda model: model.num_running),
    ("num_requests_waiting", "Requests that wait for their first step.", lambda model: model.num_waiting),
    ("kv_cache_usage_perc", "Part of the KV blocks that requests use, from 0 to 1.", lambda model: model.kv_use),
)
_COUNTERS: Sequence[tuple[str, str, Callable[[ModelFigures], float]]] = (
    ("prefix_cache_queries", "Prompt tokens.", lambda model: model.prompt_tokens),
    ("prefix_cache_hits", "Of these, found in the prefix cache.", lambda model: model.cached_prompt_tokens),
    ("prompt_tokens", "Prompt tokens.", lambda model: model.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda model: model.generated_tokens),
    ("num_preemptions", "Requests that were computed again.", lambda model: model.num_preemptions),
)


def families(models: Iterable[ModelFigures]) -> Iterator[Metric]:
    """The metrics of these models."""
    models = list(models)
    for name, text, read in _GAUGES:
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        for model in models:
            gauge.add_metric([model.model], read(model))
        yield gauge
    for name, text, read in _COUNTERS:
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"])
        for model in models:
            counter.add_metric([model.model], read(model))
        yield counter
    cache = GaugeMetricFamily(
        "vllm:cache_config_info",
        "1; size and number of KV blocks.",
        labels=["model_name", "block_size", "num_gpu_blocks"],
    )
    adapters = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Time of this page in seconds; LoRA adapters in memory.",
        labels=["model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    for model in models:
        cache.add_metric([model.model, str(model.block_size), str(model.num_blocks)], 1)
        if model.max_adapters:
            adapters.add_metric([model.model, str(model.max_adapters), ",".join(model.adapters), ""], time.time())
    yield cache
    yield adapters


class Waits:
    """Histograms of the waits of requests, in seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"vllm:{name}_seconds", text, ["model_name"], buckets=WAIT_BUCKETS, registry=registry)

        self._first_token = histogram("time_to_first_token", "Arrival of a request to its first token.")
        self._queue = histogram("request_queue_time", "Arrival of a request to its first step.")

    def first_token(self, model: str, since_arrival_s: float) -> None:
        """Observe the first token of a request."""
        self._first_token.labels(model).observe(since_arrival_s)

    def scheduled(self, model: str, since_arrival_s: float) -> None:
        """Observe the first step of a request."""
        self._queue.labels(model).observe(since_arrival_s)
