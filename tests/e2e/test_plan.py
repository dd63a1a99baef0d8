"""From an empty cache to a plan: a quick calibration of a small model, its plan, and a running fleet's."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from headrace.bench.__main__ import main as bench
from headrace.bench.calibration import read
from headrace.plan.__main__ import main as plan
from tests.e2e.serving import serving
from tests.e2e.small_model import small_model

pytestmark = pytest.mark.e2e
SHORT = ("--seeds", "1", "--requests", "40", "--json")
QUICK = ("--prompt", "64", "--answer", "8", *SHORT)


def test_a_calibration_of_this_host_makes_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    flags = ["--seconds", "8", "--output", str(path), "--", "--kv-cache-gb", "0.1", "--max-context-tokens", "1024"]
    done = CliRunner().invoke(bench, ["calibrate", str(small_model()), *flags])
    assert done.exit_code == 0, done.output
    assert "ms a token at batch 1" in done.stdout
    found = read(path)
    assert found.source == "measured"
    assert found.num_steps > 100
    assert found.model.max_context_tokens == 1024
    assert found.layout.serve_flags == ("--kv-cache-gb", "0.1", "--max-context-tokens", "1024")
    assert found.layout.max_num_batched_tokens in (80, 1024), "where kernels are exact only for small steps, or not"
    assert found.front.inward_s > 0
    assert found.front.cpu_s_per_request > 0
    planned = CliRunner().invoke(plan, ["--calibration", str(path), "--rate", "0.05", "--tpot", "5s", *QUICK])
    assert planned.exit_code == 0, planned.output
    (answer,) = json.loads(planned.stdout)
    assert answer["plan"]["meets_objectives"]
    assert "--max-context-tokens 1024" in answer["start"][0]


def test_a_running_fleet_is_judged_by_what_it_has_learned_and_served(tmp_path: Path) -> None:
    with serving(model=small_model()) as serve:
        early = CliRunner().invoke(plan, ["--url", serve.base_url, *SHORT])
        assert early.exit_code == 1
        assert "send some requests first" in early.stderr or "answered no request" in early.stderr
        for number in range(24):
            body = {"prompt": [100 + number] * 40, "max_tokens": 12, "ignore_eos": True}
            httpx.post(f"{serve.base_url}/v1/completions", json=body, timeout=60).raise_for_status()
        judged = CliRunner().invoke(plan, ["--url", serve.base_url, "--load", "2x", "--tpot", "5s", *SHORT])
        assert judged.exit_code in (0, 1), judged.output
        (answer,) = json.loads(judged.stdout)
        assert answer["host"] == "running"
        present = answer["present"]
        assert 0 < present["measured_ms"]["p50"] <= present["measured_ms"]["p95"]
        assert 0 < present["simulated_ms"]["p50"] <= present["simulated_ms"]["p95"]
        path = tmp_path / "learned.json"
        kept = CliRunner().invoke(bench, ["calibrate", "--url", serve.base_url, "--output", str(path)])
        assert kept.exit_code == 0, kept.output
        assert read(path).source == "learned"
