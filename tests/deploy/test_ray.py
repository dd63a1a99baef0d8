"""The files for Ray: their fleets are ones that headrace takes, and their commands and limits fit together."""

from __future__ import annotations

import importlib.util
import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from headrace.ray.llm_config import fleet_of_llm_configs
from headrace.ray.settings import Fleet, fleet_of
from tests.deploy import custom_resources
from tests.deploy.test_kubernetes import RELEASES

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


def test_the_service_is_of_kuberays_shape() -> None:
    custom_resources.check(SERVICE)


@pytest.mark.parametrize(
    ("group", "wrong"),
    [
        ("", {"enableInTreeAutoscaling": "true"}),
        ("", {"rayversion": "2.60.0"}),
        ("", {"autoscalerOptions": {"upscalingMode": "Fast"}}),
        ("headGroupSpec", {"rayStartParams": {"num-cpus": 0}}),
        ("workerGroupSpecs", {"maxReplicas": None}),
        ("workerGroupSpecs", {"minReplica": 1}),
    ],
)
def test_another_shape_is_refused(group: str, wrong: dict[str, Any]) -> None:
    service = deepcopy(SERVICE)
    config = service["spec"]["rayClusterConfig"]
    found = config[group] if group else config
    (found[0] if isinstance(found, list) else found).update(wrong)
    with pytest.raises(jsonschema_rs.ValidationError):
        custom_resources.check(service)


@pytest.mark.parametrize("release", RELEASES)
def test_its_pods_are_ones_that_kubernetes_takes(release: str) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate is not installed; make check does that")
    import kubernetes_validate

    for group in groups():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        assert kubernetes_validate.validate(pod, release, strict=True) == release


def groups() -> list[dict[str, Any]]:
    """The groups of pods of the service's cluster: the head, and the workers'."""
    config = SERVICE["spec"]["rayClusterConfig"]
    return [config["headGroupSpec"], *config["workerGroupSpecs"]]


def test_the_cluster_grows_by_pods_of_the_version_of_ray_that_is_tested() -> None:
    config = SERVICE["spec"]["rayClusterConfig"]
    (hosts,) = config["workerGroupSpecs"]
    # KubeRay follows the bounds only with Ray's own autoscaler.
    assert config["enableInTreeAutoscaling"] is True
    assert hosts["minReplicas"] <= hosts["replicas"] <= hosts["maxReplicas"]
    named = re.search(r"FROM rayproject/ray:([0-9.]+)-", (RAY / "rayservice.yaml").read_text())
    assert named is not None
    assert named[1] == config["rayVersion"]
    if importlib.util.find_spec("ray") is not None:
        import ray

        assert ray.__version__ == config["rayVersion"]


def test_pods_offer_as_many_numa_nodes_as_the_workers_may_take() -> None:
    found = fleet(CONFIGS["rayservice.yaml"])
    (hosts,) = SERVICE["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    offered = json.loads(json.loads(hosts["rayStartParams"]["resources"]))
    assert offered["numa"] * hosts["maxReplicas"] == found.models[0].most_workers
    assert offered["numa"] * hosts["minReplicas"] >= found.models[0].min_workers
    grace_s = hosts["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > 2 * found.gateway_drain_s + 5 + 15
