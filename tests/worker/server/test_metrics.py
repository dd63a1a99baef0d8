"""The metrics of a worker's load."""

from __future__ import annotations

from unittest.mock import create_autospec

from headrace.protos.load_report import LoadReport
from headrace.worker.engine.mailbox import EngineReport
from headrace.worker.server.adapters import AdapterDesk
from headrace.worker.server.metrics import LoadCollector
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
