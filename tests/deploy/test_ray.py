"""The files for Ray: their fleets are ones that headrace takes, and their commands and limits fit together."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.ray.llm_config import fleet_of_llm_configs
from headrace.ray.settings import Fleet, fleet_of

RAY = Path(__file__).parents[2] / "deploy" / "ray"
SERVICE = yaml.safe_load((RAY / "rayservice.yaml").read_text())
CONFIGS = {
    "serve.yaml": yaml.safe_load((RAY / "serve.yaml").read_text()),
    "llm-config.yaml": yaml.safe_load((RAY / "llm-config.yaml").read_text()),
    "rayservice.yaml": yaml.safe_load(SERVICE["spec"]["serveConfigV2"]),
}


def fleet(config: dict[str, Any]) -> Fleet:
    """The fleet of the only application of a file."""
    (application,) = config["applications"]
    builders = {"headrace.ray:build_app": fleet_of, "headrace.ray:build_openai_app": fleet_of_llm_configs}
    return builders[application["import_path"]](application["args"])  # type: ignore[operator, no-any-return]


def test_every_file_is_checked() -> None:
    assert {path.name for path in RAY.iterdir()} == set(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_fleet_is_one_that_headrace_takes(name: str) -> None:
    found = fleet(CONFIGS[name])
    assert found.models[0].most_workers > found.models[0].min_workers


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="make .venv/.ray installs it")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_is_one_that_serve_takes(name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    ServeDeploySchema.model_validate(CONFIGS[name])


def test_pods_offer_as_many_numa_nodes_as_the_workers_may_take() -> None:
    found = fleet(CONFIGS["rayservice.yaml"])
    (hosts,) = SERVICE["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    offered = json.loads(json.loads(hosts["rayStartParams"]["resources"]))
    assert offered["numa"] * hosts["maxReplicas"] == found.models[0].most_workers
    grace_s = hosts["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > 2 * found.gateway_drain_s + 5 + 15
