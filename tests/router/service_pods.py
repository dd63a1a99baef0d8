"""The pods of a Service, and the API server that tells routers of them: a scripted one, or a real one behind a gate."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Protocol

from tests.api_server import ApiServer, Pod
from tests.deploy.kustomization import Resource
from tests.infra.cluster import Gate, RealCluster, SliceWriter
from tests.ports import free_port
from tests.router.fake_worker import FakeWorker

_SERVICE = "worker"
ACCOUNT = "headrace-membership"
_numbers = itertools.count(1)


class SliceServer(Protocol):
    """An API server with the slices of one Service, whose faults tests choose."""

    namespace: str
    credentials: Path

    @property
    def url(self) -> str:
        """Where a router finds it."""

    async def tell(self, name: str, pods: Sequence[Pod], port: int) -> None:
        """Make a slice of the Service, or change it."""

    async def drop(self) -> None:
        """Break off all connections."""

    async def move_on(self) -> None:
        """Move to a newer version without a change of the Service."""

    async def freeze(self) -> None:
        """Let connections live, and answer nothing, until `thaw`."""

    async def thaw(self) -> None:
        """Answer what has been asked meanwhile."""

    async def cut(self) -> None:
        """Be unreachable until `open`."""

    async def open(self) -> None:
        """Be reachable."""

    async def forget(self) -> None:
        """Have no more of the versions from before."""

    async def forbid(self) -> None:
        """Take the right to watch from routers, until `allow`."""

    async def allow(self) -> None:
        """Give it back."""

    async def close(self) -> None:
        """End."""


class ScriptedSlices:
    """See `SliceServer`."""

    def __init__(self, server: ApiServer, credentials: Path) -> None:
        self.namespace = server.namespace
        self.credentials = credentials
        self._server = server

    @property
    def url(self) -> str:
        return self._server.url

    async def tell(self, name: str, pods: Sequence[Pod], port: int) -> None:
        self._server.put(name, pods, service=_SERVICE)

    async def drop(self) -> None:
        self._server.drop()

    async def move_on(self) -> None:
        self._server.bookmark()

    async def freeze(self) -> None:
        self._server.is_frozen = True

    async def thaw(self) -> None:
        self._server.is_frozen = False

    async def cut(self) -> None:
        await self._server.stop()

    async def open(self) -> None:
        await self._server.start()

    async def forget(self) -> None:
        await self.move_on()
        self._server.compact()

    async def forbid(self) -> None:
        self._server.status = (403, {})

    async def allow(self) -> None:
        self._server.status = None

    async def close(self) -> None:
        await self._server.stop()


class RealSlices:
    """See `SliceServer`. A namespace of its own, with the service account and the rights of the chart, whose objects
    are `rights`. Routers reach the server through a gate, which TLS passes."""

    def __init__(self, cluster: RealCluster, directory: Path, rights: Sequence[Resource]) -> None:
        self.namespace = f"fleet-{next(_numbers)}"
        self.num_restarts = 0
        self._cluster = cluster
        self._writer = SliceWriter(cluster, self.namespace)
        self._gate = Gate(cluster.port)
        self._others = itertools.count()
        cluster.make_namespace(self.namespace)
        applied = [sent for sent, _ in cluster.apply_all(rights, self.namespace)]
        (self._binding,) = (resource for resource in applied if resource["kind"] == "RoleBinding")
        self.credentials = cluster.write_credentials(ACCOUNT, self.namespace, directory / "credentials")

    async def start(self) -> RealSlices:
        """Open the gate."""
        await self._gate.start()
        return self

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._gate.port}"

    async def tell(self, name: str, pods: Sequence[Pod], port: int) -> None:
        await self._writer.put(name, _SERVICE, [pod.entry() for pod in pods], port)

    async def drop(self) -> None:
        self._gate.drop()

    async def move_on(self) -> None:
        await self._writer.put("other", "another", [Pod("x", f"10.0.0.{next(self._others) % 250}").entry()], 1)

    async def freeze(self) -> None:
        self._gate.freeze()

    async def thaw(self) -> None:
        self._gate.thaw()

    async def cut(self) -> None:
        await self._gate.cut()

    async def open(self) -> None:
        await self._gate.start()

    async def forget(self) -> None:
        self.num_restarts += 1
        await self.move_on()
        await self._cluster.restart_without_history()

    async def forbid(self) -> None:
        self._cluster.delete("RoleBinding", self.namespace, self._binding["metadata"]["name"])

    async def allow(self) -> None:
        self._cluster.apply(self._binding)

    async def close(self) -> None:
        await self._gate.cut()
        await self._writer.close()


class WorkerPods:
    """Fake workers as the pods of a Service: each at a loopback address of its own, all at one port."""

    def __init__(self, server: SliceServer) -> None:
        self.port = free_port()
        self.server = server
        self.service = f"kubernetes:///{_SERVICE}.{server.namespace}:{self.port}"
        self.workers: dict[str, FakeWorker] = {}
        self.pods: dict[str, Pod] = {}
        self.num_started = 0

    async def add(self, *, ready: bool = True, token_s: float = 0.0) -> str:
        self.num_started += 1
        name = f"w{self.num_started}"
        ip = f"127.{1 + self.num_started // 60_000}.{self.num_started // 250 % 240}.{1 + self.num_started % 250}"
        worker = FakeWorker(name)
        worker.token_s = token_s
        self.workers[name] = await worker.start(f"{ip}:{self.port}")
        self.pods[name] = Pod(name, ip, ready=ready)
        await self.tell()
        return name

    async def change(self, name: str, *, ready: bool = True, terminating: bool = False) -> None:
        self.pods[name] = Pod(name, self.pods[name].ip, ready=ready, terminating=terminating)
        await self.tell()

    async def forget(self, name: str) -> None:
        """The pod has left the Service. Its process may still run."""
        del self.pods[name]
        await self.tell()

    async def end(self, name: str) -> None:
        """The pod is gone, and its process."""
        await self.forget(name)
        await self.workers.pop(name).kill()

    async def tell(self) -> None:
        """Two slices, as the controller makes of many pods."""
        pods = list(self.pods.values())
        await self.server.tell("one", pods[::2], self.port)
        await self.server.tell("two", pods[1::2], self.port)

    @property
    def ready(self) -> set[str]:
        return {name for name, pod in self.pods.items() if pod.ready and not pod.terminating}

    async def close(self) -> None:
        for worker in self.workers.values():
            await worker.kill()
        await self.server.close()


@contextlib.asynccontextmanager
async def frozen(server: SliceServer) -> AsyncIterator[None]:
    """The server answers nothing inside."""
    await server.freeze()
    try:
        yield
    finally:
        await server.thaw()


@contextlib.asynccontextmanager
async def away(server: SliceServer) -> AsyncIterator[None]:
    """The server cannot be reached inside."""
    await server.cut()
    try:
        yield
    finally:
        await server.open()
