"""The metrics of a gateway in OpenMetrics, with the trace of a recent request in each bucket."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from headrace.common.telemetry.span import Span
from headrace.gateway.telemetry import metrics as module
from headrace.gateway.telemetry.metrics import Metrics
from headrace.protos.router_pb2 import WORKER_STATE_READY, WorkerInfo
from headrace.protos.worker_pb2 import Load

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


class Recording(Span):
    def __init__(self, flags: str) -> None:
        self._flags = flags

    @property
    def is_recording(self) -> bool:
        return True

    @property
    def traceparent(self) -> str:
        return f"00-{TRACE_ID}-b7ad6b7169203331-{self._flags}"


def exemplars(page: bytes, name: str) -> list[dict[str, str]]:
    """The labels of the exemplars of a histogram."""
    found = {family.name: family for family in text_string_to_metric_families(page.decode())}
    return [sample.exemplar.labels for sample in found[name].samples if sample.exemplar is not None]


@pytest.mark.parametrize(("flags", "expected"), [("01", [{"trace_id": TRACE_ID}]), ("00", [])])
def test_a_bucket_names_the_trace_of_a_request_that_is_sampled(
    monkeypatch: pytest.MonkeyPatch, flags: str, expected: list[dict[str, str]]
) -> None:
    monkeypatch.setattr(module, "current_span", lambda: Recording(flags))
    metrics = Metrics()
    metrics.first_token("m", 0.3)
    page, content_type = metrics.exposition([], accept=ACCEPT)
    assert content_type.startswith("application/openmetrics-text")
    assert exemplars(page, "headrace_time_to_first_token_seconds") == expected
    plain, content_type = metrics.exposition([])
    assert (content_type.startswith("text/plain"), b"trace_id" in plain) == (True, False)


def test_the_page_is_one_whole_with_the_names_of_vllm_as_they_are() -> None:
    metrics = Metrics(vllm=True)
    metrics.first_token("m", 0.3)
    worker = WorkerInfo(worker_id="w", model="m", state=WORKER_STATE_READY, load=Load(num_blocks=3))
    page, _ = metrics.exposition([worker], accept=ACCEPT)
    assert page.count(b"# EOF") == 1
    assert page.endswith(b"# EOF\n")
    assert b'vllm:num_requests_running{model_name="m"} 0.0' in page
    assert exemplars(page, "headrace_time_to_first_token_seconds") == []
