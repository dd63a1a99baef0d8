"""A real Prometheus over a running fleet, configured as `deploy/prometheus/prometheus.yml` is, for tests."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from headrace.common import launch
from tests.e2e.serving import until
from tests.patience import patience
from tests.ports import free_port

DEPLOYED = Path(__file__).parent.parent / "deploy/prometheus"
SCRAPE_INTERVAL_S = 1
RATE_INTERVAL_S = 4 * SCRAPE_INTERVAL_S
"""What Grafana's $__rate_interval is for that interval."""


def is_installed() -> bool:
    """Whether there is a server to run: make test fetches one."""
    return shutil.which("prometheus") is not None


class Prometheus:
    """A server that scrapes."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The present value of an expression, for each combination of labels."""
        return self._get("query", query=expression)

    def range(self, expression: str, begin_s: float, end_s: float, step_s: float) -> list[dict[str, Any]]:
        """The values of an expression over a time."""
        return self._get("query_range", query=expression, start=begin_s, end=end_s, step=step_s)

    def exemplars(self, expression: str, begin_s: float, end_s: float) -> list[dict[str, Any]]:
        """The exemplars of the series of an expression."""
        found: list[dict[str, Any]] = self._data("query_exemplars", query=expression, start=begin_s, end=end_s)
        return [exemplar for series in found for exemplar in series["exemplars"]]

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=patience(5)).status_code == 200
        except httpx.HTTPError:
            return False

    def _get(self, path: str, **params: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._data(path, **params)["result"]
        return found

    def _data(self, path: str, **params: Any) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=patience(20))
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def num_up(self) -> int:
        """Targets that the last scrape reached."""
        return sum(result["value"][1] == "1" for result in self.ask("up"))


@contextmanager
def prometheus(directory: Path, targets: Mapping[str, list[str]]) -> Iterator[Prometheus]:
    """A server that scrapes `targets`, addresses by job, every second; given when it has reached all of them."""
    text = (DEPLOYED / "prometheus.yml").read_text()
    text = re.sub(r"interval: \S+", f"interval: {SCRAPE_INTERVAL_S}s", text)
    for job, addresses in targets.items():
        text = re.sub(rf"(job_name: {job}\n.*\n\s+- targets: )\[.*\]", rf"\g<1>{addresses!r}", text)
    (directory / "prometheus.yml").write_text(text)
    for rules in ("alerts.yml", "slo.yml"):
        shutil.copy(DEPLOYED / rules, directory)
    program = shutil.which("prometheus")
    assert program is not None, "prometheus is not installed"
    port = free_port()
    flags = [f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/tsdb"]
    flags.append("--enable-feature=exemplar-storage")
    # It dies with the tests.
    argv = launch.with_parent([program, *flags])
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*argv, f"--web.listen-address=127.0.0.1:{port}"], stderr=log)
    try:
        server = Prometheus(f"http://127.0.0.1:{port}")
        until(server.is_ready, "prometheus answers")
        num_targets = sum(map(len, targets.values()))
        until(lambda: server.num_up() == num_targets, "prometheus has scraped all")
        yield server
    finally:
        process.terminate()
        process.wait(patience(30))
