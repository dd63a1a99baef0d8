"""The manifests: schemas, commands, labels, ports, security settings and quality of service."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from headrace.common.kubernetes import CREDENTIALS
from headrace.common.kubernetes.services import is_service, service_of
from headrace.gateway.edge.settings import EdgeSettings
from headrace.router.keda import _metric_of
from tests.deploy import custom_resources
from tests.deploy.command_lines import refuse_what_is_unknown
from tests.deploy.kustomization import Resource, containers, documents, identity, render

KUBERNETES = Path(__file__).parent.parent.parent / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
# The oldest release that has everything the manifests use, and the newest that there are schemas for.
RELEASES = ("1.29", "1.37")
WORKLOADS = ("Deployment", "StatefulSet")
# Services whose pods are of another name: a second port of theirs.
OF_OTHER_PODS = {"headrace-picker": "headrace-gateway", "headrace-pipeline": "headrace-worker"}
# Where values are put in by the kubelet.
DOWNWARD = {"POD_IP": "10.0.0.7", "POD_NAME": "headrace-worker-0", "MODEL_NAME": "m", "MODEL_SOURCE": "smollm2-135m"}


overlays = pytest.mark.parametrize("overlay", OVERLAYS)


def rendered(overlay: str) -> list[Resource]:
    return render(KUBERNETES / "overlays" / overlay)


def of_kind(resources: list[Resource], *kinds: str) -> list[Resource]:
    return [resource for resource in resources if resource["kind"] in kinds]


def worker_of(resources: list[Resource]) -> Resource:
    """The workload of the workers."""
    (worker,) = (one for one in resources if identity(one) == ("StatefulSet", "headrace-worker"))
    return worker


def pod_of(workload: Resource) -> Resource:
    spec: Resource = workload["spec"]["template"]["spec"]
    return spec


def named(workload: Resource, name: str) -> Resource:
    """A container of a workload."""
    (found,) = (container for container in containers(workload) if container["name"] == name)
    return found


def labels_of(workload: Resource) -> dict[str, str]:
    labels: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return labels


def selects(selector: Resource, labels: dict[str, str]) -> bool:
    """Whether a label selector, of either form, matches."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True


@overlays
@pytest.mark.parametrize("release", RELEASES)
def test_every_resource_is_what_the_api_of_oldest_and_newest_release_wants(overlay: str, release: str) -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate is not installed; make check does that")
    import kubernetes_validate

    for resource in rendered(overlay):
        if custom_resources.is_custom(resource):
            custom_resources.check(resource)
        else:
            assert kubernetes_validate.validate(resource, release, strict=True) == release, identity(resource)


@overlays
def test_kustomize_renders_the_same(overlay: str) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl here")
    text = subprocess.check_output([kubectl, "kustomize", str(KUBERNETES / "overlays" / overlay)], text=True)
    theirs = {identity(resource): in_order(resource) for resource in yaml.safe_load_all(text)}
    assert {identity(resource): in_order(resource) for resource in rendered(overlay)} == theirs


def in_order(value: Any) -> Any:
    """The object with every list of maps sorted, because kustomize puts the additions of a patch first."""
    if isinstance(value, dict):
        return {key: in_order(item) for key, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return sorted((in_order(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
    return value


def test_every_file_belongs_to_an_overlay_or_component_that_a_test_renders() -> None:
    used = {KUBERNETES / "kubelet.yaml"}
    pending = [KUBERNETES / "overlays" / overlay for overlay in OVERLAYS]
    # Whoever wants them says so; they are rendered by tests of their own.
    pending += [KUBERNETES / "components" / name for name in ("shared-models", "model-image", "autoscaling-keda")]
    while pending:
        directory = pending.pop().resolve()
        used.add(directory / "kustomization.yaml")
        kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text())
        names = kustomization.get("resources", []) + kustomization.get("components", [])
        for path in (
            directory / name for name in names + [patch["path"] for patch in kustomization.get("patches", [])]
        ):
            if path.is_dir():
                pending.append(path)
            else:
                used.add(path)
    assert set(KUBERNETES.rglob("*.yaml")) == used


@overlays
def test_every_resource_is_in_the_namespace(overlay: str) -> None:
    resources = rendered(overlay)
    namespaces = of_kind(resources, "Namespace")
    assert [namespace["metadata"]["name"] for namespace in namespaces] == ["headrace"]
    for resource in resources:
        assert resource["kind"] == "Namespace" or resource["metadata"]["namespace"] == "headrace", identity(resource)


@overlays
def test_commands_and_variables_are_those_of_the_real_commands(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [container for workload in rendered(overlay) for container in containers(workload)]
    ours = [container for container in commands if "redis" not in container["image"]]
    assert {container["args"][0] for container in ours} == {"gateway", "router", "worker", "pull"}
    for container in ours:
        argv = [re.sub(r"\$\((\w+)\)", lambda found: DOWNWARD[found[1]], arg) for arg in container["args"]]
        named = {variable["name"]: variable.get("value", "redis://r:6379/0") for variable in container.get("env", [])}
        refuse_what_is_unknown(monkeypatch, argv, named)
        mentioned = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
        assert mentioned <= set(named), "a variable that nobody sets stays as it is written"


@overlays
def test_an_image_of_no_registry_is_not_asked_for_at_each_start(overlay: str) -> None:
    ours = [container for workload in rendered(overlay) for container in containers(workload)]
    local = [container for container in ours if container["image"].startswith("headrace:")]
    assert all(container.get("imagePullPolicy") == "IfNotPresent" for container in local)
    assert len(local) in (0, len([container for container in ours if "redis" not in container["image"]]))


@overlays
def test_selectors_find_the_pods_that_they_are_for(overlay: str) -> None:
    resources = rendered(overlay)
    pods = {identity(workload)[1]: labels_of(workload) for workload in of_kind(resources, *WORKLOADS)}
    for workload in of_kind(resources, *WORKLOADS):
        assert selects(workload["spec"]["selector"], labels_of(workload))
    for resource in of_kind(resources, "Service", "PodDisruptionBudget"):
        selector = resource["spec"]["selector"]
        selector = selector if resource["kind"] == "PodDisruptionBudget" else {"matchLabels": selector}
        found = {name for name, labels in pods.items() if selects(selector, labels)}
        assert found == {pods_named(resource)}, identity(resource)
    for policy in of_kind(resources, "NetworkPolicy"):
        assert any(selects(policy["spec"]["podSelector"], labels) for labels in pods.values()), identity(policy)
    for scaler in of_kind(resources, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        (workload,) = (found for found in resources if identity(found) == (target["kind"], target["name"]))
        assert "replicas" not in workload["spec"], "applying the manifests would undo what the autoscaler did"


def pods_named(service: Resource) -> str:
    """The workload of the pods that a Service or budget is for."""
    name = identity(service)[1]
    return OF_OTHER_PODS.get(name, name)


def ports_of(*given: Resource) -> dict[str | int, int]:
    """Ports of containers by name and by number."""
    found: dict[str | int, int] = {}
    for container in given:
        for port in container.get("ports", []):
            found[port["name"]] = found[port["containerPort"]] = port["containerPort"]
    return found


@overlays
def test_ports_of_services_probes_and_addresses_are_those_that_the_commands_listen_on(
    overlay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = rendered(overlay)
    workloads = {identity(workload)[1]: workload for workload in of_kind(resources, *WORKLOADS)}
    services = {identity(service)[1]: service for service in of_kind(resources, "Service")}
    for service in services.values():
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports_of(*containers(workloads[pods_named(service)]))
    for workload in workloads.values():
        annotations = workload["spec"]["template"]["metadata"].get("annotations", {})
        assert not annotations or int(annotations["prometheus.io/port"]) in ports_of(*containers(workload))
        for container in pod_of(workload)["containers"]:
            declared = ports_of(container)
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                action = container.get(probe, {})
                for kind in ("httpGet", "grpc", "tcpSocket"):
                    if kind in action:
                        assert action[kind]["port"] in declared
            if "redis" in container["image"]:
                continue
            env = {variable["name"]: variable.get("value", "x") for variable in container.get("env", [])}
            params = refuse_what_is_unknown(monkeypatch, container["args"], env)
            assert set(listened_ports(params)) == set(declared.values())
            for address in services_of(params):
                named = service_of(address)
                assert named.namespace == "", "that of the pod"
                assert named.port in ports_of(*containers(workloads[named.name])).values()
                assert services[named.name]["spec"]["clusterIP"] == "None", "its name resolves to the pods"


def listened_ports(params: dict[str, Any]) -> Iterator[int]:
    """All ports on which a process with these parameters listens."""
    for name in ("port", "grpc_port"):
        if params.get(name):
            yield params[name]
    for name in ("listen", "metrics", "probe", "endpoint_picker", "await_stages"):
        if params.get(name):
            yield int(params[name].rpartition(":")[2])


def services_of(params: dict[str, Any]) -> tuple[str, ...]:
    """The Services whose pods a process with these parameters watches."""
    return tuple(filter(is_service, params.get("routers", ()) or params.get("worker", ())))


def allowed(resources: list[Resource], source: str, target: str) -> set[int]:
    """Ports of `target` that the policies of both ends let `source` reach."""
    workloads = {identity(workload)[1]: workload for workload in of_kind(resources, *WORKLOADS)}
    declared = ports_of(*containers(workloads[target]))
    policies = of_kind(resources, "NetworkPolicy")

    def opened(end: str, other: str, direction: str, peers: str) -> set[int]:
        found: set[int] = set()
        for policy in policies:
            if not selects(policy["spec"]["podSelector"], labels_of(workloads[end])):
                continue
            for rule in policy["spec"].get(direction, []):
                matching = [
                    peer
                    for peer in rule.get(peers, [])
                    if "namespaceSelector" not in peer and selects(peer["podSelector"], labels_of(workloads[other]))
                ]
                if matching or peers not in rule:
                    # Unlike ingress, egress by name is looked up at the target all the same.
                    found |= {declared[port["port"]] for port in rule["ports"] if port["port"] in declared}
        return found

    return opened(source, target, "egress", "to") & opened(target, source, "ingress", "from")


@overlays
def test_only_gateways_reach_routers_and_only_routers_and_workers_reach_workers(overlay: str) -> None:
    resources = rendered(overlay)
    gateway, router, worker = "headrace-gateway", "headrace-router", "headrace-worker"
    assert allowed(resources, gateway, router) == {50051}
    assert allowed(resources, worker, router) == set()
    assert allowed(resources, router, worker) == {50061}
    assert allowed(resources, gateway, worker) == allowed(resources, worker, gateway) == set()
    assert allowed(resources, worker, worker) == {50061}, "they exchange cached prefixes"
    assert allowed(resources, router, router) == set()
    names = [identity(workload)[1] for workload in of_kind(resources, *WORKLOADS)]
    if "headrace-stage" in names:
        assert allowed(resources, "headrace-stage", worker) == {50070}, "it joins"
        assert allowed(resources, worker, "headrace-stage") == allowed(resources, *["headrace-stage"] * 2) == {50071}
        assert allowed(resources, gateway, "headrace-stage") == allowed(resources, router, "headrace-stage") == set()
    if "headrace-redis" in names:
        assert allowed(resources, gateway, "headrace-redis") == {6379}
        assert allowed(resources, router, "headrace-redis") == allowed(resources, worker, "headrace-redis") == set()
    closed = [policy for policy in of_kind(resources, "NetworkPolicy") if policy["spec"]["podSelector"] == {}]
    assert [set(policy["spec"]["policyTypes"]) for policy in closed] == [{"Ingress", "Egress"}]


@overlays
def test_every_container_is_confined_as_the_restricted_profile_wants(overlay: str) -> None:
    for workload in of_kind(rendered(overlay), *WORKLOADS):
        pod = pod_of(workload)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        for container in containers(workload):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            claims = workload["spec"].get("volumeClaimTemplates", [])
            there = {volume["name"] for volume in pod["volumes"]} | {claim["metadata"]["name"] for claim in claims}
            assert mounted <= there


@overlays
def test_every_part_presents_the_join_token(overlay: str) -> None:
    for workload in of_kind(rendered(overlay), *WORKLOADS):
        for container in pod_of(workload)["containers"]:
            mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
            if "redis" not in container["image"]:
                env = {variable["name"]: variable.get("value", "") for variable in container["env"]}
                assert str(Path(env["HEADRACE_JOIN_TOKEN_FILE"]).parent) in mounts
                password = env.get("HEADRACE_REDIS_PASSWORD_FILE")
                assert (password is not None) == (container["name"] == "gateway"), "nobody else talks to Redis"
                assert password is None or str(Path(password).parent) in mounts


@overlays
def test_who_watches_services_may_read_slices_and_nothing_else_and_nobody_else_has_a_token(
    overlay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = rendered(overlay)
    (role,) = of_kind(resources, "Role")
    verbs = ["get", "list", "watch"]
    assert role["rules"] == [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": verbs}]
    (binding,) = of_kind(resources, "RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    accounts = {account["metadata"]["name"]: account for account in of_kind(resources, "ServiceAccount")}
    assert all(account["automountServiceAccountToken"] is False for account in accounts.values())
    reaching = {
        name
        for policy in of_kind(resources, "NetworkPolicy")
        if {"port": 6443} in [port for rule in policy["spec"].get("egress", []) for port in rule["ports"]]
        for name, labels in ((identity(one)[1], labels_of(one)) for one in of_kind(resources, *WORKLOADS))
        if selects(policy["spec"]["podSelector"], labels)
    }
    for workload in of_kind(resources, *WORKLOADS):
        pod, name = pod_of(workload), identity(workload)[1]
        assert pod.get("serviceAccountName", "headrace") in accounts
        tokens = [volume["name"] for volume in pod["volumes"] if "serviceAccountToken" in json.dumps(volume)]
        watching = [container for container in pod["containers"] if watches(container, monkeypatch)]
        assert (pod.get("serviceAccountName") == subject["name"]) == bool(watching) == bool(tokens)
        assert bool(watching) == (name in reaching)
        for container in containers(workload):
            mounted = [mount for mount in container["volumeMounts"] if mount["name"] in tokens]
            assert len(mounted) == (container in watching)
            assert all(Path(mount["mountPath"]) == CREDENTIALS for mount in mounted)
        for volume in pod["volumes"]:
            if volume["name"] in tokens:
                sources = volume["projected"]["sources"]
                files = [
                    item["path"] for source in sources for one in source.values() for item in one.get("items", [one])
                ]
                assert sorted(files) == ["ca.crt", "namespace", "token"]


def watches(container: Resource, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a container follows the pods of a Service."""
    if "redis" in container["image"]:
        return False
    env = {variable["name"]: variable.get("value", "x") for variable in container.get("env", [])}
    return bool(services_of(refuse_what_is_unknown(monkeypatch, container["args"], env)))


@overlays
def test_every_redis_has_a_password_and_tls_where_all_parts_have_it(overlay: str) -> None:
    resources = rendered(overlay)
    workloads = of_kind(resources, *WORKLOADS)
    has_tls = "HEADRACE_TLS_DIR" in json.dumps(workloads)
    found = [container for workload in workloads for container in containers(workload) if "redis" in container["image"]]
    for container in found:
        args = container["args"]
        assert args[0].endswith("/redis.conf"), "it has the password"
        assert ("--tls-port" in args) == has_tls
        assert not has_tls or args[args.index("--port") + 1] == "0"
        probe = " ".join(container["readinessProbe"]["exec"]["command"])
        assert ("--tls" in probe) == has_tls
    policies = [container["args"][container["args"].index("--maxmemory-policy") + 1] for container in found]
    assert policies == (["noeviction", "allkeys-lru"] if found else [])
    for secret in of_kind(resources, "Secret"):
        urls = secret["stringData"]
        assert {url.partition(":")[0] for url in urls.values()} == {"rediss" if has_tls else "redis"}
        assert len(set(urls.values())) == len(urls) == 2


@overlays
def test_a_worker_that_drains_is_not_ready_and_alive(overlay: str) -> None:
    container = named(worker_of(rendered(overlay)), "worker")
    assert container["livenessProbe"]["grpc"]["service"] == "headrace.v1.Worker"
    assert container["readinessProbe"]["grpc"].get("service", "") in ("", "headrace.v1.Inference")


@overlays
def test_workers_are_guaranteed_whole_cpus(overlay: str) -> None:
    computing = of_kind(rendered(overlay), "StatefulSet")
    for container in (container for workload in computing for container in containers(workload)):
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
        assert set(resources["limits"]) == {"cpu", "memory"}
        assert resources["limits"]["cpu"].isdecimal(), "a fraction of a CPU is not given for itself"


@overlays
def test_pods_are_given_the_time_to_drain(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for workload in of_kind(rendered(overlay), *WORKLOADS):
        pod = pod_of(workload)
        for container in pod["containers"]:
            if "redis" in container["image"]:
                continue
            env = {variable["name"]: variable.get("value", "x") for variable in container.get("env", [])}
            params = refuse_what_is_unknown(monkeypatch, container["args"], env)
            drain_s = params.get("drain_timeout", params.get("drain_timeout_s"))
            assert isinstance(drain_s, float)
            hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
            assert hook[0] == "sleep"
            assert drain_s + int(hook[1]) + 5 <= pod["terminationGracePeriodSeconds"]


def test_a_pool_has_the_gateways_of_workers_pods_and_asks_the_gateways_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resources = rendered("inference-pool")
    found = {identity(resource): resource for resource in resources}
    pool, picker = found["InferencePool", "headrace"]["spec"], found["Service", "headrace-picker"]["spec"]
    worker, gateway = found["StatefulSet", "headrace-worker"], found["Deployment", "headrace-gateway"]
    assert selects(pool["selector"], labels_of(worker))
    assert not selects(pool["selector"], labels_of(gateway))

    def params_of(workload: Resource, container: str) -> dict[str, Any]:
        made = named(workload, container)
        env = {variable["name"]: variable.get("value", "x") for variable in made["env"]}
        return refuse_what_is_unknown(monkeypatch, made["args"], env)

    endpoint, asked, own = (
        params_of(worker, "endpoint"), params_of(gateway, "gateway"), params_of(worker, "worker")
    )  # fmt: skip
    # The Gateway sends requests to the port that the picker names, where the pod's gateway listens for its own worker.
    assert pool["targetPorts"] == [{"number": endpoint["port"]}] == [{"number": asked["endpoint_port"]}]
    assert endpoint["routers"] == (f"127.0.0.1:{str(own['listen']).rpartition(':')[2]}",)
    assert str(endpoint["tls_dir"]) == str(asked["tls_dir"]) == str(own["tls_dir"]) == "/etc/headrace/tls"
    reference = pool["endpointPickerRef"]
    assert found["Service", reference["name"]]["spec"] is picker
    assert picker["ports"][0]["port"] == reference["port"]["number"]
    assert ports_of(named(gateway, "gateway"))[picker["ports"][0]["targetPort"]] == int(
        asked["endpoint_picker"].rpartition(":")[2]
    )
    assert asked["endpoint_picker_tls"] == "fleet"
    (rule,) = found["HTTPRoute", "headrace"]["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert (backend["kind"], backend["name"]) == identity(found["InferencePool", "headrace"])
    assert rule["timeouts"]["request"] == f"{asked['request_timeout'] / 3600:g}h"


@pytest.mark.parametrize(("workload", "port"), [("headrace-gateway", "picker"), ("headrace-worker", "http")])
def test_only_proxies_of_a_gateway_reach_the_picker_and_the_endpoints(workload: str, port: str) -> None:
    resources = rendered("inference-pool")
    (labels,) = (labels_of(one) for one in of_kind(resources, *WORKLOADS) if identity(one)[1] == workload)
    rules = [
        rule
        for policy in of_kind(resources, "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], labels)
        for rule in policy["spec"].get("ingress", [])
        if {"port": port} in rule["ports"]
    ]
    (peers,) = (rule["from"] for rule in rules)
    expressions = [expression for peer in peers for expression in peer["podSelector"]["matchExpressions"]]
    assert {expression["key"] for expression in expressions} == {
        "gateway.networking.k8s.io/gateway-name",
        "gateway.envoyproxy.io/owning-gateway-name",
    }
    assert {expression["operator"] for expression in expressions} == {"Exists"}


def test_a_pool_without_certificates_speaks_tls_all_the_same(tmp_path: Path) -> None:
    """The extension's API asks for it."""
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    lines = {"resources": [str(KUBERNETES / "base")], "components": [str(KUBERNETES / "components/inference-pool")]}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(lines))
    (gateway,) = (one for one in render(overlay) if identity(one) == ("Deployment", "headrace-gateway"))
    env = {variable["name"]: variable.get("value") for variable in named(gateway, "gateway")["env"]}
    assert env["HEADRACE_GATEWAY_ENDPOINT_PICKER_TLS"] == "self-signed"


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("InferencePool", {"extensionRef": {"name": "headrace-picker"}}),
        ("InferencePool", {"targetPorts": []}),
        ("InferencePool", {"endpointPickerRef": {"name": "p", "port": {"number": 9002}, "failureMode": "failOpen"}}),
        ("InferencePool", {"selector": {"app": "x"}}),
        ("HTTPRoute", {"rules": [{"timeouts": {"request": "3600"}}]}),
        ("HTTPRoute", {"rules": [{"backendRefs": [{"kind": "InferencePool", "targetPort": 8000}]}]}),
    ],
)
def test_a_custom_resource_of_another_shape_is_refused(kind: str, wrong: dict[str, Any]) -> None:
    (resource,) = of_kind(rendered("inference-pool"), kind)
    custom_resources.check(resource)
    with pytest.raises(jsonschema_rs.ValidationError):
        custom_resources.check({**resource, "spec": {**resource["spec"], **wrong}})


def test_the_routes_of_the_guide_lead_to_the_gateways_and_not_to_their_metrics() -> None:
    guide = (KUBERNETES.parent.parent / "docs" / "how-to" / "kubernetes.md").read_text()
    blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)]
    shown = {block["kind"]: block for block in blocks if "kind" in block}
    assert shown.keys() == {"HTTPRoute", "Ingress"}
    custom_resources.check(shown["HTTPRoute"])
    if importlib.util.find_spec("kubernetes_validate") is not None:
        import kubernetes_validate

        kubernetes_validate.validate(shown["Ingress"], RELEASES[-1], strict=True)
    (rule,) = shown["HTTPRoute"]["spec"]["rules"]
    (path,) = shown["Ingress"]["spec"]["rules"][0]["http"]["paths"]
    assert path["path"] == rule["matches"][0]["path"]["value"] == "/v1"
    services = {identity(one)[1]: one for one in of_kind(rendered("laptop"), "Service")}
    ports = {port["name"]: port["port"] for port in services[path["backend"]["service"]["name"]]["spec"]["ports"]}
    (backend,) = rule["backendRefs"]
    assert (backend["name"], backend["port"]) == (path["backend"]["service"]["name"], ports["http"])
    assert path["backend"]["service"]["port"]["name"] in ports
    annotations = shown["Ingress"]["metadata"]["annotations"]
    size = annotations["nginx.ingress.kubernetes.io/proxy-body-size"]
    assert size == f"{EdgeSettings().max_body_mb}m"


def test_keda_scales_by_signals_that_routers_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    base, component = KUBERNETES / "base", KUBERNETES / "components" / "autoscaling-keda"
    lines = {"resources": [str(base)], "components": [str(component)], "namespace": "headrace"}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(lines))
    resources = render(overlay)
    workloads = {identity(workload)[1]: workload for workload in of_kind(resources, *WORKLOADS)}
    scaled = {identity(scaler)[1]: scaler["spec"] for scaler in of_kind(resources, "ScaledObject")}
    assert scaled.keys() == {"headrace-worker", "headrace-gateway"}
    for scaler in of_kind(resources, "ScaledObject"):
        custom_resources.check(scaler)
    for name, spec in scaled.items():
        assert spec["scaleTargetRef"]["name"] == name
        assert "replicas" not in workloads[name]["spec"], "applying the manifests would undo what KEDA did"
    push, prometheus = scaled["headrace-worker"]["triggers"]
    assert _metric_of(push["metadata"]) == ("workers_wanted", 1.0)
    assert scaled["headrace-worker"]["minReplicaCount"] == 0
    host, port = push["metadata"]["scalerAddress"].split(":")
    (service,) = [one for one in of_kind(resources, "Service") if one["metadata"]["name"] == host.split(".")[0]]
    assert selects({"matchLabels": service["spec"]["selector"]}, labels_of(workloads["headrace-router"]))
    assert service["spec"]["ports"][0]["port"] == int(port)
    (router,) = containers(workloads["headrace-router"])
    env = {variable["name"]: variable.get("value", "m") for variable in router["env"]}
    params = refuse_what_is_unknown(monkeypatch, router["args"], env)
    assert (params["on_demand"], params["scaler"]) == (("m",), f"0.0.0.0:{port}")
    guide = (KUBERNETES.parent.parent / "docs" / "reference" / "metrics.md").read_text()
    assert set(re.findall(r"headrace_\w+", prometheus["metadata"]["query"])) <= set(re.findall(r"headrace_\w+", guide))


def test_metrics_of_the_autoscaler_are_ours() -> None:
    (told,) = documents(KUBERNETES / "components" / "autoscaling" / "prometheus.yaml")
    rules = {rule["name"]["as"]: rule for rule in yaml.safe_load(told["data"]["adapter.yaml"])["externalRules"]}
    wanted = {
        metric["external"]["metric"]["name"]
        for scaler in documents(KUBERNETES / "components" / "autoscaling" / "autoscalers.yaml")
        for metric in scaler["spec"]["metrics"]
        if metric["type"] == "External"
    }
    assert wanted == set(rules)
    series = set(re.findall(r"headrace_\w+", " ".join(rule["metricsQuery"] for rule in rules.values())))
    # Every metric is in the guide: tests of observability hold it to what processes show.
    guide = (KUBERNETES.parent.parent / "docs" / "reference" / "metrics.md").read_text()
    explained = set(re.findall(r"`(headrace_\w+)[`{]", guide))
    assert {name.removesuffix("_bucket") for name in series} <= explained


def test_prometheus_looks_for_the_pods_and_jobs_that_there_are() -> None:
    (told,) = documents(KUBERNETES / "components" / "autoscaling" / "prometheus.yaml")
    (scrape,) = yaml.safe_load(told["data"]["scrape.yaml"])["scrape_configs"]
    assert scrape["kubernetes_sd_configs"] == [{"role": "pod", "namespaces": {"names": ["headrace"]}}]
    looked_for = yaml.safe_load((KUBERNETES.parent / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    names = {labels_of(workload)["app.kubernetes.io/name"] for workload in of_kind(rendered("laptop"), *WORKLOADS)}
    assert {job["job_name"] for job in looked_for} == names


def test_the_kubelet_keeps_a_pod_on_one_node() -> None:
    (kubelet,) = documents(KUBERNETES / "kubelet.yaml")
    assert kubelet["cpuManagerPolicy"] == "static"
    assert kubelet["topologyManagerPolicy"] == "single-numa-node"
    assert kubelet["memoryManagerPolicy"] == "Static"
    reserved = [kubelet["kubeReserved"]["memory"], kubelet["systemReserved"]["memory"]]
    reserved.append(kubelet["evictionHard"]["memory.available"])
    given = [node["limits"]["memory"] for node in kubelet["reservedMemory"]]
    assert sum(map(mebibytes, reserved)) == sum(map(mebibytes, given)), "the kubelet does not start otherwise"


def mebibytes(quantity: str) -> int:
    number, unit = int(quantity[:-2]), quantity[-2:]
    return number * {"Mi": 1, "Gi": 1024}[unit]


def test_workers_of_a_shared_volume_fetch_nothing(tmp_path: Path) -> None:
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    base, component = KUBERNETES / "base", KUBERNETES / "components" / "shared-models"
    lines = {"resources": [str(base)], "components": [str(component)]}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(lines))
    (worker,) = of_kind(render(overlay), "StatefulSet")
    assert [container["name"] for container in containers(worker)] == ["worker"]
    claims = [volume for volume in pod_of(worker)["volumes"] if volume["name"] == "models"]
    assert claims == [{"name": "models", "persistentVolumeClaim": {"claimName": "headrace-models", "readOnly": True}}]
    assert "volumeClaimTemplates" not in worker["spec"]


def test_workers_of_a_model_in_an_image_fetch_nothing_and_the_node_keeps_it(tmp_path: Path) -> None:
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    lines = {"resources": [str(KUBERNETES / "base")], "components": [str(KUBERNETES / "components" / "model-image")]}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(lines))
    (worker,) = of_kind(render(overlay), "StatefulSet")
    if importlib.util.find_spec("kubernetes_validate") is not None:
        import kubernetes_validate

        kubernetes_validate.validate(worker, RELEASES[-1], strict=True)
    assert [container["name"] for container in containers(worker)] == ["worker"]
    (models,) = [volume for volume in pod_of(worker)["volumes"] if volume["name"] == "models"]
    assert models["image"] == {"reference": "headrace-model", "pullPolicy": "IfNotPresent"}
    assert "volumeClaimTemplates" not in worker["spec"]


@pytest.mark.parametrize("overlay", sorted({*OVERLAYS} - {"pipeline"}))
def test_the_kv_cache_of_a_worker_outlives_its_container(overlay: str) -> None:
    workload = worker_of(rendered(overlay))
    pod, worker = pod_of(workload), named(workload, "worker")
    (directory,) = [arg.partition("=")[2] for arg in worker["args"] if arg.startswith("--kv-memory=")]
    (volume,) = [mount["name"] for mount in worker["volumeMounts"] if mount["mountPath"] == directory]
    assert {"name": volume, "emptyDir": {"medium": "Memory"}} in pod["volumes"]


def test_stages_join_the_worker_before_it_is_ready_and_are_as_many_as_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resources = rendered("pipeline")
    found = {identity(one): one for one in resources}
    worker, stage = found["StatefulSet", "headrace-worker"], found["StatefulSet", "headrace-stage"]

    def params_of(workload: Resource) -> dict[str, Any]:
        (container,) = pod_of(workload)["containers"]
        argv = [re.sub(r"\$\((\w+)\)", lambda name: DOWNWARD[name[1]], arg) for arg in container["args"]]
        env = {variable["name"]: variable.get("value", "x") for variable in container["env"]}
        return refuse_what_is_unknown(monkeypatch, argv, env)

    first, other = params_of(worker), params_of(stage)
    assert worker["spec"]["replicas"] == 1
    assert stage["spec"]["replicas"] == first["pipeline"] - 1
    assert other["serve_stage"] is True
    assert other["tls_dir"] == first["tls_dir"] is not None
    host, _, port = other["join"].rpartition(":")
    service = found["Service", host]["spec"]
    assert service["publishNotReadyAddresses"] is True
    assert [one["port"] for one in service["ports"]] == [int(port)]
    assert first["await_stages"].endswith(f":{port}")
    assert selects({"matchLabels": service["selector"]}, labels_of(worker))
    (rule,) = pod_of(stage)["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert all(selects(rule["labelSelector"], labels_of(one)) for one in (worker, stage))
