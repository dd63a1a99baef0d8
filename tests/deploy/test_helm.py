"""The chart: the same objects as the overlays, values that are checked, and a package that installs by itself."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from tests.deploy.chart import CHART, helm_library, rendered
from tests.deploy.kustomization import Resource, containers, identity, render
from tests.deploy.test_kubernetes import KUBERNETES, OVERLAYS, in_order, of_kind

# What a release says of itself.
OF_A_RELEASE = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart")


@pytest.fixture(scope="module")
def helm() -> Any:
    return helm_library()


def overlay_values(overlay: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHART / "ci" / f"{overlay}-values.yaml").read_text())
    return values


def by_identity(resources: list[Resource]) -> dict[tuple[str, str], Any]:
    """The objects without the labels of a release, by kind and name."""
    found = {}
    for resource in resources:
        if resource["kind"] == "Namespace":
            continue  # the release's
        labels = resource["metadata"]["labels"]
        resource["metadata"]["labels"] = {name: value for name, value in labels.items() if name not in OF_A_RELEASE}
        found[identity(resource)] = in_order(resource)
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_chart_makes_the_objects_of_the_overlay(helm: Any, overlay: str) -> None:
    ours = by_identity(rendered(helm, overlay_values(overlay)))
    assert ours == by_identity(render(KUBERNETES / "overlays" / overlay))


def test_every_overlay_has_its_values() -> None:
    assert sorted(path.name for path in (CHART / "ci").iterdir()) == [f"{name}-values.yaml" for name in OVERLAYS]


@pytest.mark.parametrize("overlay", [*OVERLAYS, None])
def test_helm_finds_nothing_to_complain_about(helm: Any, overlay: str | None) -> None:
    found = helm.lint(CHART, overlay_values(overlay) if overlay else {}, strict=True, namespace="headrace")
    assert found["total_charts_linted"] == 1
    assert [one["error"] for one in found["messages"]] == ["icon is recommended"]
    wrong = helm.lint(CHART, {"workers": 3}, strict=True, namespace="headrace")
    assert any("'workers' not allowed" in error for error in wrong["errors"])


def test_every_component_can_be_chosen_and_is_rendered(helm: Any) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    names = sorted(path.name for path in (KUBERNETES / "components").iterdir())
    assert schema["properties"]["components"]["items"]["enum"] == names
    base = by_identity(rendered(helm, {"secrets": {"create": False}}))
    for name in names:
        needed = {
            "redis-server-tls": ["redis-server"],
            "inference-pool-tls": ["tls", "inference-pool"],
            "pipeline-tls": ["pipeline"],
        }.get(name, [])
        values = {
            "components": [*needed, name],
            "secrets": {"create": False},
            "worker": {"replicas": 1 if name.startswith("pipeline") else 2},
        }
        assert by_identity(rendered(helm, values)) != base, name


def test_the_schema_has_every_value_and_every_default_passes_it() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema_rs.validator_for(schema).validate(values)

    def names(value: Any) -> Any:
        return {key: names(item) for key, item in value.items()} if isinstance(value, dict) else None

    def described(shape: Any) -> Any:
        shape = schema["definitions"][shape["$ref"].rpartition("/")[2]] if "$ref" in shape else shape
        return {key: described(item) or None for key, item in shape.get("properties", {}).items()} or None

    allowed = described(schema)
    for key, item in names(values).items():
        assert key in allowed
        assert set(item or {}) <= set(allowed[key] or {}), key


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"workers": 3}, "workers"),
        ({"worker": {"replica": 3}}, "replica"),
        ({"worker": {"replicas": "3"}}, "replicas"),
        ({"components": ["redis-tls"]}, "components"),
        ({"components": ["redis", "redis"]}, "components"),
        ({"router": {"args": ["max-waiting=3"]}}, "args"),
        ({"router": {"env": {"HEADRACE_ROUTER_MAX_WAITING": 3}}}, "env"),
        ({"worker": {"storage": {"size": "much"}}}, "storage"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"inferenceGateway": {"class": "istio"}}, "class"),
        ({"components": ["pipeline"]}, "a pipeline has one worker: set worker.replicas to 1"),
    ],
)
def test_wrong_values_are_refused_by_name(helm: Any, values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError, match=said):
        helm.Chart.load(CHART).render(values, name="demo", namespace="headrace")


def test_values_change_what_they_say(helm: Any) -> None:
    values = {
        "image": {"repository": "r.example/h", "tag": "2", "pullSecrets": ["login"]},
        "model": {"source": "org/model", "name": "m"},
        "modelImage": "r.example/m:1",
        "router": {
            "replicas": 3,
            "args": ["--drain-timeout=9", "--max-waiting=7"],
            "patch": {
                "spec": {"template": {"spec": {"priorityClassName": "high", "terminationGracePeriodSeconds": 30}}}
            },
        },
        "worker": {
            "env": {"HEADRACE_WORKER_KV_CACHE_GB": "4"},
            "podAnnotations": {"a": "b"},
            "storage": {"size": "50Gi", "className": "fast"},
        },
    }
    resources = {identity(one): one for one in rendered(helm, values, namespace="prod")}
    assert {one["metadata"]["namespace"] for one in resources.values()} == {"prod"}
    assert resources["RoleBinding", "headrace-membership"]["subjects"][0]["namespace"] == "prod"
    assert resources["ConfigMap", "headrace-model"]["data"] == {"source": "org/model", "name": "m"}
    router, worker = resources["Deployment", "headrace-router"], resources["StatefulSet", "headrace-worker"]
    assert {container["image"] for one in (router, worker) for container in containers(one)} == {"r.example/h:2"}
    pod = router["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (router["spec"]["replicas"], pod["imagePullSecrets"]) == (3, [{"name": "login"}])
    assert (pod["priorityClassName"], pod["terminationGracePeriodSeconds"]) == ("high", 30)
    assert [arg for arg in container["args"] if "drain" in arg] == ["--drain-timeout=9"], "the flag is there once"
    assert "--max-waiting=7" in container["args"]
    assert worker["spec"]["template"]["metadata"]["annotations"]["a"] == "b"
    env = {one["name"]: one.get("value") for one in worker["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert env["HEADRACE_WORKER_KV_CACHE_GB"] == "4"
    assert "POD_IP" in env, "the others stay"
    claim = worker["spec"]["volumeClaimTemplates"][0]["spec"]
    assert (claim["resources"]["requests"]["storage"], claim["storageClassName"]) == ("50Gi", "fast")
    (worker,) = of_kind(rendered(helm, {**values, "components": ["model-image"]}), "StatefulSet")
    volumes = {volume["name"]: volume for volume in worker["spec"]["template"]["spec"]["volumes"]}
    assert volumes["models"]["image"]["reference"] == "r.example/m:1"


def test_a_pool_belongs_to_the_gateway_of_the_values_and_leaves_the_worker_its_resources(helm: Any) -> None:
    resources = {"requests": {"cpu": "30", "memory": "112Gi"}, "limits": {"cpu": "30", "memory": "112Gi"}}
    values = {
        "components": ["inference-pool"],
        "inferenceGateway": {"name": "shared", "namespace": "edge"},
        "worker": {"resources": resources},
    }
    found = {identity(one): one for one in rendered(helm, values, namespace="prod")}
    assert found["HTTPRoute", "headrace"]["spec"]["parentRefs"] == [{"name": "shared", "namespace": "edge"}]
    assert found["InferencePool", "headrace"]["metadata"]["namespace"] == "prod"
    given = {one["name"]: one["resources"] for one in containers(found["StatefulSet", "headrace-worker"])}
    assert given["worker"] == given["pull"] == resources
    assert given["endpoint"]["limits"]["cpu"] == "1"


def test_prometheus_looks_into_the_namespace_of_the_release(helm: Any) -> None:
    resources = rendered(helm, {"components": ["autoscaling"]}, namespace="prod")
    (told,) = [one for one in resources if identity(one) == ("ConfigMap", "headrace-prometheus")]
    (scrape,) = yaml.safe_load(told["data"]["scrape.yaml"])["scrape_configs"]
    assert scrape["kubernetes_sd_configs"][0]["namespaces"]["names"] == ["prod"]


def test_the_secret_is_made_as_the_command_makes_it(helm: Any) -> None:
    (secret,) = of_kind(rendered(helm, {}), "Secret")
    found = {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}
    assert set(found) == {"join-token", "redis-password", "redis.conf"}
    assert len(found["join-token"]) >= 32
    assert found["redis.conf"] == f"requirepass {found['redis-password']}\n"
    assert of_kind(rendered(helm, {"secrets": {"create": False}}), "Secret") == []


def test_the_package_is_whole_without_the_repository(helm: Any, tmp_path: Path) -> None:
    """The manifests, which the chart has by a link, are in it as files; what is for kustomize alone is not."""
    archive = helm.package(CHART, destination=tmp_path)
    assert Path(archive).name == "headrace-0.1.0.tgz"
    helm.expand(tmp_path / "out", archive)
    there = tmp_path / "out" / "headrace"
    assert (there / "manifests" / "base" / "router.yaml").read_bytes() == (KUBERNETES / "base/router.yaml").read_bytes()
    assert not any(path.is_symlink() for path in there.rglob("*"))
    assert not (there / "manifests" / "overlays").exists()
    values = overlay_values("fleet")
    assert rendered(helm, values, chart=helm.Chart.load(there)) == rendered(helm, values)
