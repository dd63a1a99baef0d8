"""Metrics of the loads of workers. Each worker shows its own, and gateways show those of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.protos.load_report import kv_use
from headrace.protos.worker_pb2 import Counters, Load, PipelineStage, Rank

# field of Load -> name and description of its gauge
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
    "num_uncached_tokens": ("uncached_tokens", "Prompt tokens that are neither computed nor cached."),
    "num_blocks": ("kv_blocks", "All KV blocks."),
    "num_free_blocks": ("kv_blocks_free", "KV blocks that can be allocated, including those with reusable content."),
    "num_cached_blocks": ("kv_blocks_cached", "KV blocks that can be found by a prefix."),
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
GAUGES = tuple(_GAUGES)
"""The fields of `Load` that a worker shows."""
FLEET_GAUGES = (
    "num_blocks",
    "num_free_blocks",
    "num_cached_blocks",
    "num_running",
    "num_waiting",
    "num_encoding",
    "num_uncached_tokens",
)
"""The fields of `Load` that gateways show of each worker."""
COUNTERS = tuple(field.name for field in Counters.DESCRIPTOR.fields)
Labelled = tuple[Sequence[str], Load]
"""A load, and the values of its labels."""


def load_metrics(
    loads: Sequence[Labelled], labels: Sequence[str], gauges: Iterable[str], counters: Iterable[str]
) -> Iterator[Metric]:
    """The metrics of these loads with the labels `labels`: the fields `gauges`, the `counters`, and the placement of
    threads and memory. A metric for which no load has a value has no samples."""
    for field in gauges:
        gauge = worker_gauge(*_GAUGES[field], *labels)
        for values, load in loads:
            gauge.add_metric(values, getattr(load, field))
        yield gauge
    use = worker_gauge("kv_use", "Part of the KV blocks that requests use, from 0 to 1.", *labels)
    for values, load in loads:
        use.add_metric(values, kv_use(load.num_blocks, load.num_free_blocks))
    yield use
    for name in counters:
        counter = _counter(name, f"Total of {name.replace('_', ' ')} since the worker's start.", *labels)
        for values, load in loads:
            counter.add_metric(values, getattr(load.counters, name))
        yield counter
    yield from _binding_metrics(loads, labels)
    yield from _part_metrics(loads, labels)


def worker_gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    """An empty gauge of workers."""
    return GaugeMetricFamily(f"headrace_worker_{name}", text, labels=labels)


def numa_node_of(load: Load) -> str:
    """The label of a worker's NUMA node; empty if there is not exactly one."""
    return str(load.numa_node) if load.HasField("numa_node") else ""


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"headrace_worker_{name}", text, labels=labels)


def _binding_metrics(loads: Sequence[Labelled], labels: Sequence[str]) -> Iterator[Metric]:
    info = worker_gauge(
        "binding_info",
        "Always 1. Labels: NUMA node (empty if there is not exactly one), allowed CPUs, memory policy.",
        *labels,
        "numa_node",
        "cpus_allowed",
        "memory_policy",
    )
    resident = worker_gauge("resident_bytes", "Resident memory by NUMA node.", *labels, "node")
    anonymous = worker_gauge("anonymous_bytes", "Resident memory by NUMA node, without that of files.", *labels, "node")
    kv_resident = worker_gauge("kv_resident_bytes", "Resident memory of the KV cache by NUMA node.", *labels, "node")
    kv_huge = worker_gauge("kv_huge_bytes", "KV cache in huge pages.", *labels)
    for values, load in loads:
        if not load.HasField("binding"):
            continue
        binding = load.binding
        info.add_metric([*values, numa_node_of(load), binding.cpus_allowed, binding.memory_policy], 1)
        for memory in binding.memory:
            of_node = [*values, str(memory.node)]
            resident.add_metric(of_node, memory.resident_bytes)
            anonymous.add_metric(of_node, memory.anonymous_bytes)
            kv_resident.add_metric(of_node, memory.kv_bytes)
        kv_huge.add_metric(values, binding.kv_huge_bytes)
    yield from (info, resident, anonymous, kv_resident, kv_huge)


# Of each rank of a divided model or stage, and of each stage of a pipeline.
_TIMES_OF_PARTS = (
    ("rank", "step", "Time of the steps of each rank of a divided model, or of a stage of a pipeline."),
    ("rank", "wait", "Part of it in which the rank waited for slower ones. The slowest waits least."),
    ("stage", "compute", "Time that each stage of a pipeline has computed."),
    (
        "stage",
        "wait",
        "Time in which steps were on their way and the stage did not compute: it waited for other stages or for the "
        "network. The slowest waits least.",
    ),
)


def _part_metrics(loads: Sequence[Labelled], labels: Sequence[str]) -> Iterator[Metric]:
    for part, what, text in _TIMES_OF_PARTS:
        numbered = ("stage", "rank") if part == "rank" else ("stage",)
        times = _counter(f"{part}_{what}_seconds", text, *labels, *numbered)
        for values, load in loads:
            for numbers, one in _ranks_of(load) if part == "rank" else _stages_of(load):
                times.add_metric([*values, *numbers], getattr(one, f"{what}_seconds"))
        yield times


def _stages_of(load: Load) -> Iterator[tuple[Sequence[str], PipelineStage | Rank]]:
    return (((str(number),), stage) for number, stage in enumerate(load.stages))


def _ranks_of(load: Load) -> Iterator[tuple[Sequence[str], PipelineStage | Rank]]:
    """The ranks with the numbers of their stage, which is empty without a pipeline, and of themselves."""
    of_stages = [(str(number), stage.ranks) for number, stage in enumerate(load.stages)] or [("", load.ranks)]
    return (((stage, str(number)), rank) for stage, ranks in of_stages for number, rank in enumerate(ranks))
