"""The actors that Ray Serve runs: workers, gateways with their routers, and the directory by which they find each
other.

Worker       one for each worker: claims NUMA nodes, and owns the process that computes there
Front        one for each gateway: owns a gateway and a router, and passes on what comes through Serve's own proxies
Fleet        one: the directory
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from headrace.cli.fleet.http_probe import http_status
from headrace.cli.hosting.finding import find_model
from headrace.common.commands import CommandError
from headrace.common.ports import chosen_port, free_port
from headrace.common.tasks import end_tasks
from headrace.common.transport.channels import Transport
from headrace.protos import router_pb2, router_pb2_grpc
from headrace.ray import commands, directory, nodes, places
from headrace.ray.processes import Processes, end_without_raylet, grpc_serves
from headrace.ray.settings import ROUTER_DRAIN_S, Fleet, Model, workers_of
from headrace.ray.signals import Signal, signals_of
from headrace.worker.server.registration import Registration

log = logging.getLogger("ray.serve")

# How long an actor waits for an answer of the directory, which may be on a node that was just lost.
_MEET_TIMEOUT_S = 5.0
_ASK_TIMEOUT_S = 2.0
_CLAIM_POLL_S = 0.2
# A new gateway waits this long for a model before it is told to clients.
_FIRST_MODEL_S = 15.0
# Of a hop, which the gateway's own answers and headers replace.
_HOP_HEADERS = frozenset({"connection", "keep-alive", "transfer-encoding", "upgrade", "host", "content-length"})


class Directory:
    """The actor of `directory.Directory`."""

    def __init__(self) -> None:
        self._members = directory.Directory()

    async def meet(self, member: directory.Member) -> list[directory.Front]:
        """See `directory.Directory.meet`."""
        return self._members.meet(member)

    async def leave(self, member_id: str) -> None:
        """See `directory.Directory.leave`."""
        self._members.leave(member_id)

    async def members(self) -> list[directory.Member]:
        """See `directory.Directory.members`."""
        return self._members.members()


class Worker:
    """One worker of a model, on the NUMA nodes that it claims."""

    _processes: Processes | None
    _claim: places.Claim | None

    async def __init__(  # type: ignore[misc]
        self, fleet: Fleet, model: Model, handle: Any
    ) -> None:
        """Load the model, and return when the worker serves. `handle` is that of the directory. Raises RuntimeError,
        which says why it cannot."""
        self._begin(fleet, handle)
        try:
            self._node = await asyncio.to_thread(nodes.this_node, model.resource)
            found = await self._find(model)
            where = nodes.places_of(max(self._node.num_places, model.num_places))
            self._claim = await self._claimed(where, model.num_places)
            ports = (free_port(self._node.host), free_port(self._node.host))
            spec = commands.worker_spec(fleet, model, found, self._node, self._claim, where, ports)
            self._name = model.name or found[1]
            self._address, self._metrics = spec.address, self._node.at(ports[1])
            self._processes = Processes([spec], fleet.worker_drain_s)
            self._processes.start()
            await self._processes.until(lambda: grpc_serves(spec.address, self._transport))
        except BaseException as error:
            await self.close()
            if isinstance(error, CommandError):
                raise RuntimeError(error.format_message()) from None
            raise
        self._tasks.append(asyncio.create_task(self._keep_known(), name="registration"))

    def _begin(self, fleet: Fleet, handle: Any) -> None:
        """Set what `close` needs, so that it works even if loading fails."""
        self._handle = handle
        self._member_id = serve.get_replica_context().replica_id.unique_id
        self._transport = _transport_of(fleet)
        self._processes = None
        self._claim = None
        self._registrations: dict[str, Registration] = {}
        self._signal: dict[str, float] = {}
        self._is_closing = False
        self._tasks: list[asyncio.Task[None]] = [asyncio.create_task(end_without_raylet(self.close))]

    async def _find(self, model: Model) -> tuple[Path, str]:
        return await asyncio.to_thread(find_model, model.model, num_workers=max(1, self._node.num_places))

    async def _claimed(self, where: Any, count: int) -> places.Claim:
        """Wait for free places: the worker that had them may still be ending."""
        locks = places.lock_directory(self._node.name)
        since_s, is_told = time.monotonic(), False
        while (claim := places.claim_places(where, count, locks)) is None:
            if not is_told and time.monotonic() - since_s > _FIRST_MODEL_S:
                log.warning("waits for %d of the %d places of %s", count, len(where), self._node.name)
                is_told = True
            await asyncio.sleep(_CLAIM_POLL_S)
        log.info("has the places %s of %s, CPUs %s", claim.numbers, self._node.name, claim.cpus)
        return claim

    async def check_health(self) -> None:
        """Raise ProcessesError if Ray should replace this worker."""
        if self._processes is not None:
            self._processes.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The scaling signal of the model, as routers see it. Every worker reports the same."""
        return dict(self._signal)

    async def awaken(self) -> None:
        """Return at once. Ray Serve starts a worker for the call if there is none."""

    async def close(self) -> None:
        """Drain the worker, and give its places back."""
        self._is_closing = True
        if self._processes is not None:
            await self._processes.stop()
        await end_tasks(*(task for task in self._tasks if task is not asyncio.current_task()))
        await asyncio.gather(*(registration.close() for registration in self._registrations.values()))
        self._registrations.clear()
        if self._claim is not None:
            self._claim.release()
        await _leave(self._handle, self._member_id)

    async def __del__(self) -> None:
        """Close the worker. Ray Serve calls this before it ends the replica."""
        if not self._is_closing:
            await self.close()

    async def _keep_known(self) -> None:
        """Keep the worker registered with every router of the fleet."""
        routers = directory.KnownRouters()
        while True:
            fronts = await _met(self._handle, self._member())
            if fronts is not None:
                self._signal = dict(directory.merged(fronts, self._name))
                await self._register(routers.listed((front.router for front in fronts), time.monotonic()))
            await asyncio.sleep(directory.PERIOD_S)

    async def _register(self, wanted: set[str]) -> None:
        assert self._claim is not None
        for address in wanted - self._registrations.keys():
            name = commands.worker_id(self._node, self._claim)
            self._registrations[address] = Registration(address, name, self._address, self._transport)
        for address in self._registrations.keys() - wanted:
            await self._registrations.pop(address).close()

    def _member(self) -> directory.WorkerMember:
        assert self._claim is not None
        assert self._processes is not None
        process = self._processes.first
        return directory.WorkerMember(
            self._member_id,
            node=self._node.name,
            model=self._name,
            worker_id=commands.worker_id(self._node, self._claim),
            address=self._address,
            metrics=self._metrics,
            numa_nodes=tuple(sorted({place.node for place in self._claim.places})),
            cpus=self._claim.cpus,
            pid=process.pid,
            restarts=process.num_restarts,
            is_draining=self._is_closing,
        )


class Front:
    """A gateway with its router: what clients reach, at the gateway's own port or through Serve's proxies."""

    async def __init__(  # type: ignore[misc]
        self, fleet: Fleet, handle: Any, *workers: Any
    ) -> None:
        """Return when the gateway answers. `workers` are the handles of the models' deployments, which belong to the
        application because they are named here. Raises RuntimeError with a sentence that says why it cannot."""
        self._handle = handle
        self._awakening = Awakening({one.deployment_name: one for one in workers})
        self._member_id = serve.get_replica_context().replica_id.unique_id
        self._transport = _transport_of(fleet)
        self._processes: Processes | None = None
        self._is_closing = False
        self._tasks: list[asyncio.Task[None]] = [asyncio.create_task(end_without_raylet(self.close))]
        try:
            await self._start(fleet)
        except BaseException as error:
            await self.close()
            if isinstance(error, CommandError):
                raise RuntimeError(error.format_message()) from None
            raise
        self._tasks.append(asyncio.create_task(self._keep_known(), name="directory"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_MODEL_S):
                await self._until(200)

    async def _start(self, fleet: Fleet) -> None:
        self._node = await asyncio.to_thread(nodes.this_node, "")
        host = commands.gateway_host(fleet, self._node)
        ports = (chosen_port(host, fleet.port), free_port(self._node.host), free_port(self._node.host))
        gateway, router = commands.front_specs(fleet, self._node, ports)
        self._url, self._router, self._metrics = gateway.address, router.address, self._node.at(ports[2])
        self._client = httpx.AsyncClient(
            base_url=self._url,
            timeout=httpx.Timeout(None, connect=_ASK_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
            verify=False,
        )
        self._processes = Processes([gateway, router], fleet.gateway_drain_s + ROUTER_DRAIN_S)
        self._processes.start()
        await self._processes.until(lambda: grpc_serves(router.address, self._transport))
        await self._until()

    async def _until(self, status: int | None = None) -> None:
        """Wait until the gateway answers a readiness request; with `status`, until it answers with this status."""
        parts = httpx.URL(self._url)

        async def answers() -> bool:
            found = await http_status(parts.host, parts.port or 80, "/health/ready", scheme=parts.scheme)
            return found is not None and status in (None, found)

        assert self._processes is not None
        await self._processes.until(answers)

    async def __call__(self, request: Request) -> StreamingResponse:
        """Pass a request of one of Serve's proxies on to the gateway, and its answer back, as they come."""
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "").rstrip("/")) or "/"
        query = request.scope["query_string"].decode("latin-1")
        headers = [(name, value) for name, value in request.headers.items() if name not in _HOP_HEADERS]
        asked = self._client.build_request(
            request.method,
            f"{path}?{query}" if query else path,
            headers=headers,
            content=await request.body(),
        )
        answer = await self._client.send(asked, stream=True)
        kept = {name: value for name, value in answer.headers.items() if name not in _HOP_HEADERS}
        return StreamingResponse(_passed_on(answer), answer.status_code, kept)

    async def check_health(self) -> None:
        """Raise ProcessesError if Ray should replace this gateway."""
        if self._processes is not None:
            self._processes.check()

    async def close(self) -> None:
        """Finish the running answers, and stop."""
        self._is_closing = True
        if self._processes is not None:
            await self._processes.stop()
            await self._client.aclose()
        await self._awakening.close()
        await end_tasks(*(task for task in self._tasks if task is not asyncio.current_task()))
        await _leave(self._handle, self._member_id)

    async def __del__(self) -> None:
        """Close the gateway. Ray Serve calls this before it ends the replica."""
        if not self._is_closing:
            await self.close()

    async def _keep_known(self) -> None:
        """Report this gateway and its router to the directory, with the load of the models that the router knows."""
        channel = self._transport.channel(self._router)
        stub: Any = router_pb2_grpc.RouterStub(channel)
        try:
            while True:
                signals: dict[str, Signal] = {}
                with contextlib.suppress(grpc.RpcError):
                    listed = await stub.ListScalingSignals(
                        router_pb2.ListScalingSignalsRequest(), timeout=_ASK_TIMEOUT_S
                    )
                    signals = signals_of(listed.signals)
                    await self._awakening.follow(signals)
                member = directory.Front(
                    self._member_id, self._node.name, self._url, self._router, self._metrics, signals
                )
                await _met(self._handle, member)
                await asyncio.sleep(directory.PERIOD_S)
        finally:
            await channel.close()


class Awakening:
    """Calls for the first worker of each requested model that has none. Ray Serve's own scaling starts a worker for a
    waiting call; until then, requests wait at the router. For one event loop."""

    def __init__(self, workers: Mapping[str, Any]) -> None:
        """`workers`: the handle of each deployment of workers, by its name."""
        self._workers = workers
        self._calls: dict[str, asyncio.Task[None]] = {}

    async def follow(self, signals: Mapping[str, Signal]) -> None:
        """Call for the workers that are missing now, and end the calls for others."""
        missing = {
            workers_of(model)
            for model, signal in signals.items()
            if signal["workers"] < 1 <= signal["workers_wanted"] and workers_of(model) in self._workers
        }
        self._calls = {name: call for name, call in self._calls.items() if not call.done()}
        for name in missing - self._calls.keys():
            self._calls[name] = asyncio.create_task(self._call(name), name=f"awakening {name}")
        await end_tasks(*(self._calls.pop(name) for name in self._calls.keys() - missing))

    async def close(self) -> None:
        """End all calls."""
        await self.follow({})

    async def _call(self, name: str) -> None:
        log.info("%s: a request waits for the first worker", name)
        response = self._workers[name].awaken.remote()
        try:
            await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as error:  # of Ray, which has many; the next period calls again
            log.info("%s: %s", name, str(error).partition("\n")[0] or type(error).__name__)


async def _passed_on(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()


async def _met(handle: Any, member: directory.Member) -> list[directory.Front] | None:
    """Report a member to the directory. Returns the directory's answer; None if it does not answer, for example while
    Ray replaces it."""
    found: list[directory.Front] | None = await _asked(lambda: handle.meet.remote(member))
    return found


async def _leave(handle: Any, member_id: str) -> None:
    await _asked(lambda: handle.leave.remote(member_id))


async def _asked(call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        async with asyncio.timeout(_MEET_TIMEOUT_S):
            return await call()
    except Exception as error:  # of Ray, which has many; the next period asks again
        log.info("the directory does not answer: %s", str(error).partition("\n")[0] or type(error).__name__)
        return None


def _transport_of(fleet: Fleet) -> Transport:
    files = (fleet.tls_dir, fleet.join_token_file)
    tls_dir, token = (None if file is None else Path(file) for file in files)
    return Transport(tls_dir, token)
