"""The placement of workers in the gateway's metrics."""

from __future__ import annotations

from headrace.gateway.telemetry.metrics import Metrics
from headrace.protos import router_pb2, worker_pb2
from headrace.protos.inference_pb2 import Finish
from headrace.protos.router_pb2 import WORKER_STATE_READY, WORKER_STATE_UNREACHABLE, WorkerInfo, WorkerState
from headrace.protos.worker_pb2 import Load

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
    text = Metrics().exposition(workers)[0].decode()
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


def test_a_gateway_sums_the_workers_of_each_model_under_the_names_of_vllm() -> None:
    def worker(number: int, model: str, state: WorkerState = WORKER_STATE_READY) -> WorkerInfo:
        load = Load(num_running=number, num_waiting=1, num_blocks=100, num_free_blocks=100 - 10 * number)
        load.counters.prompt_tokens_computed, load.counters.prompt_tokens_cached = 30, 10
        return WorkerInfo(worker_id=f"w{number}", model=model, state=state, load=load)

    workers = [worker(1, "m"), worker(3, "m"), worker(5, "n"), worker(9, "m", WORKER_STATE_UNREACHABLE)]
    metrics = Metrics(vllm=True)
    metrics.first_token("m", 0.3)
    finish = Finish()
    finish.timings.queue_us = 250_000
    metrics.timed("m", finish)
    page = metrics.exposition(workers, block_sizes={"m": 32})[0].decode().splitlines()
    for line in (
        'vllm:num_requests_running{model_name="m"} 4.0',
        'vllm:num_requests_running{model_name="n"} 5.0',
        'vllm:num_requests_waiting{model_name="m"} 2.0',
        'vllm:kv_cache_usage_perc{model_name="m"} 0.2',
        'vllm:prefix_cache_hits_total{model_name="m"} 20.0',
        'vllm:cache_config_info{block_size="32",model_name="m",num_gpu_blocks="200"} 1.0',
        'vllm:time_to_first_token_seconds_sum{model_name="m"} 0.3',
        'vllm:request_queue_time_seconds_sum{model_name="m"} 0.25',
        'headrace_worker_kv_use{worker="w3"} 0.3',
    ):
        assert line in page, line
    assert not any(line.startswith("vllm:") for line in Metrics().exposition(workers)[0].decode().splitlines())


def test_each_rank_of_a_divided_model_shows_its_time_and_its_wait() -> None:
    divided = worker_pb2.Load(ranks=[worker_pb2.Rank(step_seconds=9), worker_pb2.Rank(step_seconds=8, wait_seconds=3)])
    workers = [router_pb2.WorkerInfo(worker_id="a", load=divided), router_pb2.WorkerInfo(worker_id="b", load=BOUND)]
    lines = [line for line in Metrics().exposition(workers)[0].decode().splitlines() if "worker_rank" in line]
    assert [line for line in lines if not line.startswith("#")] == [
        'headrace_worker_rank_step_seconds_total{rank="0",stage="",worker="a"} 9.0',
        'headrace_worker_rank_step_seconds_total{rank="1",stage="",worker="a"} 8.0',
        'headrace_worker_rank_wait_seconds_total{rank="0",stage="",worker="a"} 0.0',
        'headrace_worker_rank_wait_seconds_total{rank="1",stage="",worker="a"} 3.0',
    ]


def test_each_stage_of_a_pipeline_shows_its_time_and_its_wait() -> None:
    stages = [worker_pb2.PipelineStage(compute_seconds=9), worker_pb2.PipelineStage(compute_seconds=6, wait_seconds=3)]
    workers = [router_pb2.WorkerInfo(worker_id="a", load=worker_pb2.Load(stages=stages))]
    lines = [line for line in Metrics().exposition(workers)[0].decode().splitlines() if "worker_stage" in line]
    assert [line for line in lines if not line.startswith("#")] == [
        'headrace_worker_stage_compute_seconds_total{stage="0",worker="a"} 9.0',
        'headrace_worker_stage_compute_seconds_total{stage="1",worker="a"} 6.0',
        'headrace_worker_stage_wait_seconds_total{stage="0",worker="a"} 0.0',
        'headrace_worker_stage_wait_seconds_total{stage="1",worker="a"} 3.0',
    ]
