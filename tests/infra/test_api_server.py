"""A real API server takes the manifests and the chart, gives the chart's service account its rights and no others, and
has the faults of watches that the scripted one imitates. `tests/router/test_services.py` has a router follow both.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from headrace.common.kubernetes.watch import Pace
from tests.api_server import Pod
from tests.common.kubernetes.following import Following
from tests.deploy import custom_resources
from tests.deploy.chart import helm_library, rendered
from tests.deploy.kustomization import Resource, render
from tests.deploy.test_helm import overlay_values
from tests.deploy.test_kubernetes import KUBERNETES, OVERLAYS
from tests.infra.cluster import Gate, Object, RealCluster, SliceWriter, path_of, real_cluster
from tests.patience import patience
from tests.patience import until as wait_until
from tests.router.fake_worker import until

ACCOUNT = "headrace-membership"
PORT = 50061
A, B, C = Pod("a", "10.0.0.1"), Pod("b", "10.0.0.2"), Pod("c", "10.0.0.3")
# Watches of an hour, so that nothing ends one but what the test is about.
LONG = Pace(watch_s=3600, first_pause_s=0.02, max_pause_s=0.2, steady_s=60)
# Bookmarks come two seconds before the end of a watch.
ENDING = Pace(watch_s=4.0, late_s=3600, first_pause_s=0.02, max_pause_s=0.2, steady_s=0.5)
SHORT = Pace(watch_s=1.0, late_s=0.2, first_pause_s=0.02, max_pause_s=0.2, steady_s=0.5)
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    with real_cluster(tmp_path_factory.mktemp("cluster")) as made:
        for definition in custom_resources.definitions():
            made.apply(definition)
        wait_until(lambda: has_custom_resources(made), "custom resources are served")
        yield made


def has_custom_resources(cluster: RealCluster) -> bool:
    """Whether the server takes those of our manifests."""
    return all(cluster.http.get(path_of(kind)).status_code == 200 for _, kind in custom_resources.SPECS)


@pytest.fixture(scope="module")
def helm() -> Any:
    return helm_library()


def applied(cluster: RealCluster, namespace: str, objects: list[Resource]) -> None:
    """Apply objects in a namespace. The server has every field of them then."""
    for sent, stored in cluster.apply_all(objects, namespace):
        if "stringData" in sent:  # it is only written
            sent["data"] = {name: b64encode(text.encode()).decode() for name, text in sent.pop("stringData").items()}
        assert differences(sent, stored) == []


def differences(sent: Any, stored: Any, where: str = "") -> list[str]:
    """What of an object the server has not, or has otherwise. What the server has added does not count."""
    if isinstance(sent, dict):
        if not isinstance(stored, dict):
            return [where]
        return [line for key, value in sent.items() for line in differences(value, stored.get(key), f"{where}.{key}")]
    if isinstance(sent, list):
        if not isinstance(stored, list) or len(sent) != len(stored):
            return [where]
        pairs = enumerate(zip(sent, stored, strict=True))
        return [line for number, (ours, its) in pairs for line in differences(ours, its, f"{where}[{number}]")]
    return [] if amount(sent) == amount(stored) or not (sent or stored) else [f"{where}: {sent!r}, {stored!r}"]


def amount(value: Any) -> Any:
    """A value, or the number that it is in the server's words: 2k for 2000."""
    found = re.fullmatch(r"(\d+)(m|k|M|G)?", value) if isinstance(value, str) else None
    return value if found is None else int(found[1]) * {None: 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9}[found[2]]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_manifests_and_the_chart_are_accepted(cluster: RealCluster, helm: Any, overlay: str) -> None:
    for way, objects in (
        ("manifests", render(KUBERNETES / "overlays" / overlay)),
        ("chart", rendered(helm, overlay_values(overlay), namespace=f"chart-{overlay}")),
    ):
        cluster.make_namespace(f"{way}-{overlay}")
        applied(cluster, f"{way}-{overlay}", objects)
    kinds = {one["kind"] for one in objects}
    assert {"Deployment", "StatefulSet", "Service", "Role", "RoleBinding", "NetworkPolicy"} <= kinds
    assert ("HorizontalPodAutoscaler" in kinds) == (overlay == "fleet")


def test_the_autoscalers_of_keda_are_accepted(cluster: RealCluster, helm: Any) -> None:
    cluster.make_namespace("keda")
    values = {"components": ["autoscaling-keda"], "models": {"more": {"source": "org/more"}}}
    objects = rendered(helm, values, namespace="keda")
    applied(cluster, "keda", objects)
    scaled = {one["metadata"]["name"] for one in objects if one["kind"] == "ScaledObject"}
    assert scaled == {"headrace-worker", "headrace-worker-more", "headrace-gateway"}


def test_the_service_for_kuberay_is_accepted(cluster: RealCluster) -> None:
    cluster.make_namespace("kuberay")
    applied(cluster, "kuberay", [yaml.safe_load((KUBERNETES.parent / "ray" / "rayservice.yaml").read_text())])


def test_a_field_that_the_server_does_not_know_is_refused(cluster: RealCluster) -> None:
    """So what it accepts, it has understood."""
    (service, *_) = (one for one in render(KUBERNETES / "overlays" / "laptop") if one["kind"] == "Service")
    cluster.make_namespace("unknown")
    service["metadata"]["namespace"] = "unknown"
    service["spec"]["selectors"] = {}
    with pytest.raises(AssertionError, match="selectors"):
        cluster.apply(service)


def granted(cluster: RealCluster, token: str, namespace: str) -> set[tuple[str, str, str]]:
    """What the bearer of a token may do in a namespace beyond what everyone may: verb, group and resource."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    answer = cluster.http.post(
        "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews",
        json=review,
        headers={"Authorization": f"Bearer {token}"},
    )
    assert answer.status_code == 201, answer.text
    return {
        (verb, group, resource)
        for rule in answer.json()["status"]["resourceRules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        if group != "authorization.k8s.io"
    }


def test_the_service_accounts_of_the_chart_have_the_least_rights(cluster: RealCluster, helm: Any) -> None:
    cluster.make_namespace("rights")
    cluster.make_namespace("another")
    applied(cluster, "rights", rendered(helm, {}, namespace="rights"))
    membership = cluster.token_of(ACCOUNT, "rights")
    verbs = {(verb, "discovery.k8s.io", "endpointslices") for verb in ("get", "list", "watch")}
    assert granted(cluster, membership, "rights") == verbs
    assert granted(cluster, membership, "another") == set()
    assert granted(cluster, cluster.token_of("headrace", "rights"), "rights") == set()
    bearer = {"Authorization": f"Bearer {membership}"}
    assert cluster.http.get(path_of("EndpointSlice", "rights"), headers=bearer).status_code == 200
    assert cluster.http.get(path_of("EndpointSlice", "another"), headers=bearer).status_code == 403
    assert cluster.http.get(path_of("Secret", "rights"), headers=bearer).status_code == 403
    pods = {"kind": "EndpointSlice", "metadata": {"name": "mine"}}
    assert cluster.http.post(path_of("EndpointSlice", "rights"), headers=bearer, json=pods).status_code == 403


class Watched:
    """A Service of a namespace, and a watch of it through a gate with the credentials of the chart."""

    def __init__(self, cluster: RealCluster, gate: Gate, writer: SliceWriter, namespace: str) -> None:
        self.cluster = cluster
        self.gate = gate
        self.namespace = namespace
        self._writer = writer

    async def put(self, *pods: Pod, name: str = "s", service: str = "worker") -> None:
        await self._writer.put(name, service, [pod.entry() for pod in pods], PORT)

    def calls(self, verb: str) -> list[Object]:
        """The calls that the API server has had of the watch: their parameters."""
        return [
            {name: values[-1] for name, values in parse_qs(urlsplit(event["requestURI"]).query).items()}
            for event in self.cluster.calls_of(ACCOUNT, self.namespace)
            if event["verb"] == verb
            and event["stage"] == ("ResponseStarted" if verb == "watch" else "ResponseComplete")
        ]


Follow = Callable[[Pace], Awaitable[tuple[Watched, Following]]]


@pytest.fixture
async def follow(cluster: RealCluster, helm: Any, tmp_path: Path) -> AsyncIterator[Follow]:
    """Follow a Service that has the pod A."""
    namespace = f"watched-{next(_numbers)}"
    cluster.make_namespace(namespace)
    rights = [one for one in rendered(helm, {}) if one["kind"] in ("ServiceAccount", "Role", "RoleBinding")]
    applied(cluster, namespace, rights)
    credentials = cluster.write_credentials(ACCOUNT, namespace, tmp_path / "credentials")
    gate, writer = await Gate(cluster.port).start(), SliceWriter(cluster, namespace)
    made: list[Following] = []

    async def start(pace: Pace) -> tuple[Watched, Following]:
        watched = Watched(cluster, gate, writer, namespace)
        await watched.put(A)
        made.append(Following(f"https://127.0.0.1:{gate.port}", credentials, pace, namespace))
        await made[-1].until_told("a")
        return watched, made[-1]

    yield start
    for one in made:
        await one.close()
    await gate.cut()
    await writer.close()


async def test_changes_are_told_and_those_of_other_services_are_not(follow: Follow) -> None:
    watched, following = await follow(LONG)
    await watched.put(A, B)
    await following.until_told("a", "b")
    await watched.put(C, name="t", service="another")
    await watched.put(B)
    await following.until_told("b")
    assert following.told == [{"a"}, {"a", "b"}, {"b"}]
    assert (len(watched.calls("list")), following.ends) == (1, [])


async def test_bookmarks_move_the_version_on_past_the_changes_of_others(follow: Follow) -> None:
    """A watch that hears nothing else goes on from there, so that its version never becomes too old."""
    watched, following = await follow(ENDING)
    for number in range(5):
        await watched.put(Pod("x", f"10.1.0.{number}"), name="t", service="another")
    newest = int(watched.cluster.get("EndpointSlice", watched.namespace, "t")["metadata"]["resourceVersion"])
    await until(lambda: any(int(call["resourceVersion"]) >= newest for call in watched.calls("watch")), 20.0)
    assert following.told == [{"a"}]
    assert (len(watched.calls("list")), following.ends) == (1, [])


async def test_a_version_that_the_server_has_forgotten_is_listed_anew(follow: Follow) -> None:
    watched, following = await follow(LONG)
    await watched.put(B, name="t")
    await following.until_told("a", "b")
    await watched.gate.cut()
    await watched.put(name="s")
    await watched.put(C, name="u")
    await watched.cluster.restart_without_history()
    assert following.told[-1] == {"a", "b"}, "what is known stays"
    await watched.gate.start()
    await following.until_told("b", "c")
    assert "expired" in following.ends
    assert len(watched.calls("list")) == 2


async def test_a_dropped_watch_goes_on_where_it_was(follow: Follow) -> None:
    watched, following = await follow(LONG)
    for pods in ([A, B], [B], [B, C]):
        watched.gate.drop()
        await watched.put(*pods)
        await following.until_told(*(pod.name for pod in pods))
    assert len(watched.calls("list")) == 1


async def test_a_frozen_watch_is_given_up(follow: Follow) -> None:
    watched, following = await follow(SHORT)
    watched.gate.freeze()
    await watched.put(A, B)
    await until(lambda: "silent" in following.ends)
    assert following.told == [{"a"}]
    watched.gate.thaw()
    await following.until_told("a", "b")
    async with asyncio.timeout(patience(10)):
        while not following.watch.is_current:
            await asyncio.sleep(0.01)
