"""The metrics of a worker's load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headrace.worker.engine.mailbox import LoadReport
from headrace.worker.server.metrics import LoadCollector


def test_metrics_show_how_full_the_disk_is() -> None:
    report = LoadReport(num_disk_slots=50, num_disk_blocks=40, counters={"blocks_not_written": 3})
    hub: Any = SimpleNamespace(report=report, silent_because=None, is_published=None, binding=None)
    found = {sample.name: sample.value for metric in LoadCollector(hub).collect() for sample in metric.samples}
    assert found["headrace_worker_disk_slots"] == 50
    assert found["headrace_worker_disk_blocks"] == 40
    assert found["headrace_worker_blocks_not_written_total"] == 3
