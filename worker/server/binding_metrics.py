"""Metrics of the placement of the worker's threads and memory."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from headrace.worker.host.binding import Binding
from headrace.worker.host.numa import format_list


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
