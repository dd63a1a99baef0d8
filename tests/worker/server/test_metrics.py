"""The metrics of a worker's load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import create_autospec

from prometheus_client import CollectorRegistry, generate_latest

from headrace.common.telemetry.vllm_metrics import Waits
from headrace.protos import worker_pb2
from headrace.protos.load_report import LoadReport
from headrace.worker.engine.mailbox import EngineReport
from headrace.worker.host.binding import RankReport, StageReport
from headrace.worker.server.adapters import AdapterDesk
from headrace.worker.server.metrics import LoadCollector, RequestMetrics, VllmCollector, new_registry
from headrace.worker.server.watch import WatchHub


def exported(report: EngineReport, **adapters: int) -> dict[str, float]:
    """The metrics of a worker with this report and these counters of adapters."""
    desk = create_autospec(AdapterDesk, instance=True)
    desk.counters.return_value = adapters
    hub = WatchHub(epoch=1, max_num_seqs=1, block_size=4, adapters=desk)
    hub.publish(report)
    return {sample.name: sample.value for metric in LoadCollector(hub).collect() for sample in metric.samples}


def test_metrics_show_how_full_the_disk_is() -> None:
    found = exported(
        EngineReport(LoadReport(num_disk_slots=50, num_disk_blocks=40), counters={"blocks_not_written": 3})
    )
    assert found["headrace_worker_disk_slots"] == 50
    assert found["headrace_worker_disk_blocks"] == 40
    assert found["headrace_worker_blocks_not_written_total"] == 3


def test_metrics_count_loads_and_evictions_of_adapters() -> None:
    found = exported(EngineReport(counters={"steps": 5}), adapter_loads=4, adapter_evictions=2)
    assert found["headrace_worker_steps_total"] == 5
    assert found["headrace_worker_adapter_loads_total"] == 4
    assert found["headrace_worker_adapter_evictions_total"] == 2


def test_metrics_show_the_part_of_the_kv_cache_in_use_and_the_size_of_its_blocks() -> None:
    found = exported(EngineReport(LoadReport(num_blocks=200, num_free_blocks=150, num_cached_blocks=120)))
    assert found["headrace_worker_kv_use"] == 0.25
    assert found["headrace_worker_kv_block_tokens"] == 4
    assert exported(EngineReport())["headrace_worker_kv_use"] == 0.0


def test_the_page_has_the_names_of_vllm_if_that_is_wanted() -> None:
    desk = create_autospec(AdapterDesk, instance=True)
    desk.counters.return_value = {}
    desk.in_memory.return_value = worker_pb2.AdapterNames(names=["a", "b"])
    desk.list.return_value = worker_pb2.AdapterList(max_in_memory=4)
    hub = WatchHub(epoch=1, max_num_seqs=8, block_size=32, adapters=desk)
    load = LoadReport(num_running=3, num_waiting=2, num_blocks=200, num_free_blocks=150)
    hub.publish(EngineReport(load, counters={"prompt_tokens_computed": 60, "prompt_tokens_cached": 40}))
    registry = new_registry()
    registry.register(VllmCollector(hub, "m"))
    metrics = RequestMetrics(registry, "m", Waits(registry))
    times = {"arrival_s": 10.0, "scheduled_s": 10.2, "first_token_s": 10.7, "ended_s": 11.0}
    request = SimpleNamespace(**times, images=(), num_generated_tokens=1, resume_token_ids=())
    metrics.ended(cast(Any, request), 11.0)
    page = generate_latest(registry).decode()
    for line in (
        'vllm:num_requests_running{model_name="m"} 3.0',
        'vllm:num_requests_waiting{model_name="m"} 2.0',
        'vllm:kv_cache_usage_perc{model_name="m"} 0.25',
        'vllm:prefix_cache_queries_total{model_name="m"} 100.0',
        'vllm:prefix_cache_hits_total{model_name="m"} 40.0',
        'vllm:cache_config_info{block_size="32",model_name="m",num_gpu_blocks="200"} 1.0',
        'vllm:time_to_first_token_seconds_bucket{le="1.0",model_name="m"} 1.0',
        'vllm:time_to_first_token_seconds_bucket{le="0.5",model_name="m"} 0.0',
        'vllm:request_queue_time_seconds_bucket{le="0.25",model_name="m"} 1.0',
    ):
        assert line in page.splitlines(), line
    labels = 'max_lora="4",model_name="m",running_lora_adapters="a,b",waiting_lora_adapters=""'
    assert f"vllm:lora_requests_info{{{labels}}} " in page


def test_ranks_of_a_divided_model_show_their_times_and_their_waits() -> None:
    registry = CollectorRegistry()
    ranks = [RankReport(frozenset({0}), 0, 5.0, 0.5), RankReport(frozenset({1}), 1, 5.5, 2.0)]
    hub = WatchHub(epoch=1, max_num_seqs=1, block_size=4, ranks=lambda: ranks)
    registry.register(LoadCollector(hub))
    found = {
        (kind, rank): registry.get_sample_value(
            f"headrace_worker_rank_{kind}_seconds_total", {"stage": "", "rank": rank}
        )
        for kind in ("step", "wait")
        for rank in ("0", "1")
    }
    assert found == {("step", "0"): 5.0, ("step", "1"): 5.5, ("wait", "0"): 0.5, ("wait", "1"): 2.0}
    undivided = LoadCollector(WatchHub(epoch=1, max_num_seqs=1, block_size=4)).collect()
    assert not [metric.name for metric in undivided if "rank" in metric.name]


def test_stages_of_a_pipeline_show_what_they_computed_and_how_long_they_waited() -> None:
    registry = CollectorRegistry()
    stages = [StageReport("", 0, 13, 5.0, 0.5), StageReport("10.0.0.6:50071", 13, 17, 3.5, 2.0)]
    registry.register(LoadCollector(WatchHub(epoch=1, max_num_seqs=1, block_size=4, stages=lambda: stages)))
    found = {
        (kind, stage): registry.get_sample_value(f"headrace_worker_stage_{kind}_seconds_total", {"stage": stage})
        for kind in ("compute", "wait")
        for stage in ("0", "1")
    }
    assert found == {("compute", "0"): 5.0, ("compute", "1"): 3.5, ("wait", "0"): 0.5, ("wait", "1"): 2.0}
    whole = LoadCollector(WatchHub(epoch=1, max_num_seqs=1, block_size=4)).collect()
    assert not [metric.name for metric in whole if "_stage_" in metric.name]


def test_ranks_of_stages_have_the_number_of_their_stage() -> None:
    registry = CollectorRegistry()
    ranks = [RankReport(frozenset({0}), 0, 5.0, 0.5), RankReport(frozenset({1}), None, 5.5, 2.0)]
    stages = [StageReport("", 0, 13, 5.0, 0.5, ranks), StageReport("b:1", 13, 17, 3.5, 2.0)]
    hub = WatchHub(epoch=1, max_num_seqs=1, block_size=4, ranks=lambda: ranks, stages=lambda: stages)
    registry.register(LoadCollector(hub))
    steps = "headrace_worker_rank_step_seconds_total"
    assert registry.get_sample_value(steps, {"stage": "0", "rank": "1"}) == 5.5
    assert registry.get_sample_value(steps, {"stage": "1", "rank": "0"}) is None
    assert registry.get_sample_value(steps, {"stage": "", "rank": "0"}) is None, "each rank is counted once"
