"""Telemetry of a request in a real fleet: one trace through all processes, log lines with its id, and metrics that are
all in the manual, the dashboard and the alerts. Spans come through a collector of another maker, if one was fetched."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests import collector
from tests.e2e.fleet import Fleet, Process, fleet
from tests.e2e.serving import HTTP, MODEL, until
from tests.otlp import ReceivedSpan, Receiver, grpc_receiver
from tests.patience import patience
from tests.ports import free_port
from tests.prometheus import is_installed, prometheus

ROOT = Path(__file__).parent.parent.parent
DASHBOARD = ROOT / "deploy/grafana/headrace.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
OBJECTIVES = ROOT / "deploy/prometheus/slo.yml"
MANUAL = ROOT / "docs/reference/metrics.md"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

# Metrics that only some fleets have, and what they need.
NEEDS_MORE = {
    "headrace_router_redis_up",
    "headrace_router_redis_writable",
    "headrace_worker_lease_published",
    *(
        f"{role}_{name}"
        for role in ("headrace", "headrace_router")
        for name in ("service_watch_up", "service_pods", "service_watch_ends_total")
    ),
}


@dataclass
class Observed:
    """A fleet with one of each, all of whose metrics, spans and logs are seen."""

    fleet: Fleet
    receiver: Receiver
    metrics_urls: dict[str, str]

    def scrape(self, role: str) -> str:
        """The exposition of a process."""
        answer = HTTP.get(self.metrics_urls[role])
        assert answer.status_code == 200
        return answer.text

    def chat(self, *, request_id: str, **fields: Any) -> httpx.Response:
        """An answered question."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Count to twenty."}], "max_tokens": 12}
        headers = {"x-request-id": request_id, "traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        return httpx.post(
            f"{self.fleet.base_url}/v1/chat/completions", json={**body, **fields}, headers=headers, timeout=patience(60)
        )


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """Ready, with a request answered that was traced."""
    ports = {"router": free_port(), "worker": free_port()}
    directory = tmp_path_factory.mktemp("fleet")
    with pytest.MonkeyPatch.context() as environment, grpc_receiver() as receiver, ExitStack() as stack:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        endpoint = receiver.url
        if collector.is_there():
            endpoint = stack.enter_context(collector.collector(receiver, directory)).grpc_url
        common = ("--otlp-endpoint", endpoint, "--log-format", "json", "--log-level", "debug")
        with fleet(
            directory,
            num_workers=1,
            # Without drafts, so that the number of tokens in a step is known.
            worker_flags=(*common, "--metrics", f"127.0.0.1:{ports['worker']}", "--speculation", "off"),
            router_flags=(*common, "--metrics", f"127.0.0.1:{ports['router']}"),
            gateway_flags=(*common, "--access-log"),
        ) as running:
            urls = {role: f"http://127.0.0.1:{port}/metrics" for role, port in ports.items()}
            urls["gateway"] = f"{running.base_url}/metrics"
            seen = Observed(running, receiver, urls)
            assert seen.chat(request_id="req-traced").status_code == 200
            yield seen


# --- traces ---------------------------------------------------------------------------------------------------------


def until_traced(observed: Observed, num_spans: int) -> dict[tuple[str, str, str], ReceivedSpan]:
    """The spans of the traced request by service, name and kind."""
    until(lambda: len(observed.receiver.of_trace(TRACE_ID)) >= num_spans, f"{num_spans} spans have come")
    spans = observed.receiver.of_trace(TRACE_ID)
    return {(span.service.removeprefix("headrace-"), span.name, span.kind): span for span in spans}


GENERATE = "headrace.v1.Inference/Generate"
# each span and the one above it
TREE = {
    ("gateway", "tokenize", "INTERNAL"): ("gateway", "POST /v1/chat/completions", "SERVER"),
    ("gateway", GENERATE, "CLIENT"): ("gateway", "POST /v1/chat/completions", "SERVER"),
    ("router", GENERATE, "SERVER"): ("gateway", GENERATE, "CLIENT"),
    ("router", "place", "INTERNAL"): ("router", GENERATE, "SERVER"),
    ("router", GENERATE, "CLIENT"): ("router", GENERATE, "SERVER"),
    ("worker", GENERATE, "SERVER"): ("router", GENERATE, "CLIENT"),
    ("worker", "queue", "INTERNAL"): ("worker", GENERATE, "SERVER"),
    ("worker", "prefill", "INTERNAL"): ("worker", GENERATE, "SERVER"),
    ("worker", "decode", "INTERNAL"): ("worker", GENERATE, "SERVER"),
}


def test_a_request_is_one_trace_from_the_gateway_to_the_engine(observed: Observed) -> None:
    spans = until_traced(observed, 10)
    assert spans.keys() == {*TREE.keys(), *TREE.values()}
    root = spans["gateway", "POST /v1/chat/completions", "SERVER"]
    assert root.parent_id == PARENT_ID
    for below, above in TREE.items():
        assert spans[below].parent_id == spans[above].span_id, f"{below} is not below {above}"
        assert spans[above].start_ns <= spans[below].start_ns <= spans[below].end_ns, below
        # A server may learn of the end of a call behind its caller; what is done within a process ends before.
        assert below[2] != "INTERNAL" or spans[below].end_ns <= root.end_ns, below
    assert not any(span.failed for span in spans.values())


def test_the_spans_say_what_was_asked_decided_and_done(observed: Observed) -> None:
    spans = until_traced(observed, 10)
    request = spans["gateway", "POST /v1/chat/completions", "SERVER"].attributes
    assert request["http.response.status_code"] == 200
    assert request["gen_ai.operation.name"] == "chat"
    assert request["gen_ai.request.model"] == MODEL
    assert request["gen_ai.request.max_tokens"] == 12
    assert request["gen_ai.usage.output_tokens"] == 12
    assert request["gen_ai.response.finish_reasons"] == ["length"]
    assert request["headrace.request_id"] == "req-traced"
    place = spans["router", "place", "INTERNAL"]
    assert place.attributes["headrace.placement.reason"] == "only"
    assert place.attributes["headrace.placement.worker"] == "worker-0"
    assert place.attributes["headrace.cost.total_ms"] > 0
    assert [name for name, _ in place.events] == ["candidate"]
    worker = spans["worker", GENERATE, "SERVER"].attributes
    assert worker["headrace.num_prompt_tokens"] == request["gen_ai.usage.input_tokens"]
    assert worker["headrace.num_generated_tokens"] == 12


def test_the_steps_of_the_engine_are_events_of_the_phase_that_they_belong_to(observed: Observed) -> None:
    spans = until_traced(observed, 10)
    prompt = spans["worker", GENERATE, "SERVER"].attributes["headrace.num_prompt_tokens"]
    prefill = [step for name, step in spans["worker", "prefill", "INTERNAL"].events if name == "engine.step"]
    decode = [step for name, step in spans["worker", "decode", "INTERNAL"].events if name == "engine.step"]
    assert sum(step["headrace.step.num_tokens"] for step in prefill) == prompt
    assert [step["headrace.step.num_tokens"] for step in decode] == [1] * 11
    assert all(step["headrace.step.duration_ms"] > 0 for step in (*prefill, *decode))


def test_probes_and_scrapes_are_not_traced(observed: Observed) -> None:
    until_traced(observed, 10)
    observed.scrape("gateway")
    assert not [span for span in observed.receiver.spans if "health" in span.name or "metrics" in span.name]


# --- logs -----------------------------------------------------------------------------------------------------------


def records_of(process: Process, request_id: str) -> list[dict[str, Any]]:
    """The log records of a process that name a request."""
    return [found for found in map(json.loads, process.logs) if found.get("request_id") == request_id]


def test_every_line_of_every_process_is_json(observed: Observed) -> None:
    for process in observed.fleet.processes:
        assert process.logs
        for line in list(process.logs):
            fields = json.loads(line)
            assert {"time", "level", "logger", "message"} <= fields.keys(), f"{process.name}: {line}"


def test_the_request_is_named_in_the_logs_of_all_processes(observed: Observed) -> None:
    system = observed.fleet
    for process in system.processes:
        until(lambda process=process: bool(records_of(process, "req-traced")), f"{process.name} names it")  # type: ignore[misc]
    (access,) = [found for found in records_of(system.gateway, "req-traced") if found["logger"].endswith("access")]
    assert re.fullmatch(r"POST /v1/chat/completions 200 ok \d+\.\d{3} s", access["message"])
    assert "placed on worker-0: only" in [found["message"] for found in records_of(system.routers[0], "req-traced")]
    ended = [found["message"] for found in records_of(system.workers[0], "req-traced")]
    assert any(re.match(r"ended after .* 12 generated", message) for message in ended)


def test_nothing_of_a_prompt_an_answer_or_a_key_is_in_a_log(observed: Observed) -> None:
    secret = "sk-not-to-be-seen-0123456789"
    url = f"{observed.fleet.base_url}/v1/models?api_key={secret}"
    httpx.get(url, headers={"authorization": f"Bearer {secret}", "x-request-id": "req-secret"}, timeout=patience(5))
    until(lambda: bool(records_of(observed.fleet.gateway, "req-secret")), "the request is logged")
    for process in observed.fleet.processes:
        text = "\n".join(process.logs)
        assert "not-to-be-seen" not in text
        assert "Count to twenty" not in text


# --- metrics --------------------------------------------------------------------------------------------------------


def families(exposition: str) -> dict[str, str]:
    """The series name and the type of each metric."""
    found = {}
    for family in text_string_to_metric_families(exposition):
        found[f"{family.name}_total" if family.type == "counter" else family.name] = family.type
    return found


def all_families(observed: Observed) -> dict[str, str]:
    """The metric families of all processes."""
    return {name: kind for role in observed.metrics_urls for name, kind in families(observed.scrape(role)).items()}


def documented() -> set[str]:
    """Names in the tables of the manual."""
    rows = [line.split("|")[1] for line in MANUAL.read_text().splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([a-z][a-z0-9_]*)(?:\{[a-z_, ]*\})?`", row)}


def test_the_manual_lists_exactly_the_metrics_that_there_are(observed: Observed) -> None:
    exposed = {name for name in all_families(observed) if not name.startswith("process_")}
    assert exposed - documented() == set(), "not in docs/reference/metrics.md"
    assert documented() - exposed == NEEDS_MORE, "in docs/reference/metrics.md only"


def test_every_process_tells_of_itself(observed: Observed) -> None:
    for role in ("gateway", "router", "worker"):
        assert {"process_resident_memory_bytes", "process_start_time_seconds"} <= families(observed.scrape(role)).keys()
        assert "_created" not in observed.scrape(role)


def test_times_are_measured_where_they_are_spent_and_agree(observed: Observed) -> None:
    def total(role: str, name: str) -> float:
        return sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", observed.scrape(role), re.MULTILINE)))

    for phase in ("queue", "prefill", "decode"):
        counted = total("worker", f"headrace_worker_{phase}_seconds_count")
        assert counted == total("gateway", f"headrace_{phase}_seconds_count") >= 1
        in_worker = total("worker", f"headrace_worker_{phase}_seconds_sum")
        assert in_worker == pytest.approx(total("gateway", f"headrace_{phase}_seconds_sum"), abs=1e-4)
    parts = sum(total("worker", f"headrace_worker_{phase}_seconds_sum") for phase in ("queue", "prefill", "decode"))
    assert 0 < parts <= total("gateway", "headrace_request_duration_seconds_sum")


# --- dashboard and alerts -------------------------------------------------------------------------------------------


def names_in(expression: str) -> set[str]:
    """The names of series in an expression, without functions, keywords and labels."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)', "", expression)
    return {
        name for name in re.findall(r"[a-zA-Z_:][\w:]*(?!\s*\()\b", bare) if "_" in name and not name.startswith("_")
    }


def series_of(kinds: dict[str, str]) -> set[str]:
    """Names of the series of metrics."""
    found = set(kinds)
    for name, kind in kinds.items():
        if kind == "histogram":
            found |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    return found


def panels() -> list[dict[str, Any]]:
    """All panels of the dashboard with expressions."""
    found = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def dashboard_expressions() -> list[str]:
    """The dashboard's expressions as Prometheus gets them."""
    raw = [target["expr"] for panel in panels() for target in panel["targets"]]
    return [expression.replace("$__rate_interval", "1m").replace("$worker", ".+") for expression in raw]


def alert_expressions() -> list[str]:
    """The expressions of the alerts, with line breaks removed."""
    text = ALERTS.read_text() + OBJECTIVES.read_text()
    found = re.findall(r"^ +expr: (?:\|\n((?: {10,}.*\n)+)|(.*)$)", text, re.MULTILINE)
    return [block or line for block, line in found]


def autoscaling_expressions() -> list[str]:
    """What autoscalers ask Prometheus: those of Kubernetes through prometheus-adapter, and those of KEDA."""
    components = ROOT / "deploy/kubernetes/components"
    told = yaml.safe_load((components / "autoscaling/prometheus.yaml").read_text())
    rules = yaml.safe_load(told["data"]["adapter.yaml"])["externalRules"]
    of_adapter = [rule[query] for rule in rules for query in ("seriesQuery", "metricsQuery")]
    scaled = yaml.safe_load_all((components / "autoscaling-keda/scaled-objects.yaml").read_text())
    triggers = [trigger for one in scaled for trigger in one["spec"]["triggers"] if trigger["type"] == "prometheus"]
    return [
        *(query.replace("<<.LabelMatchers>>", 'namespace="headrace"') for query in of_adapter),
        *(trigger["metadata"]["query"] for trigger in triggers),
    ]


def recorded() -> set[str]:
    """The series that rules record."""
    return set(re.findall(r"record: (\S+)", OBJECTIVES.read_text()))


@pytest.mark.parametrize(
    ("what", "expressions", "least"),
    [
        ("dashboard", dashboard_expressions(), 10),
        ("alerts", alert_expressions(), 10),
        ("autoscaling", autoscaling_expressions(), 7),
    ],
)
def test_every_expression_names_only_series_that_there_are(
    observed: Observed, what: str, expressions: list[str], least: int
) -> None:
    assert len(expressions) >= least
    known = series_of(all_families(observed)) | NEEDS_MORE | recorded()
    for expression in expressions:
        names = names_in(expression)
        assert names or "up{" in expression or "vector(" in expression, (
            f"the {what} has an expression without a series: {expression}"
        )
        assert names <= known, f"the {what} names {sorted(names - known)}"


# Panels that show nothing while nothing goes wrong.
RARE = {"Refusals", "Refused images", "Resumes and retries"}


def test_every_panel_of_the_dashboard_shows_something_under_load(observed: Observed, tmp_path: Path) -> None:
    if not is_installed():
        pytest.skip("prometheus is not installed, and make test could not fetch it")
    addresses = {f"headrace-{role}": [url.split("/")[2]] for role, url in observed.metrics_urls.items()}
    expressions = {
        panel["title"]: [
            target["expr"].replace("$__rate_interval", "1m").replace("$worker", ".+") for target in panel["targets"]
        ]
        for panel in panels()
    }
    with prometheus(tmp_path, addresses) as server:

        def without_a_value() -> list[str]:
            """Expressions that give nothing, or no number in spite of the requests of the last minute."""
            found = []
            for title, asked in expressions.items():
                results = [result for expression in asked for result in server.ask(expression)]
                has_value = any(result["value"][1] != "NaN" for result in results)
                if not has_value and title not in RARE:
                    found.append(title)
            return found

        def shows_all() -> bool:
            observed.chat(request_id="req-load")
            return not without_a_value()

        until(shows_all, "all panels show something")
        # What autoscalers ask has one number each; the label comes from the relabelling of Kubernetes' pods.
        asked = [one.replace('namespace="headrace"', "") for one in autoscaling_expressions() if "!=" not in one]
        assert len(asked) == 4
        for expression in asked:
            (result,) = server.ask(expression)
            assert float(result["value"][1]) >= 0, expression
        assert not [alert for alert in server.ask("ALERTS") if alert["metric"]["alertstate"] == "firing"]


def promtool(*args: str | Path) -> None:
    """Run it; skip where it is not installed."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed, and make test could not fetch it")
    done = subprocess.run(
        ["promtool", *map(str, args)], capture_output=True, text=True, timeout=patience(60), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_finds_nothing_wrong_with_the_alerts_and_the_scrape_configuration() -> None:
    promtool("check", "rules", ALERTS, OBJECTIVES)
    promtool("check", "config", ALERTS.parent / "prometheus.yml")


def test_the_alerts_fire_when_they_should_and_not_otherwise() -> None:
    promtool("test", "rules", ALERTS.parent / "alerts_test.yml", ALERTS.parent / "slo_test.yml")


def test_every_objective_counts_in_a_bucket_that_there_is(observed: Observed) -> None:
    exposition = observed.scrape("gateway")
    buckets = re.findall(r'(headrace_\w+_bucket)\{le="([^"]+)"\}', OBJECTIVES.read_text())
    assert buckets
    for series, bound in set(buckets):
        assert f'{series}{{le="{bound}"}}' in exposition


def test_a_slow_bucket_names_a_trace_that_prometheus_keeps(observed: Observed, tmp_path: Path) -> None:
    if not is_installed():
        pytest.skip("prometheus is not installed, and make test could not fetch it")
    begin_s = time.time()
    with prometheus(tmp_path, {"headrace-gateway": [observed.metrics_urls["gateway"].split("/")[2]]}) as server:
        for name in ("time_to_first_token", "time_per_output_token", "queue", "prefill", "decode", "request_duration"):
            series = f"headrace_{name}_seconds_bucket"

            def traces(series: str = series) -> set[str]:
                found = server.exemplars(series, begin_s - 3600, time.time() + 60)
                return {exemplar["labels"]["trace_id"] for exemplar in found}

            until(lambda traces=traces: TRACE_ID in traces(), f"{series} has the trace")  # type: ignore[misc]


def test_promtool_understands_every_expression(tmp_path: Path) -> None:
    rules = [
        f"      - record: check:{number}\n        expr: {json.dumps(expression)}\n"
        for number, expression in enumerate((*dashboard_expressions(), *autoscaling_expressions()))
    ]
    file = tmp_path / "rules.yml"
    file.write_text("groups:\n  - name: dashboard\n    rules:\n" + "".join(rules))
    promtool("check", "rules", file)


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["uid"] == "headrace"
    assert dashboard["schemaVersion"] >= 39
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels():
        assert panel["title"]
        assert panel["description"], f"{panel['title']} does not say what it shows"
        position = panel["gridPos"]
        assert 0 <= position["x"] < position["x"] + position["w"] <= 24
        assert panel["datasource"]["uid"] == "${datasource}"
