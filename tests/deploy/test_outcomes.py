"""Console, alerts and dashboard agree on which outcomes of requests are faults of the fleet."""

from __future__ import annotations

import json
import re
from pathlib import Path

from headrace.gateway.telemetry.recent import FAULTS
from headrace.protos.status import TABLE

ROOT = Path(__file__).parent.parent.parent
OUTCOMES = {reason.name.lower() for reason in TABLE} | {"ok", "client_deadline"}


def outcomes_in(expression: str) -> list[set[str]]:
    """The outcomes that each selector of an expression names."""
    return [set(found.split("|")) for found in re.findall(r'outcome=~?"([a-z_|]+)"', expression)]


def test_the_alert_on_errors_is_about_the_faults_of_the_fleet() -> None:
    alerts = (ROOT / "deploy/prometheus/alerts.yml").read_text()
    named = {alert.partition("\n")[0].strip(): outcomes_in(alert) for alert in alerts.split("- alert:")[1:]}
    assert named["HeadraceErrors"] == [set(FAULTS)]
    assert named["HeadraceRefusals"] == [{"queue_full"}], "want of room is no fault"


def test_dashboard_and_alerts_name_only_outcomes_that_there_are() -> None:
    panels = json.loads((ROOT / "deploy/grafana/headrace.json").read_text())["panels"]
    expressions = {panel["title"]: target["expr"] for panel in panels for target in panel.get("targets", ())}
    texts = [*expressions.values(), (ROOT / "deploy/prometheus/alerts.yml").read_text()]
    assert set().union(*(named for text in texts for named in outcomes_in(text))) <= OUTCOMES
    faults = [named for text in expressions.values() for named in outcomes_in(text) if "worker_lost" in named]
    assert faults
    assert all(named == FAULTS for named in faults)
