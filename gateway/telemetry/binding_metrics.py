"""Metrics of the placement of workers' threads and memory, as each worker reads it from its kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from headrace.protos.router_pb2 import WorkerInfo


def binding_metrics(workers: Sequence[WorkerInfo]) -> Iterator[Metric]:
    """Metrics of the workers that report their NUMA binding."""
    reporting = [worker for worker in workers if worker.load.HasField("binding")]
    info = GaugeMetricFamily(
        "headrace_worker_binding_info",
        "1; NUMA node (empty: not on one), CPUs that threads may run on, memory policy in force.",
        labels=["worker", "numa_node", "cpus_allowed", "memory_policy"],
    )
    resident = GaugeMetricFamily(
        "headrace_worker_resident_bytes", "Resident memory by NUMA node.", labels=["worker", "node"]
    )
    anonymous = GaugeMetricFamily(
        "headrace_worker_anonymous_bytes",
        "Resident memory by NUMA node, without that of files.",
        labels=["worker", "node"],
    )
    kv_resident = GaugeMetricFamily(
        "headrace_worker_kv_resident_bytes", "Resident memory of the KV cache by NUMA node.", labels=["worker", "node"]
    )
    kv_huge = GaugeMetricFamily("headrace_worker_kv_huge_bytes", "KV cache in huge pages.", labels=["worker"])
    for worker in reporting:
        name, binding = worker.worker_id, worker.load.binding
        node = str(worker.load.numa_node) if worker.load.HasField("numa_node") else ""
        info.add_metric([name, node, binding.cpus_allowed, binding.memory_policy], 1)
        for memory in binding.memory:
            resident.add_metric([name, str(memory.node)], memory.resident_bytes)
            anonymous.add_metric([name, str(memory.node)], memory.anonymous_bytes)
            kv_resident.add_metric([name, str(memory.node)], memory.kv_bytes)
        kv_huge.add_metric([name], binding.kv_huge_bytes)
    yield from (info, resident, anonymous, kv_resident, kv_huge)
