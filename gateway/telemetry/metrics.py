"""Metrics of the gateway, and of the fleet by way of its router, in the Prometheus text format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics

from headrace.common.telemetry.tracing import current_span
from headrace.common.telemetry.vllm_metrics import ModelFigures, Waits, families
from headrace.common.telemetry.worker_metrics import (
    COUNTERS,
    FLEET_GAUGES,
    load_metrics,
    numa_node_of,
    worker_gauge,
)
from headrace.gateway.telemetry.recent import Recent
from headrace.protos.host_pb2 import HostedModel, HostedModelState
from headrace.protos.inference_pb2 import Finish
from headrace.protos.router_pb2 import WORKER_STATE_READY, WorkerInfo
from headrace.protos.status import Reason, StatusError

# All series begin when the process starts, so omit their own creation times.
prometheus_client.disable_created_metrics()

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_POSITION_BUCKETS = (16, 64, 256, 1024, 4096, 16384)
_PER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

_OPEN_METRICS = "application/openmetrics-text"
# The last line of OpenMetrics.
_END = b"# EOF\n"


def outcome_of(error: StatusError, *, has_deadline: bool) -> str:
    """The outcome of a request that failed. A caller's own time limit that has passed is not a fault of the fleet."""
    if error.reason is Reason.DEADLINE and has_deadline:
        return "client_deadline"
    return error.reason.name.lower()


class Metrics:
    """The gateway's own metrics. Times are in seconds."""

    def __init__(self, *, vllm: bool = False) -> None:
        """`vllm`: show the metrics of models under the names of vLLM too."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._waits = Waits(self.registry) if vllm else None
        self.recent = Recent()
        self._requests = self._counter(
            "requests",
            "Requests by endpoint and outcome: ok, or the reason of the error in lower case.",
            "endpoint",
            "outcome",
        )
        self.in_flight = Gauge("headrace_requests_in_flight", "Requests being answered.", registry=self.registry)
        self._ttft = self._histogram("time_to_first_token", "Arrival of a request to its first token.", _TTFT_BUCKETS)
        self._per_token = self._histogram(
            "time_per_output_token", "Mean time between the tokens of one answer.", _PER_TOKEN_BUCKETS
        )
        self._request = self._histogram(
            "request_duration", "Arrival of a request to its end.", _REQUEST_BUCKETS, ("endpoint",)
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of answered requests.")
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens found in a prefix cache.")
        self._parting = Histogram(
            "headrace_prompt_parting_tokens",
            "Position of the first difference in prompts that repeat much of a recent one of their tenant behind it.",
            ("model",),
            buckets=_POSITION_BUCKETS,
            registry=self.registry,
        )
        self._repeated = self._counter(
            "prompt_tokens_behind_difference",
            "Prompt tokens that a recent prompt had too, but behind a difference, where no cache helps (about).",
            "model",
        )
        self._images = self._counter("images", "Images in prompts of answered requests.")
        self._image_tokens = self._counter("prompt_tokens_of_images", "Prompt tokens that stand for images.")
        self._image_refusals = self._counter(
            "image_refusals", "Requests that were refused because of an image, by reason.", "reason"
        )
        self._generated = self._counter("generated_tokens", "Tokens delivered.")
        self._queue = self._histogram("queue", "Arrival at a worker to the first step there.", _TTFT_BUCKETS)
        self._prefill = self._histogram("prefill", "First step at a worker to the first token.", _TTFT_BUCKETS)
        self._decode = self._histogram("decode", "First token at a worker to the last.", _REQUEST_BUCKETS)
        self._retries = self._counter(
            "upstream_retries",
            "Attempts that followed a failed one, through the same router or another, by the reason of the failure.",
            "reason",
        )
        self._shadowed = self._counter(
            "shadow_requests",
            "Copies of requests for the shadow of an alias, by model and outcome; left_out if too many were running.",
            "model",
            "outcome",
        )
        self._mcp_calls = self._counter(
            "mcp_calls",
            "Calls of tools of MCP servers by outcome: ok, tool_error, failed or cancelled.",
            "server",
            "outcome",
        )
        self._mcp_starts = self._counter("mcp_starts", "Starts of MCP servers that are programs.", "server")
        self._mcp_call = self._histogram("mcp_call", "Duration of calls of MCP tools.", _REQUEST_BUCKETS, ("server",))
        self._batch_lines = self._counter(
            "batch_lines",
            "Lines of batches by outcome: ok, failed, or retry for an attempt that is made again later.",
            "outcome",
        )
        self.batch_lines_running = Gauge(
            "headrace_batch_lines_running", "Lines of batches that this gateway runs.", registry=self.registry
        )
        self.batches_open = Gauge(
            "headrace_batches_open", "Batches of the store that have not ended.", registry=self.registry
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"headrace_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, description: str, buckets: Sequence[float], labels: Sequence[str] = ()
    ) -> Histogram:
        full_name = f"headrace_{name}_seconds"
        return Histogram(full_name, description, labels, buckets=buckets, registry=self.registry)

    def request_ended(self, endpoint: str, outcome: str, duration_s: float) -> None:
        """Count a request that was answered, refused, failed or cancelled."""
        self._requests.labels(endpoint, outcome).inc()
        self._request.labels(endpoint).observe(duration_s, _trace())
        self.recent.request_ended(endpoint, outcome)

    def parted(self, model: str, position: int, num_repeated_tokens: int) -> None:
        """Observe a prompt that repeats tokens of a recent one after a difference at this position."""
        self._parting.labels(model).observe(position)
        self._repeated.labels(model).inc(num_repeated_tokens)

    def images(self, number: int, num_tokens: int) -> None:
        """Count the images of a prompt, and their tokens."""
        self._images.inc(number)
        self._image_tokens.inc(num_tokens)

    def image_refused(self, reason: str) -> None:
        """Count a request that was refused because of an image."""
        self._image_refusals.labels(reason).inc()

    def first_token(self, model: str, since_arrival_s: float) -> None:
        """Observe the time to the first token of a choice."""
        self._ttft.observe(since_arrival_s, _trace())
        if self._waits is not None:
            self._waits.first_token(model, since_arrival_s)
        self.recent.first_token(model, since_arrival_s)

    def choice_ended(
        self,
        model: str,
        num_prompt_tokens: int,
        num_cached_tokens: int = 0,
        num_generated_tokens: int = 0,
        decoding_s: float | None = None,
    ) -> None:
        """Count the tokens of a choice, whole or broken off. `decoding_s` is from its first to its last token; None if
        its tokens came together, or if its times are not those of callers, as in batches."""
        self.recent.prompt(model, num_prompt_tokens, num_cached_tokens)
        self._prompt.inc(num_prompt_tokens)
        self._cached.inc(num_cached_tokens)
        self._generated.inc(num_generated_tokens)
        if num_generated_tokens > 1 and decoding_s is not None:
            self._per_token.observe(decoding_s / (num_generated_tokens - 1), _trace())

    def timed(self, model: str, finish: Finish) -> None:
        """Observe the times of a generation that a worker reports with its finish."""
        if finish.HasField("timings"):
            if self._waits is not None:
                self._waits.scheduled(model, 1e-6 * finish.timings.queue_us)
            trace = _trace()
            self._queue.observe(1e-6 * finish.timings.queue_us, trace)
            self._prefill.observe(1e-6 * finish.timings.prefill_us, trace)
            self._decode.observe(1e-6 * finish.timings.decode_us, trace)

    def retried(self, reason: Reason) -> None:
        """Count an attempt that follows a failed one."""
        self._retries.labels(reason.name.lower()).inc()

    def shadowed(self, model: str, outcome: str) -> None:
        """Count a copy of a request for another model."""
        self._shadowed.labels(model, outcome).inc()

    def mcp_called(self, server: str, outcome: str, duration_s: float) -> None:
        """Count and observe the call of a tool of an MCP server."""
        self._mcp_calls.labels(server, outcome).inc()
        self._mcp_call.labels(server).observe(duration_s, _trace())

    def mcp_started(self, server: str) -> None:
        """Count the start of an MCP server that is a program."""
        self._mcp_starts.labels(server).inc()

    def batch_line(self, outcome: str) -> None:
        """Count the end or the attempt of a line of a batch."""
        self._batch_lines.labels(outcome).inc()

    def exposition(
        self,
        workers: Iterable[WorkerInfo],
        models: Iterable[HostedModel] = (),
        block_sizes: Mapping[str, int] = MappingProxyType({}),
        *,
        accept: str = "",
    ) -> tuple[bytes, str]:
        """All metrics, including those of the workers and of a host's models, and their content type: OpenMetrics, with
        exemplars, if the header `accept` has it, else the Prometheus text format. `block_sizes` are the tokens of a KV
        block of each model."""
        fleet = CollectorRegistry()
        workers = list(workers)
        fleet.register(_Fleet(workers))
        fleet.register(_Hosted(list(models)))
        if self._waits is not None:
            fleet.register(_Vllm(workers, block_sizes))
        _, content_type = choose_encoder(accept)
        if not content_type.startswith(_OPEN_METRICS):
            return generate_latest(self.registry) + generate_latest(fleet), content_type
        # Names as they are: escaped, vllm:... would become vllm_...
        own, others = (
            openmetrics.generate_latest(part, escaping=openmetrics.ALLOWUTF8) for part in (self.registry, fleet)
        )
        return own.removesuffix(_END) + others, openmetrics.CONTENT_TYPE_LATEST


def _trace() -> dict[str, str] | None:
    """The exemplar of an observation: the trace of the running request, if it is recorded."""
    span = current_span()
    if not span.is_recording:
        return None
    _, trace_id, _, flags = span.traceparent.split("-")
    return {"trace_id": trace_id} if int(flags, 16) & 1 else None


class _Vllm:
    """Collects the sums over the workers of each model under the names of vLLM."""

    def __init__(self, workers: Sequence[WorkerInfo], block_sizes: Mapping[str, int]) -> None:
        self._workers = workers
        self._block_sizes = block_sizes

    def collect(self) -> Iterator[Metric]:
        models: dict[str, ModelFigures] = {}
        for worker in self._workers:
            if worker.state == WORKER_STATE_READY and worker.HasField("load"):
                figures = self._figures(worker)
                known = models.get(worker.model)
                models[worker.model] = figures if known is None else known.plus(figures)
        yield from families(models.values())

    def _figures(self, worker: WorkerInfo) -> ModelFigures:
        adapters = worker.adapters
        return ModelFigures.of(
            worker.model,
            worker.load,
            self._block_sizes.get(worker.model, 0),
            [adapter.name for adapter in adapters.adapters if adapter.is_in_memory],
            adapters.max_in_memory,
        )


class _Hosted:
    """Collects the metrics of the models that a host loads and unloads."""

    def __init__(self, models: list[HostedModel]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        state = GaugeMetricFamily("headrace_model_state", "1 for the state of a model.", labels=["model", "state"])
        memory = GaugeMetricFamily(
            "headrace_model_memory_bytes", "Memory that a model takes when it is loaded.", labels=["model"]
        )
        for model in self._models:
            word = HostedModelState.Name(model.state).removeprefix("HOSTED_MODEL_STATE_").lower()
            state.add_metric([model.name, word], 1.0)
            memory.add_metric([model.name], model.num_bytes)
        yield from (state, memory)


class _Fleet:
    """Collects the metrics of the workers that the router knows."""

    def __init__(self, workers: list[WorkerInfo]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        up = worker_gauge("up", "1 while the worker takes requests.", "worker")
        for worker in self._workers:
            up.add_metric([worker.worker_id], float(worker.state == WORKER_STATE_READY))
        yield up
        info = worker_gauge(
            "info",
            "1; the model of the worker, its address, its NUMA node (empty: not on one).",
            "worker",
            "model",
            "address",
            "numa_node",
        )
        for worker in self._workers:
            info.add_metric([worker.worker_id, worker.model, worker.address, numa_node_of(worker.load)], 1.0)
        yield info
        loads = [((worker.worker_id,), worker.load) for worker in self._workers if worker.HasField("load")]
        yield from load_metrics(loads, ("worker",), FLEET_GAUGES, COUNTERS)
