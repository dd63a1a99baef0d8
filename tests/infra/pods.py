"""A small stand-in for the parts of Kubernetes that run pods: its controllers of Deployments, StatefulSets and
EndpointSlices, and a kubelet whose pods are processes of this machine.

What there should be is read from a real API server; pods appear in the EndpointSlices that are written there. Pods
start with their init containers, volumes, variables and service account's token, become ready by their probes, and end
by preStop, SIGTERM and, after their grace period, SIGKILL, as they are described.

Pods share this machine's files and network, so each has an address of its own on the loopback device, and the places at
which its volumes would be mounted are directories of its own: both are put into its command and variables.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.common import launch
from headrace.common.tasks import end_tasks
from tests.infra.cluster import MIN_READY_S, PROBE, Object, RealCluster, SliceWriter, path_of
from tests.patience import patience

_POLL_S = 0.25
_RECONCILE_S = 0.1
_RESTART_S = 1.0
_SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
# The variables of the image (Dockerfile).
_IMAGE = {"HEADRACE_CACHE": "/models", "PYTHONUNBUFFERED": "1"}
_TAIL_LINES = 30
_networks = itertools.count()


class Pod:
    """A pod of a workload, and its process."""

    def __init__(self, pods: Pods, name: str, owner: str, template: Object, uid: int) -> None:
        self.name = name
        self.owner = owner
        self.version = version_of(template)
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.spec: Object = template["spec"]
        self.ip = f"127.{pods.network}.{uid // 250}.{uid % 250 + 1}"
        self.uid = f"pod-{uid}"
        self.created_s = time.monotonic()
        self.ready_since_s: float | None = None
        self.is_terminating = False
        self.is_gone = False
        self.was_killed = False
        """Whether it has not ended within its grace period."""
        self.num_restarts = 0
        self.log: list[str] = []
        self._pods = pods
        self._directory = pods.directory / self.uid
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(self._live(), name=f"pod {name}")

    @property
    def container(self) -> Object:
        """Its only container."""
        (container,) = self.spec["containers"]
        found: Object = container
        return found

    @property
    def is_ready(self) -> bool:
        return self.ready_since_s is not None

    def is_available(self, min_ready_s: float) -> bool:
        """Whether it has been ready for so long."""
        return self.ready_since_s is not None and time.monotonic() - self.ready_since_s >= min_ready_s

    def delete(self) -> None:
        """Begin to end it."""
        if not self.is_terminating:
            self.is_terminating = True
            self._pods.changed()
            self._stopping.set()

    async def end(self) -> None:
        """End it by force."""
        await end_tasks(self._task)
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def __repr__(self) -> str:
        state = "terminating" if self.is_terminating else "ready" if self.is_ready else "not ready"
        return f"<{self.name} {self.container['image']} {state}>"

    def entry(self) -> Object:
        """What an EndpointSlice says of it."""
        return {
            "addresses": [self.ip],
            "conditions": {
                "ready": self.is_ready and not self.is_terminating,
                "serving": self.is_ready,
                "terminating": self.is_terminating,
            },
            "targetRef": {"kind": "Pod", "name": self.name, "uid": self.uid},
        }

    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(f"{self.name} ({self.ip}) | {line}" for line in self.log[-_TAIL_LINES:])

    # -- its life -------------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        try:
            volumes = {volume["name"]: self._volume(volume) for volume in self.spec.get("volumes", ())}
            volumes |= {name: self._pods.claim(self.name, name) for name in self._pods.claims_of(self.owner)}
            for container in self.spec.get("initContainers", ()):
                self._process = await self._start(container, volumes)
                status = await self._process.wait()
                assert status == 0, f"{container['name']} of {self.name} ends with {status}\n{self.tail()}"
            while not self._stopping.is_set():
                self._process = await self._start(self.container, volumes)
                await self._follow(self._process)
            await self._terminate()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._pods.failures.append(f"{self.name}: {error!r}")
        finally:
            self._set_ready(False)
            self.is_gone = True
            self._pods.changed()
            shutil.rmtree(self._directory, ignore_errors=True)
            shutil.rmtree(self._memory, ignore_errors=True)

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        """Probe the process until the pod is to end. Returns earlier if the process has ended or does not live, so that
        it is started anew."""
        probes = asyncio.create_task(self._probe())
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((probes, ended, stopping), return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                return
            self.num_restarts += 1
            self.log.append("restarted: it has ended" if ended.done() else "restarted: it does not live")
            self._set_ready(False)
            if not ended.done():
                process.kill()
            await ended
            await asyncio.sleep(_RESTART_S)
        finally:
            await end_tasks(probes, ended, stopping)

    async def _terminate(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        deadline_s = time.monotonic() + self.spec["terminationGracePeriodSeconds"]
        hook = self.container.get("lifecycle", {}).get("preStop", {}).get("exec")
        if hook is not None:
            before = await asyncio.create_subprocess_exec(*launch.with_parent(_found(hook["command"])))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    await before.wait()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(max(deadline_s - time.monotonic(), 2.0)):
                await process.wait()
        except TimeoutError:
            self.was_killed = True
            process.kill()
            await process.wait()

    def _set_ready(self, ready: bool) -> None:
        if ready != self.is_ready:
            self.ready_since_s = time.monotonic() if ready else None
            self._pods.changed()

    async def _start(self, container: Object, volumes: Mapping[str, Path]) -> asyncio.subprocess.Process:
        """Start a container's process, as the image's entry point would."""
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container.get("volumeMounts", ())}
        variables = {name: _with_mounts(value, mounts) for name, value in _IMAGE.items()}
        for variable in container.get("env", ()):
            value = self._value_of(variable)
            if value is not None:
                variables[variable["name"]] = _with_mounts(value, mounts)
        role, *flags = (_expanded(arg, variables) for arg in container["args"])
        flags = [_with_mounts(flag, mounts).replace("0.0.0.0", self.ip) for flag in flags]
        if _SERVICE_ACCOUNT in mounts:
            variables["HEADRACE_KUBERNETES_CREDENTIALS"] = str(mounts[_SERVICE_ACCOUNT])
        ours = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        process = await asyncio.create_subprocess_exec(
            *launch.with_parent([sys.executable, "-m", "headrace.cli", role, *flags]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**ours, **self._pods.environment, **variables},
        )
        reading = asyncio.create_task(self._read(process))
        self._pods.keep(reading)
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self.log.append(line.decode(errors="replace").rstrip("\n"))

    # -- volumes and variables ------------------------------------------------------------------------------------

    @property
    def _memory(self) -> Path:
        return Path("/dev/shm") / f"headrace-{self._pods.network}-{self.uid}"

    def _volume(self, volume: Object) -> Path:
        in_memory = volume.get("emptyDir", {}).get("medium") == "Memory"
        directory = self._memory if in_memory else self._directory / volume["name"]
        directory.mkdir(parents=True)
        if "secret" in volume:
            self._write(directory, self._secret(volume["secret"]["secretName"]))
        for source in volume.get("projected", {}).get("sources", ()):
            if "serviceAccountToken" in source:
                token = self._pods.cluster.token_of(
                    self.spec["serviceAccountName"],
                    self._pods.namespace,
                    source["serviceAccountToken"]["expirationSeconds"],
                )
                self._write(directory, {source["serviceAccountToken"]["path"]: token.encode()})
            elif "configMap" in source:
                found = self._pods.cluster.get("ConfigMap", self._pods.namespace, source["configMap"]["name"])
                items = source["configMap"]["items"]
                self._write(directory, {item["path"]: found["data"][item["key"]].encode() for item in items})
            else:
                for item in source["downwardAPI"]["items"]:
                    self._write(directory, {item["path"]: self._field(item["fieldRef"]["fieldPath"]).encode()})
        return directory

    def _write(self, directory: Path, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            (directory / name).write_bytes(content)
            (directory / name).chmod(0o440)

    def _secret(self, name: str) -> dict[str, bytes]:
        data = self._pods.cluster.get("Secret", self._pods.namespace, name)["data"]
        return {key: base64.b64decode(value) for key, value in data.items()}

    def _field(self, path: str) -> str:
        fields = {"metadata.name": self.name, "metadata.namespace": self._pods.namespace, "status.podIP": self.ip}
        return fields[path]

    def _value_of(self, variable: Object) -> str | None:
        """The value of a variable; None for one whose optional source is not there."""
        if "valueFrom" not in variable:
            return str(variable.get("value", ""))
        source = variable["valueFrom"]
        if "fieldRef" in source:
            return self._field(source["fieldRef"]["fieldPath"])
        if "configMapKeyRef" in source:
            key = source["configMapKeyRef"]
            found = self._pods.cluster.get("ConfigMap", self._pods.namespace, key["name"])
            return str(found["data"][key["key"]])
        key = source["secretKeyRef"]
        try:
            return self._secret(key["name"])[key["key"]].decode()
        except AssertionError:
            assert key.get("optional"), f"there is no secret {key['name']}"
            return None

    # -- probes ---------------------------------------------------------------------------------------------------

    async def _probe(self) -> None:
        """Probe until the process has to be started anew."""
        await self._until_probe(self.container["startupProbe"], until=True)
        liveness = asyncio.create_task(self._until_probe(self.container["livenessProbe"], until=False))
        try:
            probe = self.container["readinessProbe"]
            num_failures = 0
            while not liveness.done():
                if await self._succeeds(probe):
                    num_failures = 0
                    self._set_ready(True)
                else:
                    num_failures += 1
                    if num_failures >= probe["failureThreshold"]:
                        self._set_ready(False)
                await asyncio.wait((liveness,), timeout=probe["periodSeconds"])
        finally:
            await end_tasks(liveness)

    async def _until_probe(self, probe: Object, *, until: bool) -> None:
        """Probe until it succeeds (for a startup probe), or fails as often as it may."""
        num_failures = 0
        while num_failures < probe["failureThreshold"]:
            if await self._succeeds(probe):
                num_failures = 0
                if until:
                    return
            else:
                num_failures += 1
            await asyncio.sleep(probe["periodSeconds"])
        if until:
            await asyncio.Event().wait()  # a startup probe that fails is told by the pod's log and the test's bound

    async def _succeeds(self, probe: Object) -> bool:
        timeout_s = probe.get("timeoutSeconds", 1)
        if "httpGet" in probe:
            url = f"http://{self.ip}:{self._port(probe['httpGet']['port'])}{probe['httpGet']['path']}"
            try:
                return (await self._pods.http.get(url, timeout=timeout_s)).is_success
            except httpx.HTTPError:
                return False
        program, address, service = probe["exec"]["command"]
        assert program == PROBE, probe
        target = f"{self.ip}{address.removeprefix('-addr=')}"
        request = health_pb2.HealthCheckRequest(service=service.removeprefix("-service="))
        async with grpc.aio.insecure_channel(target) as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
            except grpc.aio.AioRpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _port(self, port: int | str) -> int:
        if isinstance(port, int):
            return port
        return next(int(one["containerPort"]) for one in self.container["ports"] if one["name"] == port)

    def port_of(self, service: Object) -> int:
        """The port of this pod to which a Service's first port leads."""
        first = service["spec"]["ports"][0]
        return self._port(first.get("targetPort", first["port"]))


class Pods:
    """The pods of a namespace. Use `pods_of`."""

    def __init__(self, cluster: RealCluster, namespace: str, directory: Path) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.directory = directory
        self.network = 40 + (os.getpid() + next(_networks)) % 200
        self.environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(cluster.port)}
        self.pods: list[Pod] = []
        self.ended: list[Pod] = []
        self.failures: list[str] = []
        self.http = httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
        self._objects: dict[str, list[Object]] = {"Deployment": [], "StatefulSet": [], "Service": []}
        self._api = cluster.client()
        self._writer = SliceWriter(cluster, namespace)
        self._written: dict[str, list[Object]] = {}
        self._routes: dict[str, list[tuple[float, list[str]]]] = {}  # service -> since when, addresses
        self._uids = itertools.count(1)
        self._changed = asyncio.Event()
        self._kept: set[asyncio.Task[None]] = set()
        self._tasks = [asyncio.create_task(self._run(part)) for part in (self._read, self._reconcile, self._publish)]

    def changed(self) -> None:
        """A pod has changed: the slices are written anew."""
        self._changed.set()

    def keep(self, task: asyncio.Task[None]) -> None:
        """Hold a task that ends by itself."""
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    def claim(self, pod: str, name: str) -> Path:
        """The directory of a volume claim, which outlives the pod."""
        directory = self.directory / f"{name}-{pod}"
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def claims_of(self, owner: str) -> list[str]:
        """The names of the volume claims of a workload's pods."""
        for one in self._objects["StatefulSet"]:
            if one["metadata"]["name"] == owner:
                return [claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())]
        return []

    @property
    def workloads(self) -> list[Object]:
        """The Deployments and StatefulSets that there should be."""
        return [*self._objects["Deployment"], *self._objects["StatefulSet"]]

    def of(self, owner: str) -> list[Pod]:
        """The pods of a workload."""
        return [pod for pod in self.pods if pod.owner == owner]

    def addresses(self, service: str, lag_s: float) -> list[str]:
        """Where a proxy sends connections to a Service that hears of its slices so much later."""
        routes = self._routes.get(service, [])
        heard = [addresses for since_s, addresses in routes if since_s <= time.monotonic() - lag_s]
        return heard[-1] if heard else []

    def is_rolled_out(self) -> bool:
        """Whether there are the pods that there should be, all available, and no others."""
        assert not self.failures, self.failures
        return bool(self.workloads) and all(
            len(pods := self.of(one["metadata"]["name"])) == one["spec"]["replicas"]
            and all(_is_current(pod, one) and pod.is_available(_min_ready_s(one)) for pod in pods)
            for one in self.workloads
        )

    async def until_rolled_out(self, image: str, bound_s: float) -> None:
        """Wait until what runs is what there should be, and has that image."""
        end_s = time.monotonic() + patience(bound_s)
        while not (self.is_rolled_out() and all(pod.container["image"] == image for pod in self.pods)):
            assert not any(pod.num_restarts for pod in self.pods), f"a process has ended\n{self.tail()}"
            assert time.monotonic() < end_s, f"not rolled out in time: {self.pods}\n{self.tail()}"
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """End all pods and all that runs them."""
        await end_tasks(*self._tasks)
        for pod in self.pods:
            await pod.end()
        await end_tasks(*self._kept)
        await self.http.aclose()
        await self._api.aclose()
        await self._writer.close()

    def tail(self) -> str:
        """The end of the logs of all pods."""
        return "\n".join(pod.tail() for pod in (*self.ended, *self.pods))

    async def _run(self, part: Any) -> None:
        try:
            await part()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.failures.append(repr(error))
            raise

    async def _read(self) -> None:
        """Read what there should be, again and again."""
        while True:
            for kind in self._objects:
                answer = await self._api.get(path_of(kind, self.namespace))
                assert answer.status_code == 200, answer.text
                self._objects[kind] = answer.json()["items"]
            await asyncio.sleep(_POLL_S)

    # -- controllers ----------------------------------------------------------------------------------------------

    async def _reconcile(self) -> None:
        while True:
            for gone in [pod for pod in self.pods if pod.is_gone]:
                self.pods.remove(gone)
                self.ended.append(gone)
            for deployment in self._objects["Deployment"]:
                self._reconcile_deployment(deployment)
            for stateful in self._objects["StatefulSet"]:
                self._reconcile_stateful_set(stateful)
            await asyncio.sleep(_RECONCILE_S)

    def _reconcile_deployment(self, deployment: Object) -> None:
        """Replace old pods by new ones, with at most maxSurge more and maxUnavailable fewer than there should be."""
        name, spec = deployment["metadata"]["name"], deployment["spec"]
        bounds = spec["strategy"]["rollingUpdate"]
        living = [pod for pod in self.of(name) if not pod.is_terminating]
        new = [pod for pod in living if _is_current(pod, deployment)]
        old = sorted((pod for pod in living if pod not in new), key=lambda pod: (pod.is_ready, pod.created_s))
        for _ in range(min(spec["replicas"] - len(new), spec["replicas"] + bounds["maxSurge"] - len(living))):
            self._make(f"{name}-{version_of(spec['template'])[:6]}-{next(self._uids)}", deployment)
        num_available = sum(pod.is_available(_min_ready_s(deployment)) for pod in living)
        for pod in [*old, *new[spec["replicas"] :]]:
            is_needed = pod.is_available(_min_ready_s(deployment))
            if not is_needed or num_available - 1 >= spec["replicas"] - bounds["maxUnavailable"]:
                num_available -= is_needed
                pod.delete()

    def _reconcile_stateful_set(self, stateful: Object) -> None:
        """All missing pods at once (podManagementPolicy: Parallel); updates one after the other, the last one first."""
        name, spec = stateful["metadata"]["name"], stateful["spec"]
        pods = {pod.name: pod for pod in self.of(name)}
        names = [f"{name}-{ordinal}" for ordinal in range(spec["replicas"])]
        for missing in (one for one in names if one not in pods):
            self._make(missing, stateful)
        for one in set(pods) - set(names):
            pods[one].delete()
        for one in reversed(names):
            pod = pods.get(one)
            if pod is None or pod.is_terminating:
                return
            if not _is_current(pod, stateful):
                pod.delete()
                return
            if not pod.is_available(_min_ready_s(stateful)):
                return

    def _make(self, name: str, workload: Object) -> None:
        template = workload["spec"]["template"]
        self.pods.append(Pod(self, name, workload["metadata"]["name"], template, next(self._uids)))
        self.changed()

    async def _publish(self) -> None:
        """Write the slices of all Services whose pods have changed."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._changed.wait()
            self._changed.clear()
            for service in self._objects["Service"]:
                selector = service["spec"].get("selector", {}).items()
                pods = [pod for pod in self.pods if selector <= pod.labels.items() and not pod.is_gone]
                name = service["metadata"]["name"]
                entries = [pod.entry() for pod in pods]
                if pods and entries != self._written.get(name):
                    await self._writer.put(f"{name}-1", name, entries, pods[0].port_of(service))
                    self._written[name] = entries
                    ready = [pod.ip for pod in pods if pod.is_ready and not pod.is_terminating]
                    addresses = [f"{ip}:{pods[0].port_of(service)}" for ip in ready]
                    self._routes.setdefault(name, []).append((time.monotonic(), addresses))


def version_of(template: Object) -> str:
    """A hash of a pod template."""
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()


def _is_current(pod: Pod, workload: Object) -> bool:
    return pod.version == version_of(workload["spec"]["template"]) and not pod.is_terminating


def _min_ready_s(workload: Object) -> float:
    annotations = workload["metadata"].get("annotations", {})
    return float(workload["spec"].get("minReadySeconds") or annotations.get(MIN_READY_S, 0))


def _found(command: Sequence[str]) -> list[str]:
    """The command with the path of its program."""
    return [shutil.which(command[0]) or command[0], *command[1:]]


def _with_mounts(value: str, mounts: Mapping[str, Path]) -> str:
    """A value in which the mount points are the directories that stand for them."""
    points = "|".join(re.escape(point) for point in sorted(mounts, key=len, reverse=True))
    return re.sub(rf"(^|=)({points})(?=/|$)", lambda found: f"{found[1]}{mounts[found[2]]}", value) if points else value


def _expanded(arg: str, variables: Mapping[str, str]) -> str:
    """An argument in which $(NAME) is the value of that variable, if there is one."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), arg)


@contextlib.asynccontextmanager
async def pods_of(cluster: RealCluster, namespace: str, directory: Path) -> AsyncIterator[Pods]:
    """Run the pods of a namespace inside. Prints the end of their logs, which pytest shows if the test has failed."""
    pods = Pods(cluster, namespace, directory)
    try:
        yield pods
    finally:
        print(pods.tail())
        await pods.close()
