"""A router that finds its workers by the slices of a Service: a real router, fake workers, a scripted API server.

HEADRACE_SOAK=1 makes the changes last ten minutes; `python -m tests.soak kubernetes` does that.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from headrace.common.kubernetes.cluster import Cluster
from headrace.common.kubernetes.services import Condition, Endpoint
from headrace.protos import router_pb2
from headrace.router.fleet.links import LinkState
from headrace.router.fleet.registry import Member, Registry, ServicePods
from tests.api_server import ApiServer, Pod
from tests.patience import patience
from tests.ports import free_port
from tests.router.conftest import RunningRouter, StartRouter, collected
from tests.router.fake_worker import FakeWorker, answer, until
from tests.router.test_service import health_of

SOAK = os.environ.get("HEADRACE_SOAK") == "1"
PROMPT = [5, 6, 7, 8, 9]


class Pods:
    """Fake workers as the pods of a Service: each at a loopback address of its own, all at one port."""

    def __init__(self, server: ApiServer) -> None:
        self.port = free_port()
        self.server = server
        self.service = f"kubernetes:///worker.fleet:{self.port}"
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
        self.tell()
        return name

    def change(self, name: str, *, ready: bool = True, terminating: bool = False) -> None:
        self.pods[name] = Pod(name, self.pods[name].ip, ready=ready, terminating=terminating)
        self.tell()

    def forget(self, name: str) -> None:
        """The pod has left the Service. Its process may still run."""
        del self.pods[name]
        self.tell()

    async def end(self, name: str) -> None:
        """The pod is gone, and its process."""
        self.forget(name)
        await self.workers.pop(name).kill()

    def tell(self) -> None:
        """Two slices, as the controller makes of many pods."""
        pods = list(self.pods.values())
        self.server.put("one", pods[::2])
        self.server.put("two", pods[1::2])

    @property
    def ready(self) -> set[str]:
        return {name for name, pod in self.pods.items() if pod.ready and not pod.terminating}


@pytest.fixture
async def pods() -> AsyncIterator[Pods]:
    made = Pods(await ApiServer().start())
    yield made
    for worker in made.workers.values():
        await worker.kill()
    await made.server.stop()


Start = Callable[[], Awaitable[RunningRouter]]


@pytest.fixture
def start(pods: Pods, start_router: StartRouter, tmp_path: Path) -> Start:
    """Start a router that follows the Service."""

    async def started() -> RunningRouter:
        router: RunningRouter = await start_router(services=[pods.service], cluster=Cluster(pods.server.url, tmp_path))
        return router

    return started


def takers(router: RunningRouter) -> set[str]:
    return {link.worker_id for link in router.fleet.links() if link.is_ready}


async def until_takers(router: RunningRouter, *names: str) -> None:
    await until(lambda: takers(router) == set(names))


async def test_workers_are_found_by_their_pods_and_forgotten_with_them(pods: Pods, start: Start) -> None:
    first = await pods.add()
    router = await start()
    await until_takers(router, first)
    second = await pods.add()
    await until_takers(router, first, second)
    assert await router.generate(PROMPT) == await router.generate(PROMPT)
    await pods.end(first)
    await until(lambda: [link.worker_id for link in router.fleet.links()] == [second])
    await router.until_idle()


async def test_a_pod_that_is_not_ready_gets_no_new_requests_and_keeps_its_streams(pods: Pods, start: Start) -> None:
    name = await pods.add()
    router = await start()
    await until_takers(router, name)
    pods.workers[name].budget = 3
    call = router.call(PROMPT)
    await until(lambda: pods.workers[name].is_stuck)
    other = await pods.add()
    await until_takers(router, name, other)
    pods.change(name, ready=False)
    await until_takers(router, other)
    (info,) = [info for info in router.fleet.workers() if info.worker_id == name]
    assert (info.state, info.detail) == (router_pb2.WORKER_STATE_SUSPECT, "its pod is not ready")
    num_before = len(pods.workers[name].requests)
    for _ in range(5):
        await router.generate(PROMPT)
    assert len(pods.workers[name].requests) == num_before
    pods.workers[name].budget = None
    assert (await collected(call))[0] == answer(PROMPT, 20)
    pods.change(name)
    await until_takers(router, name, other)


async def test_a_terminating_pod_keeps_its_streams_even_when_it_has_left_the_service(pods: Pods, start: Start) -> None:
    name = await pods.add()
    router = await start()
    await until_takers(router, name)
    pods.workers[name].budget = 3
    call = router.call(PROMPT)
    await until(lambda: pods.workers[name].is_stuck)
    other = await pods.add()
    pods.change(name, terminating=True)
    await until_takers(router, other)
    pods.workers[name].report(draining=True)
    await until(lambda: {link.state for link in router.fleet.links()} == {LinkState.READY, LinkState.DRAINING})
    pods.forget(name)
    await until(lambda: [link.worker_id for link in router.fleet.links()] == [other])
    assert router.fleet.num_in_flight == 1
    pods.workers[name].budget = None
    assert (await collected(call))[0] == answer(PROMPT, 20)
    assert pods.workers[other].requests == [], "the stream did not move"
    await router.until_idle()


async def test_while_no_pod_is_ready_the_workers_speak_for_themselves(pods: Pods, start: Start) -> None:
    """A cluster that has lost its nodes from sight calls every pod not ready."""
    names = [await pods.add(), await pods.add()]
    router = await start()
    await until_takers(router, *names)
    pods.change(names[0], ready=False)
    await until_takers(router, names[1])
    pods.change(names[1], ready=False)
    await until_takers(router, *names)
    pods.change(names[0])
    await until_takers(router, names[0])


async def test_while_the_api_server_is_away_the_fleet_goes_on(pods: Pods, start: Start) -> None:
    names = [await pods.add(), await pods.add()]
    router = await start()
    await until_takers(router, *names)
    await pods.server.stop()
    assert router.services is not None
    await until(lambda: _value(router, "headrace_router_service_watch_up", service="worker") == 0.0)
    assert (await router.generate(PROMPT))[0] == answer(PROMPT, 20)
    await pods.workers[names[0]].kill()
    await until_takers(router, names[1])
    assert (await router.generate(PROMPT))[0] == answer(PROMPT, 20)
    await pods.workers[names[0]].restart()
    await until_takers(router, *names)
    pods.forget(names[0])
    await pods.server.start()
    await until_takers(router, names[1])
    assert _value(router, "headrace_router_service_watch_up", service="worker") == 1.0
    assert _value(router, "headrace_router_service_pods", service="worker", condition="ready") == 1.0
    ends = _value(router, "headrace_router_service_watch_ends_total", service="worker", reason="unreachable")
    assert ends is not None
    assert ends >= 1


def _value(router: RunningRouter, name: str, **labels: str) -> float | None:
    return router.metrics.registry.get_sample_value(name, labels)


async def test_a_router_is_healthy_at_once_and_ready_when_it_knows_its_pods(pods: Pods, start: Start) -> None:
    """So that a new router replaces an old one only when it knows what the old one knew."""
    pods.server.status = (403, {})
    router = await start()
    assert await health_of(router, "") == "SERVING"
    assert await health_of(router, "headrace.v1.Router") == "NOT_SERVING"
    pods.server.status = None
    async with asyncio.timeout(patience(20)):
        while await health_of(router, "headrace.v1.Router") != "SERVING":
            await asyncio.sleep(0.01)


def test_pods_beyond_the_bound_are_left_out_and_those_that_are_ready_come_first() -> None:
    registry = Registry(max_workers=2)
    ready = [Endpoint(f"10.0.0.{number}:1", f"w{number}", Condition.READY) for number in (3, 2)]
    waiting = Endpoint("10.0.0.1:1", "w1", Condition.NOT_READY)
    assert registry.services.seen("s", {one.address: one for one in (waiting, *ready)}) == set()
    assert set(registry.members()) == {"10.0.0.2:1", "10.0.0.3:1"}
    assert registry.services.num_left_out == 1


def test_a_pod_that_two_services_have_leaves_with_the_second() -> None:
    services = ServicePods(10)
    pod = Endpoint("10.0.0.1:1", "w", Condition.READY)
    for service in ("a", "b"):
        services.seen(service, {pod.address: pod})
    assert services.seen("a", {}) == set()
    assert services.seen("b", {}) == {"10.0.0.1:1"}


def test_the_condition_of_a_pod_applies_to_a_worker_that_has_registered_as_well() -> None:
    registry = Registry()
    pods = [
        Endpoint("10.0.0.1:1", "pod-1", Condition.TERMINATING),
        Endpoint("10.0.0.2:1", "pod-2", Condition.READY),
    ]
    registry.services.seen("s", {one.address: one for one in pods})
    registry.register("w1", "10.0.0.1:1", now_s=0.0)
    assert registry.members()["10.0.0.1:1"] == Member("10.0.0.1:1", "w1", "its pod is terminating")
    assert registry.members()["10.0.0.2:1"] == Member("10.0.0.2:1", "pod-2", "")


class Churn:
    """Random changes of the pods of a Service, and faults of its API server, under clients that check every answer."""

    def __init__(self, pods: Pods, router: RunningRouter, rng: random.Random) -> None:
        self.pods = pods
        self.router = router
        self.rng = rng
        self.lags_s: list[float] = []
        self.num_answers = 0
        self._is_over = False

    async def run(self, num_changes: int, interval_s: float, bound_s: Callable[[], float]) -> None:
        """Make the changes, each when the membership is right after the last one and `interval_s` have passed. Fails
        if it is not right within `bound_s()`, or a request is lost."""
        clients = [asyncio.create_task(self._client(number)) for number in range(6)]
        for _ in range(4):
            await self.pods.add(token_s=0.002)
        for _ in range(num_changes):
            began_s = time.monotonic()
            await self._change()
            changed_s = time.monotonic()
            async with asyncio.timeout(bound_s()):
                while takers(self.router) != self.pods.ready:
                    await asyncio.sleep(0.002)
            self.lags_s.append(time.monotonic() - changed_s)
            assert not any(client.done() for client in clients), "a client has failed"
            await asyncio.sleep(max(0.0, began_s + interval_s - time.monotonic()))
        self._is_over = True
        await asyncio.gather(*clients)

    async def _client(self, number: int) -> None:
        rng = random.Random(number)
        while not self._is_over:
            prompt = [rng.randrange(10, 10_000) for _ in range(rng.randrange(5, 30))]
            num_tokens = rng.randrange(5, 60)
            tokens, _ = await self.router.generate(prompt, num_tokens)
            assert tokens == answer(prompt, num_tokens)
            self.num_answers += 1

    async def _change(self) -> None:
        """Make one change. At least two pods stay ready."""
        pods, server = self.pods, self.pods.server
        ready = sorted(pods.ready)
        others = sorted(pods.pods.keys() - pods.ready)
        terminating = [name for name in others if pods.pods[name].terminating]
        waiting = [name for name in others if not pods.pods[name].terminating]
        kind = self.rng.choice(
            ["add"] * (len(pods.pods) < 10)
            + ["add waiting"] * (len(pods.pods) < 10)
            + ["not ready", "terminate", "terminate", "crash"] * (len(ready) > 2)
            + ["ready", "ready"] * bool(waiting)
            + ["end", "end"] * bool(terminating)
            + ["drop", "compact", "bookmark", "away"]
        )
        if kind in ("add", "add waiting"):
            await pods.add(ready=kind == "add", token_s=0.002)
        elif kind == "not ready":
            pods.change(self.rng.choice(ready), ready=False)
        elif kind == "ready":
            pods.change(self.rng.choice(waiting))
        elif kind == "terminate":
            name = self.rng.choice(ready)
            pods.workers[name].report(draining=True)
            pods.change(name, terminating=True)
        elif kind == "end":
            name = self.rng.choice(terminating)
            await until(lambda: pods.workers[name].num_running == 0)
            await pods.end(name)
        elif kind == "crash":
            await pods.end(self.rng.choice(ready))
        elif kind == "bookmark":
            server.bookmark()
        elif kind == "drop":
            server.drop()
        elif kind == "compact":
            server.compact()
            server.drop()
        elif kind == "away":
            await server.stop()
            await asyncio.sleep(0.2)
            await server.start()


@pytest.mark.timeout(1200 if SOAK else 180)
async def test_500_changes_a_minute_lose_no_request_and_the_membership_is_right(pods: Pods, start: Start) -> None:
    router = await start()
    seed = int(os.environ.get("HEADRACE_SEED", "1"))
    churn = Churn(pods, router, random.Random(seed))
    if SOAK:  # ten minutes on a machine with nothing else to do
        await churn.run(5_000, 60 / 500, lambda: 2.0)
    else:
        await churn.run(60, 0.0, lambda: patience(2.0))
    await router.until_idle()
    lags_s = sorted(churn.lags_s)
    print(
        f"{len(lags_s)} changes, {churn.num_answers} answers; membership right after p50 "
        f"{lags_s[len(lags_s) // 2] * 1000:.0f} ms, at most {lags_s[-1] * 1000:.0f} ms; seed {seed}"
    )
    assert churn.num_answers > 6
