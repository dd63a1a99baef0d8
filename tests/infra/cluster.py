"""A real API server of Kubernetes with its etcd, for tests: `make api-server` builds the programs.

It is of version 1.20, the newest that builds here, so it gets the present EndpointSlices as a resource of its own
(discovery.k8s.io/v1), and `as_of_1_20` says newer objects in its words. Lists, watches, bookmarks, 410 Gone, tokens and
rights are the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.common import launch
from tests.certificates import make_certificates
from tests.infra.build_api_server import BUILT
from tests.patience import patience, until
from tests.ports import free_port

Object = dict[str, Any]
MISSING = "no API server; make api-server builds it, in up to 11 minutes of CPU time"
PROBE = "grpc_health_probe"
"""What a gRPC probe was before Kubernetes had them: this program in the container."""
MIN_READY_S = "headrace.test/min-ready-seconds"
"""The annotation for minReadySeconds of StatefulSets, which 1.20 does not have."""
_ADMIN = "admin-of-tests"
_AUDITED = ("endpointslices",)
_START_S = 60.0

_PLURALS = {
    "Namespace": "api/v1/namespaces",
    "Node": "api/v1/nodes",
    "Pod": "api/v1/pods",
    "ConfigMap": "api/v1/configmaps",
    "Secret": "api/v1/secrets",
    "Service": "api/v1/services",
    "ServiceAccount": "api/v1/serviceaccounts",
    "PersistentVolumeClaim": "api/v1/persistentvolumeclaims",
    "Deployment": "apis/apps/v1/deployments",
    "StatefulSet": "apis/apps/v1/statefulsets",
    "Role": "apis/rbac.authorization.k8s.io/v1/roles",
    "RoleBinding": "apis/rbac.authorization.k8s.io/v1/rolebindings",
    "NetworkPolicy": "apis/networking.k8s.io/v1/networkpolicies",
    "PodDisruptionBudget": "apis/policy/v1beta1/poddisruptionbudgets",
    "HorizontalPodAutoscaler": "apis/autoscaling/v2beta2/horizontalpodautoscalers",
    "EndpointSlice": "apis/discovery.k8s.io/v1/endpointslices",
    "InferencePool": "apis/inference.networking.k8s.io/v1/inferencepools",
    "HTTPRoute": "apis/gateway.networking.k8s.io/v1/httproutes",
    "ScaledObject": "apis/keda.sh/v1alpha1/scaledobjects",
    "RayService": "apis/ray.io/v1/rayservices",
    "CustomResourceDefinition": "apis/apiextensions.k8s.io/v1/customresourcedefinitions",
}
_CLUSTER_WIDE = ("Namespace", "Node", "CustomResourceDefinition")
# Fields of our objects that came after 1.20, by kind and path.
_NEWER = {
    "PodDisruptionBudget": (("spec", "unhealthyPodEvictionPolicy"),),
    "StatefulSet": (("spec", "persistentVolumeClaimRetentionPolicy"), ("spec", "minReadySeconds")),
}
_OLDER_VERSIONS = {"policy/v1": "policy/v1beta1", "autoscaling/v2": "autoscaling/v2beta2"}


def path_of(kind: str, namespace: str = "", name: str = "") -> str:
    """The path of an object in the API, or of all objects of a kind."""
    group, _, plural = _PLURALS[kind].rpartition("/")
    inside = f"/namespaces/{namespace}" if namespace and kind not in _CLUSTER_WIDE else ""
    return f"/{group}{inside}/{plural}" + (f"/{name}" if name else "")


def as_of_1_20(resource: Object) -> Object:
    """An object as a server of that version takes it: what came later is left out or said otherwise."""
    resource = copy.deepcopy(resource)
    resource["apiVersion"] = _OLDER_VERSIONS.get(resource["apiVersion"], resource["apiVersion"])
    if resource["kind"] == "StatefulSet" and "minReadySeconds" in resource["spec"]:
        annotations = resource["metadata"].setdefault("annotations", {})
        annotations[MIN_READY_S] = str(resource["spec"]["minReadySeconds"])
    for *parents, last in _NEWER.get(resource["kind"], ()):
        place = resource
        for parent in parents:
            place = place[parent]
        place.pop(last, None)
    pod = resource.get("spec", {}).get("template", {}).get("spec", {})
    for owner in (resource.get("spec", {}) if resource["kind"] == "Service" else {}, *pod.get("containers", ())):
        for port in owner.get("ports", ()):
            port.setdefault("protocol", "TCP")  # the server's default, which its merges did not know
    for container in pod.get("containers", ()):
        for probe in (container.get(f"{kind}Probe", {}) for kind in ("startup", "liveness", "readiness")):
            if "grpc" in probe:
                target = probe.pop("grpc")
                command = [PROBE, f"-addr=:{target['port']}", f"-service={target.get('service', '')}"]
                probe["exec"] = {"command": command}
    for constraint in pod.get("topologySpreadConstraints", ()):
        for newer in ("matchLabelKeys", "minDomains", "nodeAffinityPolicy", "nodeTaintsPolicy"):
            constraint.pop(newer, None)
    return resource


class RealCluster:
    """etcd and kube-apiserver, each a process that dies with the tests. Use `real_cluster`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = free_port()
        self.certificates = make_certificates(directory / "certificates", hosts=("127.0.0.1",))
        self.ca = self.certificates / "ca.pem"
        self._etcd_port = free_port()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        (directory / "tokens.csv").write_text(f"{_ADMIN},admin,admin,system:masters\n")
        rules = [{"level": "Metadata", "resources": [{"resources": list(_AUDITED), "group": "discovery.k8s.io"}]}]
        policy = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": rules}
        (directory / "audit.json").write_text(json.dumps(policy))
        self.http = httpx.Client(
            base_url=f"https://127.0.0.1:{self.port}",
            verify=ssl.create_default_context(cafile=str(self.ca)),
            headers={"Authorization": f"Bearer {_ADMIN}"},
            timeout=30.0,
            trust_env=False,
        )

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start both, and wait until the server is ready and has EndpointSlices."""
        clients, peers = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{free_port()}"
        self._spawn(
            "etcd",
            *("--data-dir", str(self.directory / "etcd")),
            *("--listen-client-urls", clients, "--advertise-client-urls", clients),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"default={peers}"),
        )
        self._spawn_server()
        until(self._is_ready, "the API server is ready", _START_S)
        self.apply(_ENDPOINT_SLICES)
        until(lambda: self.http.get(path_of("EndpointSlice")).status_code == 200, "EndpointSlices are served", _START_S)

    async def restart_without_history(self) -> None:
        """Forget all versions but the newest. The server itself remembers the changes of a minute or more, also what
        etcd has forgotten, so it is killed, and started anew at its port."""
        await asyncio.to_thread(self._compact)
        process = self._processes.pop("kube-apiserver")
        process.kill()
        process.wait()
        # In this thread: the process would die with another one.
        self._spawn_server()
        async with asyncio.timeout(patience(_START_S)):
            while not self._is_ready():
                await asyncio.sleep(0.05)

    def _spawn_server(self) -> None:
        key = str(self.certificates / "key.pem")
        self._spawn(
            "kube-apiserver",
            *("--etcd-servers", f"http://127.0.0.1:{self._etcd_port}"),
            *("--bind-address", "127.0.0.1", "--advertise-address", "127.0.0.1", "--secure-port", str(self.port)),
            *("--tls-cert-file", str(self.certificates / "cert.pem"), "--tls-private-key-file", key),
            *("--token-auth-file", str(self.directory / "tokens.csv"), "--authorization-mode", "RBAC"),
            *("--service-account-issuer", "https://kubernetes.default.svc"),
            *(
                "--service-account-signing-key-file",
                key,
                "--service-account-key-file",
                str(self.certificates / "cert.pem"),
            ),
            *("--service-cluster-ip-range", "10.96.0.0/16", "--endpoint-reconciler-type", "none"),
            *("--runtime-config", "discovery.k8s.io/v1beta1=false"),
            *("--audit-policy-file", str(self.directory / "audit.json")),
            *("--audit-log-path", str(self.directory / "audit.log")),
        )

    def _compact(self) -> None:
        etcdctl = [str(BUILT / "etcdctl"), "--endpoints", f"http://127.0.0.1:{self._etcd_port}"]
        environment = {"ETCDCTL_API": "3"}
        told = subprocess.run(
            [*etcdctl, "endpoint", "status", "--write-out", "json"], env=environment, capture_output=True, check=True
        )
        revision = json.loads(told.stdout)[0]["Status"]["header"]["revision"]
        subprocess.run(
            [*etcdctl, "compact", str(revision), "--physical"], env=environment, capture_output=True, check=True
        )

    def end(self) -> None:
        """End both."""
        self.http.close()
        for process in self._processes.values():
            process.kill()
            process.wait()

    def tail(self) -> str:
        """The end of the logs."""
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def _spawn(self, name: str, *flags: str) -> None:
        with (self.directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                launch.with_parent([str(BUILT / name), *flags]), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _is_ready(self) -> bool:
        process = self._processes["kube-apiserver"]
        assert process.poll() is None, f"kube-apiserver has ended\n{self.tail()}"
        try:
            return self.http.get("/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    # -- objects --------------------------------------------------------------------------------------------------

    def client(self) -> httpx.AsyncClient:
        """A client of the server, for an event loop."""
        return httpx.AsyncClient(
            base_url=self.http.base_url,
            verify=ssl.create_default_context(cafile=str(self.ca)),
            headers=self.http.headers,
            timeout=patience(30),
            trust_env=False,
        )

    def apply(self, resource: Object) -> Object:
        """Make an object, or change it to be so, as `kubectl apply --server-side` does. The server refuses fields that
        it does not know. Returns what it has now."""
        metadata = resource["metadata"]
        answer = self.http.patch(
            path_of(resource["kind"], metadata.get("namespace", ""), metadata["name"]),
            params={"fieldManager": "tests", "force": "true"},
            headers={"Content-Type": "application/apply-patch+yaml"},
            content=json.dumps(resource),
        )
        assert answer.status_code in (200, 201), f"{resource['kind']} {metadata['name']}: {answer.text}"
        found: Object = answer.json()
        return found

    def apply_all(self, objects: Sequence[Object], namespace: str) -> list[tuple[Object, Object]]:
        """Apply objects of a rendered chart or overlay in a namespace, in the words of the server's version. Returns
        each as it was sent and as the server has it now."""
        pairs = []
        for resource in map(as_of_1_20, objects):
            if resource["kind"] == "Namespace":
                continue
            resource["metadata"]["namespace"] = namespace
            for subject in resource.get("subjects", ()):
                subject["namespace"] = namespace
            pairs.append((resource, self.apply(resource)))
        return pairs

    def make_namespace(self, name: str) -> None:
        """A namespace, with what Kubernetes' controllers would put into it."""
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        data = {"ca.crt": self.ca.read_text()}
        metadata = {"name": "kube-root-ca.crt", "namespace": name}
        self.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})

    def get(self, kind: str, namespace: str, name: str) -> Object:
        """An object."""
        answer = self.http.get(path_of(kind, namespace, name))
        assert answer.status_code == 200, answer.text
        found: Object = answer.json()
        return found

    def items(self, kind: str, namespace: str) -> list[Object]:
        """All objects of a kind."""
        answer = self.http.get(path_of(kind, namespace))
        assert answer.status_code == 200, answer.text
        found: list[Object] = answer.json()["items"]
        return found

    def delete(self, kind: str, namespace: str, name: str) -> None:
        """Delete an object, which may be gone already."""
        answer = self.http.delete(path_of(kind, namespace, name))
        assert answer.status_code in (200, 202, 404), answer.text

    def token_of(self, account: str, namespace: str, expiration_s: int = 3607) -> str:
        """A new token of a service account, as the kubelet asks for one."""
        answer = self.http.post(
            path_of("ServiceAccount", namespace, account) + "/token",
            json={
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {"expirationSeconds": expiration_s},
            },
        )
        assert answer.status_code == 201, answer.text
        token: str = answer.json()["status"]["token"]
        return token

    def write_credentials(self, account: str, namespace: str, directory: Path) -> Path:
        """The credentials of a pod, in a directory as the kubelet makes it."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "token").write_text(self.token_of(account, namespace))
        (directory / "ca.crt").write_bytes(self.ca.read_bytes())
        (directory / "namespace").write_text(namespace)
        return directory

    def calls_of(self, account: str, namespace: str) -> list[Object]:
        """The calls of a service account for EndpointSlices, from the server's audit log."""
        user = f"system:serviceaccount:{namespace}:{account}"
        found = []
        for line in (self.directory / "audit.log").read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last line may be half written
                event = json.loads(line)
                if event["user"]["username"] == user:
                    found.append(event)
        return found


@contextlib.contextmanager
def real_cluster(directory: Path) -> Iterator[RealCluster]:
    """A running API server, ended with the block; skips the tests where there is none."""
    if not all((BUILT / name).exists() for name in ("kube-apiserver", "etcd", "etcdctl")):
        pytest.skip(MISSING)
    cluster = RealCluster(directory)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


_ENDPOINT_SLICES: Object = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "endpointslices.discovery.k8s.io",
        "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes/enhancements"},
    },
    "spec": {
        "group": "discovery.k8s.io",
        "scope": "Namespaced",
        "names": {"plural": "endpointslices", "singular": "endpointslice", "kind": "EndpointSlice"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}


class Gate:
    """The way from clients to a server, which can be cut, frozen and opened again. One event loop."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self._to_port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()

    async def start(self) -> Gate:
        """Listen, at the same port as before."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def cut(self) -> None:
        """Refuse connections, and break off those that there are."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.drop()
        self._open.set()
        await asyncio.gather(*self._tasks)

    def drop(self) -> None:
        """Break off all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    def freeze(self) -> None:
        """Accept connections and let no byte through, in either direction."""
        self._open.clear()

    def thaw(self) -> None:
        """Let through what has come meanwhile."""
        self._open.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # it was cut while the connection came
            writer.transport.abort()
            return
        self._writers.add(writer)
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._open.wait()
            onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            self._leave(writer)
            return
        self._writers.add(onward_writer)
        ways = [
            asyncio.create_task(self._pass_on(reader, onward_writer)),
            asyncio.create_task(self._pass_on(onward_reader, writer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        self._leave(writer)
        self._leave(onward_writer)

    def _leave(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(chunk)
                await writer.drain()


def endpoint_slice(name: str, namespace: str, service: str, endpoints: Sequence[Object], port: int) -> Object:
    """An EndpointSlice as the controller of Kubernetes writes it."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": namespace, "labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "endpoints": list(endpoints),
        "ports": [{"name": "grpc", "port": port, "protocol": "TCP"}],
    }


class SliceWriter:
    """Writes EndpointSlices of a namespace without a pause of the event loop."""

    def __init__(self, cluster: RealCluster, namespace: str) -> None:
        self._namespace = namespace
        self._known: set[str] = set()
        self._http = cluster.client()

    async def put(self, name: str, service: str, endpoints: Sequence[Object], port: int) -> None:
        """Make a slice, or change it."""
        one = endpoint_slice(name, self._namespace, service, endpoints, port)
        if name not in self._known:
            answer = await self._http.post(path_of("EndpointSlice", self._namespace), json=one)
            assert answer.status_code == 201, answer.text
            self._known.add(name)
            return
        answer = await self._http.patch(
            path_of("EndpointSlice", self._namespace, name),
            headers={"Content-Type": "application/merge-patch+json"},
            content=json.dumps(one),
        )
        assert answer.status_code == 200, answer.text

    async def delete(self, name: str) -> None:
        """Delete a slice."""
        answer = await self._http.delete(path_of("EndpointSlice", self._namespace, name))
        assert answer.status_code == 200, answer.text
        self._known.discard(name)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()
