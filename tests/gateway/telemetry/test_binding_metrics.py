"""The placement of workers in the gateway's metrics."""

from __future__ import annotations

from headrace.gateway.telemetry.metrics import Metrics
from headrace.protos import router_pb2, worker_pb2

BOUND = worker_pb2.Load(
    numa_node=1,
    binding=worker_pb2.Binding(
        cpus_allowed="4-7",
        memory_policy="prefer:1",
        memory=[
            worker_pb2.NodeMemory(node=0, resident_bytes=50),
            worker_pb2.NodeMemory(node=1, resident_bytes=300, anonymous_bytes=250, kv_bytes=200),
        ],
        kv_huge_bytes=150,
    ),
)
NOT_BOUND = worker_pb2.Load(binding=worker_pb2.Binding(cpus_allowed="0-7", memory_policy="default"))


def exposition(*workers: router_pb2.WorkerInfo) -> list[str]:
    """Lines about bindings."""
    text = Metrics().exposition(workers).decode()
    names = ("binding_info", "resident_bytes", "anonymous_bytes", "kv_resident_bytes", "kv_huge_bytes")
    return [line for line in text.splitlines() if line.startswith(tuple(f"headrace_worker_{name}" for name in names))]


def test_each_worker_shows_its_place_and_its_memory_by_node() -> None:
    lines = exposition(
        router_pb2.WorkerInfo(worker_id="a", load=BOUND), router_pb2.WorkerInfo(worker_id="b", load=NOT_BOUND)
    )
    info = "headrace_worker_binding_info"
    assert f'{info}{{cpus_allowed="4-7",memory_policy="prefer:1",numa_node="1",worker="a"}} 1.0' in lines
    assert f'{info}{{cpus_allowed="0-7",memory_policy="default",numa_node="",worker="b"}} 1.0' in lines
    assert 'headrace_worker_resident_bytes{node="0",worker="a"} 50.0' in lines
    assert 'headrace_worker_anonymous_bytes{node="1",worker="a"} 250.0' in lines
    assert 'headrace_worker_kv_resident_bytes{node="0",worker="a"} 0.0' in lines
    assert 'headrace_worker_kv_huge_bytes{worker="a"} 150.0' in lines


def test_a_worker_that_has_told_nothing_has_none() -> None:
    assert exposition(router_pb2.WorkerInfo(worker_id="a", load=worker_pb2.Load()), router_pb2.WorkerInfo()) == []
