"""The chart: the same objects as the overlays, values that are checked, and a package that installs by itself."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from headrace.common.version import headrace_version
from headrace.router.keda import _metric_of
from tests.deploy import custom_resources
from tests.deploy.chart import CHART, ROOT, helm_library, rendered
from tests.deploy.command_lines import refuse_what_is_unknown
from tests.deploy.kustomization import Resource, containers, identity, render
from tests.deploy.test_kubernetes import DOWNWARD, KUBERNETES, OVERLAYS, RELEASES, in_order, labels_of, of_kind, selects

# What a release says of itself.
OF_A_RELEASE = ("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart")
# What makes an upgrade start pods anew; with kustomize, `kubectl rollout restart` does.
OF_A_MODEL = "checksum/model"


@pytest.fixture(scope="module")
def helm() -> Any:
    return helm_library()


def overlay_values(overlay: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHART / "ci" / f"{overlay}-values.yaml").read_text())
    return values


def by_identity(resources: list[Resource]) -> dict[tuple[str, str], Any]:
    """The objects without what only a release has, by kind and name."""
    found = {}
    for resource in resources:
        if resource["kind"] == "Namespace":
            continue  # the release's
        labels = resource["metadata"]["labels"]
        resource["metadata"]["labels"] = {name: value for name, value in labels.items() if name not in OF_A_RELEASE}
        metadata = resource.get("spec", {}).get("template", {}).get("metadata", {})
        if metadata.get("annotations", {}).pop(OF_A_MODEL, None) and not metadata["annotations"]:
            del metadata["annotations"]
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
        (
            {"components": ["pipeline"], "worker": {"replicas": 1}, "models": {"m": {"source": "s"}}},
            "a pipeline has one worker: .* and no models",
        ),
        ({"components": ["pipeline-tls"]}, "pipeline-tls changes the StatefulSet headrace-stage, so put the component"),
        ({"components": ["autoscaling", "autoscaling-keda"]}, "autoscaling and autoscaling-keda exclude each other"),
        ({"model": {"source": None}}, "source"),
        ({"models": {"coder": {"name": "coder"}}}, "missing property 'source'"),
        ({"models": {"My_Coder": {"source": "s"}}}, "My_Coder"),
        ({"models": {"m": {"source": "s", "name": "smollm2-135m"}}}, "models: two of them are named smollm2-135m"),
        ({"worker": {"autoscaling": {"max": 3}}}, "max"),
        ({"router": {"autoscaling": {"maxReplicas": 3}}}, "autoscaling"),
        ({"patches": {"Service headrace-gatewa": {}}}, "patches: there is no .Service headrace-gatewa.; there are .*"),
        ({"patches": {"headrace-gateway": {}}}, "headrace-gateway"),
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


def of_release(helm: Any, values: dict[str, Any], namespace: str = "prod") -> dict[tuple[str, str], Resource]:
    """The objects of a release by kind and name."""
    return {identity(one): one for one in rendered(helm, values, namespace=namespace)}


def args_of(workload: Resource) -> list[str]:
    args: list[str] = workload["spec"]["template"]["spec"]["containers"][0]["args"]
    return args


def test_further_models_have_workers_of_their_own_in_the_same_service(
    helm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = {"requests": {"cpu": "8", "memory": "16Gi"}, "limits": {"cpu": "8", "memory": "16Gi"}}
    coder = {"source": "org/coder", "args": ["--max-num-seqs=4"], "resources": resources, "storage": {"size": "9Gi"}}
    values = {
        "components": ["tls", "spread"],
        "models": {"coder": coder, "small": {"source": "org/small", "name": "tiny", "replicas": 0}},
        "worker": {"args": ["--max-num-seqs=64"]},
        "secrets": {"create": False},
    }
    found = of_release(helm, values)
    alone = of_release(helm, {**values, "models": {}})
    assert {name: one for name, one in found.items() if name in alone} == alone, "the first model's stay as they are"
    names = {"headrace-worker", "headrace-worker-coder", "headrace-worker-small"}
    workers = {name: found["StatefulSet", name] for name in names}
    assert set(found) - set(alone) == {
        (kind, f"headrace-{what}-{key}")
        for key in ("coder", "small")
        for kind, what in (("StatefulSet", "worker"), ("ConfigMap", "model"))
    }
    for name, worker in workers.items():
        config = f"headrace-model{name.removeprefix('headrace-worker')}"
        refused = {identity(other)[1] for other in workers.values() if other is not worker}
        own = worker["spec"]["selector"]["matchLabels"]
        if name != "headrace-worker":
            assert not any(own.items() <= labels_of(workers[other]).items() for other in refused)
        assert own.items() <= labels_of(worker).items()
        for container in containers(worker):
            sources = [variable.get("valueFrom", {}).get("configMapKeyRef") for variable in container["env"]]
            assert {source["name"] for source in sources if source} == {config}
        service = found["Service", "headrace-worker"]["spec"]["selector"]
        assert selects({"matchLabels": service}, labels_of(worker)), "routers find it"
        argv = [re.sub(r"\$\((\w+)\)", lambda told: DOWNWARD[told[1]], arg) for arg in args_of(worker)]
        variables = worker["spec"]["template"]["spec"]["containers"][0]["env"]
        env = {variable["name"]: variable.get("value", "x") for variable in variables}
        refuse_what_is_unknown(monkeypatch, argv, env)
    assert found["ConfigMap", "headrace-model-coder"]["data"] == {"source": "org/coder", "name": "coder"}
    assert found["ConfigMap", "headrace-model-small"]["data"] == {"source": "org/small", "name": "tiny"}
    assert "--max-num-seqs=4" in args_of(workers["headrace-worker-coder"])
    assert not [arg for arg in args_of(workers["headrace-worker-small"]) if "num-seqs" in arg], "that of another model"
    assert [workers[name]["spec"]["replicas"] for name in sorted(names)] == [2, 1, 0]
    given = {container["name"]: container["resources"] for container in containers(workers["headrace-worker-coder"])}
    assert given == dict.fromkeys(("worker", "pull"), resources)
    (claim,) = workers["headrace-worker-coder"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "9Gi"


def test_every_object_of_odd_values_is_what_the_api_wants(helm: Any) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate is not installed; make check does that")
    import kubernetes_validate

    level = {"name": "HEADRACE_ROUTER_LOG_LEVEL", "valueFrom": {"configMapKeyRef": {"name": "theirs", "key": "level"}}}
    of_another = {"spec": {"template": {"spec": {"containers": [{"name": "router", "env": [level]}]}}}}
    values = {
        "components": ["tls", "api-keys", "autoscaling", "shared-models"],
        "models": {
            "coder": {"source": "org/coder", "env": {"A": "b"}, "patch": {"metadata": {"annotations": {"a": "b"}}}}
        },
        "image": {"repository": "r.example:5000/h", "pullSecrets": ["one", "two"]},
        "gateway": {"podAnnotations": {"a": "b"}, "nodeSelector": {"zone": "a"}, "autoscaling": {"maxReplicas": 20}},
        "router": {"replicas": 1, "tolerations": [{"key": "k", "operator": "Exists"}], "patch": of_another},
        "patches": {
            "Service headrace-gateway": {
                "spec": {"type": "LoadBalancer"},
                "metadata": {"annotations": {"lb": "inner"}},
            },
            "PodDisruptionBudget headrace-router": {"spec": {"maxUnavailable": None, "minAvailable": 1}},
        },
    }
    found = of_release(helm, values)
    for resource in found.values():
        for release in RELEASES:
            assert kubernetes_validate.validate(resource, release, strict=True) == release, identity(resource)
    service = found["Service", "headrace-gateway"]
    assert (service["spec"]["type"], service["metadata"]["annotations"]) == ("LoadBalancer", {"lb": "inner"})
    budget = found["PodDisruptionBudget", "headrace-router"]["spec"]
    assert (budget["minAvailable"], "maxUnavailable" in budget) == (1, False)
    assert found["HorizontalPodAutoscaler", "headrace-gateway"]["spec"]["maxReplicas"] == 20


def test_every_pod_and_no_other_place_has_images_of_a_registry_that_wants_a_login(helm: Any) -> None:
    values = {
        "components": ["redis", "redis-server"],
        "image": {"repository": "r.example/h", "tag": "7", "pullSecrets": ["one", "two"]},
        "redisImage": "r.example/valkey:8",
        "models": {"m": {"source": "s"}},
    }
    workloads = of_kind(rendered(helm, values), "Deployment", "StatefulSet")
    assert len(workloads) == 6
    for workload in workloads:
        assert workload["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
        expected = "r.example/valkey:8" if "redis" in identity(workload)[1] else "r.example/h:7"
        assert {container["image"] for container in containers(workload)} == {expected}


def test_the_image_is_the_one_that_a_release_publishes(helm: Any) -> None:
    """That of the README's `docker run`, of the chart's version."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == headrace_version()
    (named,) = set(re.findall(r"ghcr\.io/\S+", (ROOT / "README.md").read_text()))
    images = {container["image"] for one in of_kind(rendered(helm, {}), "Deployment") for container in containers(one)}
    assert images == {f"{named}:{headrace_version()}"}


def test_each_model_of_several_has_an_autoscaler_that_looks_at_no_other(helm: Any) -> None:
    values = {
        "components": ["autoscaling"],
        "models": {"coder": {"source": "s", "name": "c", "autoscaling": {"minReplicas": 1, "maxReplicas": 3}}},
        "worker": {"autoscaling": {"maxReplicas": 5}},
    }
    found = of_release(helm, values)
    for name, model, bounds in (("headrace-worker", "smollm2-135m", (2, 5)), ("headrace-worker-coder", "c", (1, 3))):
        spec = found["HorizontalPodAutoscaler", name]["spec"]
        assert spec["scaleTargetRef"]["name"] == name
        assert (spec["minReplicas"], spec["maxReplicas"]) == bounds
        metrics = [one["external"]["metric"] for one in spec["metrics"]]
        assert [metric["selector"] for metric in metrics] == [{"matchLabels": {"model": model}}] * len(metrics)
        assert "replicas" not in found["StatefulSet", name]["spec"]
    scaler = of_release(helm, {"components": ["autoscaling"]})["HorizontalPodAutoscaler", "headrace-worker"]
    assert not [one for one in scaler["spec"]["metrics"] if "selector" in one["external"]["metric"]]


def test_keda_asks_the_release_for_each_model_and_a_router_holds_requests_for_all(
    helm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "components": ["autoscaling-keda"],
        "models": {"coder": {"source": "s", "name": "c"}},
        "prometheus": {"namespace": "observed", "url": "http://prometheus.observed.svc:9090"},
        "keda": {"namespace": "scalers"},
    }
    found = of_release(helm, values)
    for name, model in (("headrace-worker", "smollm2-135m"), ("headrace-worker-coder", "c")):
        scaler = found["ScaledObject", name]
        custom_resources.check(scaler)
        assert scaler["spec"]["scaleTargetRef"]["name"] == name
        push, prometheus = (trigger["metadata"] for trigger in scaler["spec"]["triggers"])
        assert push["scalerAddress"] == "headrace-router-scaler.prod.svc:50053", "KEDA is in another namespace"
        assert (push["model"], _metric_of(push)) == (model, ("workers_wanted", 1.0))
        assert f'{{model="{model}",namespace="prod"}}' in prometheus["query"]
        assert prometheus["serverAddress"] == "http://prometheus.observed.svc:9090"
    router = found["Deployment", "headrace-router"]
    (container,) = containers(router)
    env = {variable["name"]: variable.get("value", "smollm2-135m") for variable in container["env"]}
    assert refuse_what_is_unknown(monkeypatch, container["args"], env)["on_demand"] == ("smollm2-135m", "c")
    peers = {
        peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for policy in found.values()
        if policy["kind"] == "NetworkPolicy"
        for rule in policy["spec"].get("ingress", ())
        for peer in rule.get("from", ())
        if "namespaceSelector" in peer
    }
    assert peers == {"observed", "scalers"}


def test_an_upgrade_to_another_model_starts_those_pods_anew_that_read_it(helm: Any) -> None:
    def versions(source: str, coder: str) -> dict[str, str]:
        values = {
            "model": {"source": source, "name": "m"},
            "models": {"coder": {"source": coder}},
            "secrets": {"create": False},
        }
        workloads = of_kind(rendered(helm, values), "Deployment", "StatefulSet")
        return {identity(one)[1]: json.dumps(one["spec"]["template"], sort_keys=True) for one in workloads}

    before = versions("a", "b")
    assert versions("a", "b") == before
    changed = {
        "headrace-worker": versions("other", "b"),
        "headrace-worker-coder": versions("a", "other"),
    }
    for name, after in changed.items():
        assert {workload for workload in before if before[workload] != after[workload]} == {name}


def test_values_that_an_earlier_release_kept_render_the_same(helm: Any) -> None:
    """`helm upgrade --reuse-values` does not add the defaults of values that the chart did not have then."""
    values = {"components": ["autoscaling-keda", "redis", "redis-server"], "secrets": {"create": False}}
    later = dict.fromkeys(("models", "patches", "redisImage", "prometheus", "keda"))
    roles = {role: {"autoscaling": None} for role in ("gateway", "worker")}
    assert of_release(helm, {**values, **later, **roles}) == of_release(helm, values)


@pytest.mark.parametrize(
    ("args", "patched", "grace_s"),
    [([], None, 80), (["--drain-timeout=120"], None, 140), (["--drain-timeout=90.5"], None, 111),
     (["--drain-timeout=5"], None, 80), (["--drain-timeout=120"], 300, 300)],
)  # fmt: skip
def test_a_pod_whose_process_drains_longer_has_longer_to_end(
    helm: Any, args: list[str], patched: int | None, grace_s: int
) -> None:
    patch = {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": patched}}}} if patched else {}
    found = of_release(helm, {"gateway": {"args": args, "patch": patch}})
    pod = found["Deployment", "headrace-gateway"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == grace_s


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
